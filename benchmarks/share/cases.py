"""Which models there are by name: published widths with a few blocks, and the tests' small files for a CPU.

Blocks of a model are alike, so a file with some of them says what the others take. Values are random, as everywhere;
the published depth is for what a whole step would be. Owns the sizes; the files are written by tests/families.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published model: ComfyUI's class and its arguments with few blocks, its published depth, and the usual call.

    `told`: of a class whose files say their sizes themselves.
    """

    class_path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    told: bool = False
    depth: int
    width: int
    height: int
    frames: int | None = None
    text_tokens: int = 512


# By the class's own defaults where nothing is named. Depths of ComfyUI's detection for the published files.
CASES = {
    "flux.1": Case(
        class_path="comfy.ldm.flux.model.Flux",
        arguments={
            **{"in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072},
            **{"mlp_ratio": 4.0, "num_heads": 24, "depth": 1, "depth_single_blocks": 2, "axes_dim": [16, 56, 56]},
            **{"theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": []},
        },
        depth=57,
        width=1024,
        height=1024,
    ),
    "qwen-image": Case(
        class_path="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
        arguments={"num_layers": 2},
        depth=60,
        width=1328,
        height=1328,
    ),
    "wan 14b": Case(
        class_path="comfy.ldm.wan.model.WanModel",
        arguments={
            **{"model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 2},
            **{"in_dim": 16, "out_dim": 16, "freq_dim": 256, "text_dim": 4096},
        },
        depth=40,
        width=832,
        height=480,
        frames=81,
    ),
    "z-image": Case(
        class_path="comfy.ldm.lumina.model.NextDiT",
        arguments={
            **{"dim": 3840, "n_heads": 30, "n_kv_heads": 30, "n_layers": 3, "cap_feat_dim": 2560, "in_channels": 16},
            **{"patch_size": 2, "qk_norm": True, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]},
            **{"rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0},
            **{"pad_tokens_multiple": 32},
        },
        depth=34,
        width=1024,
        height=1024,
    ),
    "ltx-2": Case(
        class_path="comfy.ldm.lightricks.av_model.LTXAVModel",
        arguments={
            **{"num_layers": 2, "rope_type": "split", "frequencies_precision": "float64"},
            **{"use_middle_indices_grid": True, "timestep_scale_multiplier": 1000, "causal_temporal_positioning": True},
        },
        told=True,
        depth=48,
        width=1280,
        height=704,
        frames=121,
    ),
    "minimax h3": Case(
        class_path="comfy.ldm.minimax.model.MiniMaxH3Model",
        arguments={"num_layers": 2},
        depth=50,
        width=1280,
        height=736,
        frames=90,
    ),
}


def names() -> list[str]:
    """Those of published widths, then the tests' small files."""
    see_tests()
    from families.variants import BY_NAME

    return [*CASES, *BY_NAME]


def write(name: str, folder: Path, dtype: str) -> Path:
    """The file of a case, in `folder`: one that is there is taken. Raises `ValueError` for a name that there is not."""
    see_tests()
    from families.variants import BY_NAME, write_families

    if name in CASES:
        path = folder / f"{name.replace(' ', '_').replace('.', '_')}.safetensors"
        return path if path.is_file() else write_case(CASES[name], path, dtype)
    if name not in BY_NAME:
        raise ValueError(f"--model {name}: no file and no case of that name; use one of {', '.join(names())}")
    return write_families(folder, only=[name]) / "diffusion_models" / BY_NAME[name].file


def write_case(case: Case, path: Path, dtype: str) -> Path:
    """A case's file as `path`, which is there whole or not at all."""
    see_tests()
    import torch

    from families.files import ModelFile, write_model_files

    given: dict[str, Any] = {"class_path": case.class_path, "arguments": case.arguments}
    given |= {"dtype": getattr(torch, dtype), "told": tuple(case.arguments) if case.told else ()}
    (written,) = write_model_files(path.parent / f"{path.stem}.new", [ModelFile(name=path.name, **given)])
    os.replace(written, path)
    written.parent.rmdir()
    return path


def see_tests() -> None:
    """Have modules of the tests importable."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))


def comfyui_of_tests() -> str | None:
    """The ComfyUI that the tests use, where the tests are at hand; None where the pack is in one itself."""
    if ROOT.parent.name == "custom_nodes":
        return None
    see_tests()
    from host.fetch import comfyui_path

    return str(comfyui_path())
