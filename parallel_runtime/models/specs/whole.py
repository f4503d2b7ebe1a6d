"""ComfyUI's U-Nets, which compute every image whole: why, and which of their modules run one after another. Data.

No spec can share their tokens; cfg parallel, data parallel and spread weights need none. By the class's dotted
path. Knows no ComfyUI and no torch. Does not own what a unit of weights is (weights/block_shards.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A class that computes every image whole.

    `blocks`: its modules, or lists of them, that every call runs in the same order, so that ranks with other rows of a
    batch gather the same weights at the same time. `inner`: lists in a block whose modules are blocks of their own,
    since a block of ten transformer blocks is too large to be gathered at once.
    """

    blocks: tuple[str, ...]
    inner: tuple[str, ...] = ()


WHY = "it is a U-Net, whose convolutions need the pixels around each pixel and whose norms need the whole image"
WHOLE: Mapping[str, Whole] = {
    "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel": Whole(
        blocks=("input_blocks", "middle_block", "output_blocks"),
        inner=("transformer_blocks", "time_stack", "time_pos_embed"),
    ),
    "comfy.ldm.cascade.stage_c.StageC": Whole(blocks=("down_blocks", "up_blocks")),
    "comfy.ldm.cascade.stage_b.StageB": Whole(blocks=("down_blocks", "up_blocks")),
}


def find_whole(model_class: type) -> Whole | None:
    """What is known of a class; None for one that is not here. One derived from it may run its blocks otherwise."""
    return WHOLE.get(f"{model_class.__module__}.{model_class.__qualname__}")
