"""U-Nets, which compute each image whole: their weights spread over the ranks, rows of a batch dealt to them.

Owns small U-Nets of each class; beside stock ComfyUI they are in tests/families.
"""

from collections.abc import Callable
from typing import Any

import torch
from rounding import ROUNDING
from torch import Tensor, nn

from families.unet import CLASS
from parallel_runtime.models.block_chain import BEAT, hook_entries
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.side_branches import LowRank, SideBranches
from parallel_runtime.models.specs import WITHOUT, find_spec, spec_of
from parallel_runtime.models.specs.whole import WHOLE, find_whole
from parallel_runtime.weights.block_shards import BlockShards, blocks_of

from .gloo_group import GlooGroup
from .ranks import in_ranks, refused
from .supported import path_of
from .tiny import Case, at, build, difference, noise

SIZES = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_head_channels": 8}
SIZES |= {"num_res_blocks": [1, 1], "channel_mult": [1, 2], "context_dim": 24, "use_spatial_transformer": True}
SIZES |= {"transformer_depth": [1, 2], "transformer_depth_output": [0, 1, 2, 1], "transformer_depth_middle": 2}
SIZES |= {"legacy": False, "use_linear_in_transformer": True}
IN_TIME = {"use_temporal_resblock": True, "use_temporal_attention": True, "extra_ff_mix_layer": True}
IN_TIME |= {"use_spatial_context": True, "merge_strategy": "learned_with_images", "merge_factor": 0.0}
IN_TIME |= {"video_kernel_size": [3, 1, 1], "disable_temporal_crossattention": False}
CASCADE = {
    "c_hidden": [32, 32],
    "nhead": [4, 4],
    "blocks": [[1, 2], [2, 1]],
    "block_repeat": [[1, 1], [2, 1]],
    "c_r": 8,
}


def sdxl() -> Case:
    """With a ControlNet's residuals."""
    control = {"input": [noise(2, 32, 10, 14)], "middle": [noise(2, 64, 5, 7)], "output": [None, noise(2, 64, 5, 7)]}
    model = build(CLASS, **SIZES, num_classes="sequential", adm_in_channels=12)
    return model, {**pictures(2), "y": noise(2, 12), "control": control}


def without_a_middle() -> Case:
    """KOALA's smaller one."""
    return build(CLASS, **{**SIZES, "transformer_depth_middle": -2}), pictures(2)


def video() -> Case:
    """Two frames of SVD, which attend to each other."""
    frames = {"num_video_frames": 2, "image_only_indicator": torch.zeros(1, 2)}
    return build(CLASS, **SIZES, **IN_TIME), pictures(2) | frames


def cascade_c() -> Case:
    """Stable Cascade's first stage."""
    texts = {"c_clip_text": 24, "c_clip_text_pooled": 24, "c_clip_img": 24, "c_cond": 16}
    model = build("comfy.ldm.cascade.stage_c.StageC", **CASCADE, **texts)
    given = {"clip_text": noise(2, 9, 24), "clip_text_pooled": noise(2, 1, 24), "clip_img": noise(2, 1, 24)}
    return model, {"x": noise(2, 16, 10, 14), "r": at(0.7, 0.6), **given}


def cascade_b() -> Case:
    """Its second stage, which goes through the blocks of a level several times."""
    levels = {"level_config": ["CT", "CTA"], "self_attn": [False, True], "patch_size": 2, "c_clip": 24, "c_cond": 16}
    model = build("comfy.ldm.cascade.stage_b.StageB", **CASCADE, **levels, c_effnet=16)
    given = {"effnet": noise(2, 16, 3, 4), "clip": noise(2, 1, 24)}
    return model, {"x": noise(2, 4, 20, 28), "r": at(0.7, 0.6), **given}


def pictures(batch: int) -> dict[str, Any]:
    """A call of 14 x 10 latent pixels."""
    return {"x": noise(batch, 4, 10, 14), "timesteps": at(700.0, 650.0), "context": noise(batch, 9, 24)}


UNETS: tuple[Callable[[], Case], ...] = (sdxl, without_a_middle, video, cascade_c, cascade_b)


