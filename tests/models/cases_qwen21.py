"""Qwen-Image 2.1: 9 tokens of text, references among them, and 35 of the picture, which come last."""

from typing import Any

from torch import nn

from .tiny import Case, at, build, case, noise

CLASS = ("comfy.ldm.qwen_image21.model", "class QwenImage21Transformer2DModel")
TWO = {"ref_latents": [noise(1, 16, 4, 6), noise(1, 16, 3, 5)], "image_slots": [3, 6]}  # 24 and 15 tokens


def qwen21(head: int = 16, rope: tuple[int, ...] = (4, 6, 6)) -> nn.Module:
    """The class, 2 blocks, with 6 heads of this size."""
    sizes = {"in_channels": 16, "out_channels": 16, "num_layers": 2, "attention_head_dim": head, "axes_dims_rope": rope}
    sizes |= {"num_attention_heads": 6, "context_in_dim": 48, "mlp_ratio": 2}
    return build(".".join((CLASS[0], CLASS[1].removeprefix("class "))), **sizes)


def picture(batch: int = 1, **more: Any) -> dict[str, Any]:
    """A call."""
    given = {"x": noise(batch, 16, 5, 7), "timestep": at(*[0.7] * batch), "context": noise(batch, 9, 48)}
    return given | more


case("Qwen-Image 2.1", of=CLASS)(lambda: (qwen21(), picture()))
case("Qwen-Image 2.1, 2 references in the text", of=CLASS)(lambda: (qwen21(), picture(**TWO)))


@case("Qwen-Image 2.1, a reference behind the text, as many tokens as the picture has", of=CLASS)
def _() -> Case:
    return qwen21(), picture(ref_latents=[noise(1, 16, 5, 7)])


case("Qwen-Image 2.1, 2 pictures", of=CLASS)(lambda: (qwen21(), picture(2)))
