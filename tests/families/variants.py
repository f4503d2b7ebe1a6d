"""Every variant of every family, and the writer of their files.

`FAMILIES` is a tuple of `Variant`s (variant.py): `name`, `family`, `file`, and `graph(loader=None, cfg=1.0, seed=7,
steps=3)`, a fresh stock graph in API form with "model" as its one loader. `Variant.latents` names the nodes that save
latents; `host.pack_workflows.saved_latent(client, result, node=name)` reads one.
`write_families(folder, only=names)` fills `folder`/diffusion_models with the files that those variants need.

    models = write_families(tmp_path / "models", only=["wan 2.1 t2v"])
    with ComfyServer(models=models) as server:
        client = ComfyClient(server.url)
        stock = client.queue(BY_NAME["wan 2.1 t2v"].graph(cfg=3.0))
"""

from collections.abc import Iterable
from pathlib import Path

from host.fetch import comfyui_says

from . import flux, hunyuan, ltx, lumina, minimax, more_images, qwen, qwen21, sd3, told, unet, wan, wan_animate2
from .files import ModelFile, write_model_files
from .variant import Variant

LATER = {
    wan_animate2: "WAN_Animate2",
    qwen21: "QwenImage21",
}  # of which ComfyUI's list of models has this class, or has not
NEWER = tuple(module for module, name in LATER.items() if comfyui_says("comfy.model_base", f"class {name}("))
MODULES = (wan, qwen, *NEWER, minimax, ltx, flux, hunyuan, lumina, sd3, more_images, told)
FAMILIES: tuple[Variant, ...] = tuple(variant for module in MODULES for variant in module.VARIANTS)
UNETS: tuple[Variant, ...] = unet.VARIANTS  # of which no plan shares the tokens
FILES: dict[str, ModelFile] = {file.name: file for module in (*MODULES, unet) for file in module.FILES}
KNOWN = {  # family and class of each variant, also of those that this ComfyUI has not
    variant.name: (variant.family, file.class_path)
    for module in dict.fromkeys((*MODULES, *LATER))
    for variant in module.VARIANTS
    for file in module.FILES
    if file.name == variant.file
}
BY_NAME = {variant.name: variant for variant in (*FAMILIES, *UNETS)}
SMALL = tuple(name for name, variant in BY_NAME.items() if not FILES[variant.file].only_when_full)


def write_families(folder: Path, *, only: Iterable[str] | None = None) -> Path:
    """Writes what the variants named in `only` need (default: all) and returns `folder`, a `models` folder.

    A file that is there already is kept. Raises KeyError for a name that no variant has.
    """
    names = list(BY_NAME) if only is None else list(only)
    files = dict.fromkeys(BY_NAME[name].file for name in names)
    models = folder / "diffusion_models"
    missing = [FILES[file] for file in files if not (models / file).is_file()]
    if missing:
        write_model_files(models, missing)
    return folder
