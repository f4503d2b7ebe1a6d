"""What every rank checks of classes without a plan: a call's rows, dealt to ranks as cfg and data parallel deal them.

As checks.py, whose list these are added to. A U-Net in real workers is in tests/families/test_without_a_plan.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs import WITHOUT, find_spec, spec_of
from parallel_runtime.parallel.shard import split_lengths

from .checks import check, refused
from .gloo_group import GlooGroup
from .ranks import difference
from .supported import path_of
from .tiny import at, build, noise

ROWS = 4  # more than ranks, which 3 do not divide


def unet() -> tuple[nn.Module, dict[str, Any]]:
    """Stable Diffusion: two levels."""
    sizes = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1]}
    sizes |= {"channel_mult": [1, 2], "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1]}
    sizes |= {
        "transformer_depth_middle": 1,
        "num_heads": 4,
        "context_dim": 48,
        "use_spatial_transformer": True,
        "legacy": False,
    }
    model = build("comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel", **sizes)
    return model, {"x": noise(ROWS, 4, 10, 14), "timesteps": at(700, 300, 20, 900), "context": noise(ROWS, 9, 48)}


def stage_c() -> tuple[nn.Module, dict[str, Any]]:
    """Stable Cascade, the stage that follows the prompt."""
    sizes = {"c_cond": 64, "c_hidden": [64, 64], "nhead": [4, 4], "blocks": [[1, 1], [1, 1]], "c_clip_text": 48}
    model = build("comfy.ldm.cascade.stage_c.StageC", **sizes, c_clip_text_pooled=32, c_clip_img=40)
    given = {"x": noise(ROWS, 16, 10, 14), "r": at(0.9, 0.5, 0.2, 0.7), "clip_text": noise(ROWS, 9, 48)}
    given |= {"clip_text_pooled": noise(ROWS, 1, 32), "clip_img": noise(ROWS, 1, 40), "sca": torch.zeros(ROWS)}
    return model, given | {"crp": torch.zeros(ROWS)}


def stage_b() -> tuple[nn.Module, dict[str, Any]]:
    """Stable Cascade, the stage that enlarges."""
    sizes = {"c_cond": 64, "c_hidden": [32, 64], "nhead": [-1, 4], "blocks": [[1, 1], [1, 1]], "c_clip": 32}
    sizes |= {"block_repeat": [[1, 1], [1, 1]], "level_config": ["CT", "CTA"], "dropout": [0.0, 0.0]}
    model = build("comfy.ldm.cascade.stage_b.StageB", **sizes)
    given = {"x": noise(ROWS, 4, 12, 16), "r": at(0.9, 0.5, 0.2, 0.7), "effnet": noise(ROWS, 16, 3, 4)}
    return model, given | {"clip": noise(ROWS, 1, 32), "sca": torch.zeros(ROWS)}


WHOLE = (unet, stage_c, stage_b)


def rows_of(inputs: dict[str, Any], start: int, length: int) -> dict[str, Tensor]:
    """The call of some of the rows."""
    return {name: value.narrow(0, start, length) for name, value in inputs.items()}


@check
def rows_of_a_class_without_a_plan_are_computed_apart_and_its_tokens_are_refused(group: GlooGroup) -> None:
    lengths = split_lengths(ROWS, group.parts)
    start = sum(lengths[: group.index])
    for make in WHOLE:
        model, inputs = make()
        reason, _ = WITHOUT[path_of(type(model))]
        assert find_spec(type(model)) is None
        with refused(type(model).__name__, reason, "use cfg parallel"):
            SharedModel(model, spec_of(type(model)), group)
        want = model(**inputs)
        mine = model(**rows_of(inputs, start, lengths[group.index]))
        assert difference(group.gather(mine, dim=0, lengths=lengths), want) <= 1e-5, make.__name__
        other = model(**rows_of(inputs, 0, lengths[group.index]))
        if start:
            assert difference(other, mine) > 1e-3, "rows that look alike would show nothing"
