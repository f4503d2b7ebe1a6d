"""Ranks of a real server: they import what ComfyUI imports, and what they do without is said in log and report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

from families.hosted import WAN, ours
from families.variants import write_families
from host.client import ComfyClient
from host.fetch import comfyui_path
from host.server import ComfyServer
from parallel_runtime.report.schema import validate

# A pack that adds an option which no rank's parser has, and sets one to what cannot be sent.
ADDS_OPTIONS = """
import comfy.cli_args, comfy_kitchen, logging
comfy.cli_args.parser.add_argument("--of-a-pack", type=int, default=0)
comfy.cli_args.args.of_a_pack = 7
comfy.cli_args.args.force_fp32 = object()
logging.warning("ComfyUI imported %s", comfy_kitchen.__path__[0])
NODE_CLASS_MAPPINGS = {}
"""


def as_of_version_99(name: str, folder: Path) -> Path:
    """A folder with a package as it is installed, which says that it is version 99."""
    spec = importlib.util.find_spec(name)
    shutil.copytree(Path(spec.origin).parent, folder / name, copy_function=os.symlink)
    about = folder / f"{name}-99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 99.0\n")
    return folder


def test_ranks_search_where_comfyui_does_and_say_which_options_and_packages_they_do_without(tmp_path: Path) -> None:
    """A folder of packages has a name relative to where ComfyUI was started; a pack has ComfyUI search one of its own,
    which no rank knows of."""
    told = as_of_version_99("comfy_kitchen", tmp_path / "told")
    of_a_pack = as_of_version_99("einops", tmp_path / "of_a_pack")
    pack = tmp_path / "of_others"
    pack.mkdir()
    (pack / "__init__.py").write_text(ADDS_OPTIONS)
    (pack / "prestartup_script.py").write_text(f"import sys; sys.path.insert(0, {str(of_a_pack)!r})")
    environment = {"START_EACH_RANK": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}  # ranks start as a user's do
    environment["PYTHONPATH"] = os.path.relpath(told, comfyui_path())
    models = write_families(tmp_path / "models", only=[WAN.name])
    flags = ("--deterministic", "--reserve-vram", "1")
    with ComfyServer(models=models, packs=(pack,), flags=flags, environment=environment) as server:
        graph = ours(WAN.graph(seed=1, steps=1), "cfg 2", loader="ParallelModelLoader", sampler="ParallelSampler")
        (report,) = ComfyClient(server.url).queue(graph).require_success().outputs["sampler"]["parallel_dit"]
        log = server.log
    validate(report)
    assert f"ComfyUI imported {told}/comfy_kitchen" in log
    assert set(report["options"]["workers"]) == {"--use-pytorch-cross-attention", "--deterministic", "--of-a-pack"}
    assert {"--reserve-vram", "--port", "--force-fp32"} <= set(report["options"]["comfyui_alone"])
    for said in ("workers run without --force-fp32 of", "cpu:0, cpu:1: workers run without --of-a-pack:"):
        assert log.count(said) == 1, said
    (warning,) = [text for text in report["warnings"] if "workers have" in text]
    installed = importlib.metadata.version("einops")
    assert warning.startswith(f"cpu:0, cpu:1: workers have einops {installed}, and ComfyUI has einops 99.0; leave one")
    assert warning in log