def called(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """One call; ComfyUI's classes empty a ControlNet's lists."""
    control = inputs.get("control")
    more = {} if control is None else {"control": {name: list(each) for name, each in control.items()}}
    return model(**{**inputs, **more}, transformer_options={})


@in_ranks(2)
def test_a_unet_whose_blocks_are_spread_runs_them_in_one_order_and_equals_itself(group: GlooGroup) -> None:
    for make in UNETS:
        model, inputs = make()
        known, title = find_whole(type(model)), make.__name__
        assert known is not None and find_spec(type(model)) is None, title
        want, blocks = called(model, inputs), blocks_of(model, known.blocks, inner=known.inner)
        spread = sum(weight.numel() for block in blocks.values() for weight in block.parameters())
        assert spread > 0.75 * sum(weight.numel() for weight in model.parameters()), f"{title}: few weights are spread"
        shards = BlockShards(blocks, group.axis, rounded={}, device=torch.device("cpu"), offloaded=False)
        list(shards.load())
        orders = []
        for _ in range(2):  # the second call has each block on its way before it is asked for
            shards.begin()
            assert difference(called(model, inputs), want) <= ROUNDING, title
            shards.end()
            orders.append(shards._ran)
        assert orders[0] == orders[1] and set(orders[0]) == set(blocks), title
        if make is sdxl:
            inner = {f"middle_block.1.transformer_blocks.{number}" for number in (0, 1)}
            assert {*inner, "middle_block.0"} <= blocks.keys() and "middle_block.1" not in blocks, "gathered one by one"
            shards._shards[orders[0][-1]].zero_()
            shards.begin()
            assert (called(model, inputs) - want).norm() > 1e-3 * want.norm(), "a block's weights do not matter"
            shards.end()


@in_ranks(2)
def test_a_lora_beside_a_block_that_is_one_layer_stays_when_hooks_come_later(group: GlooGroup) -> None:
    """The first convolution is one: its weights are gathered from loading on, its heartbeat comes by the first call."""
    model, inputs = sdxl()
    blocks = blocks_of(model, WHOLE[CLASS].blocks, inner=WHOLE[CLASS].inner)
    loras = {"input_blocks.0.0": [LowRank(noise(32, 2), noise(2, 4, 3, 3), 0, 1.0, 0.3)]}
    assert isinstance(blocks["input_blocks.0.0"], nn.Conv2d)
    side, plain = SideBranches(), called(model, inputs)
    side.have(model, loras)
    want = called(model, inputs)
    side.have(model, {})
    assert difference(want, plain) > 1e-3, "a LoRA that does nothing would show nothing"
    shards = BlockShards(blocks, group.axis, rounded={}, device=torch.device("cpu"), offloaded=False)
    list(shards.load())
    side.have(model, loras)
    for block in blocks.values():
        hook_entries(block, ("forward",), BEAT)
    for here, out in ((loras, want), ({}, plain), (loras, want)):
        side.have(model, here)
        shards.begin()
        assert difference(called(model, inputs), out) <= ROUNDING
        shards.end()


def rows_of(value: Any, first: int, length: int) -> Any:
    """The call of some of the rows."""
    if isinstance(value, dict):
        return {name: rows_of(each, first, length) for name, each in value.items()}
    if isinstance(value, list):
        return [rows_of(each, first, length) for each in value]
    return value.narrow(0, first, length) if isinstance(value, Tensor) else value


@in_ranks(2)
def test_rows_of_a_class_without_a_plan_are_computed_apart_and_its_tokens_are_refused(group: GlooGroup) -> None:
    """As cfg and data parallel deal them. A U-Net in real workers is in tests/families/test_without_a_plan.py."""
    for make in (sdxl, cascade_c, cascade_b):
        model, inputs = make()
        reason, _ = WITHOUT[path_of(type(model))]
        with refused(type(model).__name__, reason, "use cfg parallel"):
            SharedModel(model, spec_of(type(model)), group)
        want, mine = called(model, inputs), called(model, rows_of(inputs, group.index, 1))
        assert difference(group.gather(mine, dim=0, lengths=[1, 1]), want) <= ROUNDING, make.__name__
        other = called(model, rows_of(inputs, 1 - group.index, 1))
        assert difference(other, mine) > 1e-3, "rows that look alike would show nothing"
