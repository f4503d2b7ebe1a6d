"""The real engine for a PixArt of another width, and one that leaves out attention's arithmetic, for counting.

ComfyUI's detection takes every PixArt for 1,152 wide. A rank finds this module through `python_path`.
"""

from typing import Any

import torch

from parallel_runtime.models.hosted.attention import installed
from parallel_runtime.models.hosted.comfyui import import_comfyui
from parallel_runtime.parallel import ring
from parallel_runtime.wire.protocol import Message, Op
from parallel_runtime.worker.engine import Engine


def no_arithmetic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: object = None,
    attn_precision: object = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **_: object,
) -> torch.Tensor:
    """As ComfyUI's function by its shapes; the output is q."""
    if not skip_reshape:
        q = q.reshape(*q.shape[:2], heads, -1).transpose(1, 2)
    out = q.clone()
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def no_arithmetic_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the ring."""
    return q, q.new_zeros((*q.shape[:3], 1))


class NarrowEngine(Engine):
    """As the real one; a PixArt is as wide as its file says."""

    def handle(self, message: Message, **told: Any) -> object:  # noqa: ANN401  as Engine's
        """As the real one."""
        if message.op is Op.LOAD:
            import_comfyui(message.body.spec.comfyui, self.device)
            import comfy.model_detection as detection

            stock = detection.detect_unet_config

            def detect(weights: dict[str, torch.Tensor], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
                found = stock(weights, *arguments, **options)
                found["hidden_size"] = weights["x_embedder.proj.bias"].shape[0]
                return found

            detection.detect_unet_config = detect
        return super().handle(message, **told)


class CountedEngine(NarrowEngine):
    """The same without the arithmetic of attention."""

    def handle(self, message: Message, **told: Any) -> object:  # noqa: ANN401  as Engine's
        """As the real one."""
        if message.op is Op.STEP:
            installed().kernel.stock = no_arithmetic
            ring.attention_with_lse = no_arithmetic_with_lse
        return super().handle(message, **told)
