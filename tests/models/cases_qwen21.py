"""Qwen-Image 2.1: 9 tokens of text, references among them, and 35 of the picture, which come last."""

from typing import Any

from torch import nn

from .tiny import Case, at, build, case, noise

CLASS = ("comfy.ldm.qwen_image21.model", "class QwenImage21Transformer2DModel")
# Of 36 tokens of the picture each of 2 ranks has 18 and each of 3 has 12; of 35 only some of the ranks have as many.
AS_RANKS = {"ref_latents": [noise(1, 16, 3, 6), noise(1, 16, 3, 4)], "image_slots": [3, 6]}
TWO = {"ref_latents": [noise(1, 16, 4, 6), noise(1, 16, 3, 5)], "image_slots": [3, 6]}  # 24 and 15 tokens


def qwen21(head: int = 16, rope: tuple[int, ...] = (4, 6, 6), gain: float = 1.0) -> nn.Module:
    """The class, 2 blocks, with 6 heads of this size. `gain`: of attention and its gates, by which what is wrong with
    one reference shows in the picture."""
    sizes = {"in_channels": 16, "out_channels": 16, "num_layers": 2, "attention_head_dim": head, "axes_dims_rope": rope}
    sizes |= {"num_attention_heads": 6, "context_in_dim": 48, "mlp_ratio": 2}
    model = build(".".join((CLASS[0], CLASS[1].removeprefix("class "))), **sizes)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and ("attn" in name or "modulation" in name):
            weight.mul_(gain)
    return model


def picture(batch: int = 1, **more: Any) -> dict[str, Any]:
    """A call."""
    given = {"x": noise(batch, 16, 5, 7), "timestep": at(*[0.7] * batch), "context": noise(batch, 9, 48)}
    return given | more


case("Qwen-Image 2.1", of=CLASS)(lambda: (qwen21(), picture()))
case("Qwen-Image 2.1, 2 references in the text", of=CLASS)(lambda: (qwen21(), picture(**TWO)))


@case("Qwen-Image 2.1, a reference behind the text, as many tokens as the picture has", of=CLASS)
def _() -> Case:
    return qwen21(), picture(ref_latents=[noise(1, 16, 5, 7)])


@case("Qwen-Image 2.1, references of as many tokens as each rank has of the picture", of=CLASS)
def _() -> Case:
    return qwen21(gain=3), picture(x=noise(1, 16, 6, 6), **AS_RANKS)


@case("Qwen-Image 2.1, references of as many tokens as some ranks have of the picture", of=CLASS)
def _() -> Case:
    return qwen21(gain=3), picture(**AS_RANKS)


case("Qwen-Image 2.1, 2 pictures", of=CLASS)(lambda: (qwen21(), picture(2)))
