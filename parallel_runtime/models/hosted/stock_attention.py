"""ComfyUI's attention function as it is: the kernel that attends with some of the heads to whole keys.

Letters: `B` batch, `H` heads, `S` tokens, `D` head size. Owns the call of the function, its containers, and which
kernel attended. Does not own what of it ranks share (attention.py).
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.attention import QKV
from ...parallel.kernels import ATTENDED
from ...parallel.named_kernels import attend_heads, may_attend
from .sdpa import backend_of, failed, falling_back, may_fall_back
from .stock_functions import overriding

TORCHS = "pytorch"  # ComfyUI's function that has torch attend
# In the name of a function that leaves out blocks of keys by how tokens lie in a whole image, which ranks do not have.
SPARSE = "sol"
# ComfyUI's functions that compute each head without the others, to the last bit. Others were not looked at.
EACH_HEAD_ALONE = frozenset(f"attention_{name}" for name in ("pytorch", "flash", "xformers", "sage"))


class StockAttention:
    """ComfyUI's function `stock`, and the class of its containers, where it has one."""

    def __init__(self, stock: Callable[..., Tensor], container: type | None) -> None:
        self.stock = stock
        self.container: Any = container or ()  # without a class no tensor is in one
        self._ran: dict[tuple[object, ...], str] = {}  # by what the choice of a kernel depends on, what attended

    def __call__(
        self,
        q: Any,  # noqa: ANN401  a tensor, or a container of one; k and v too
        k: Any,  # noqa: ANN401
        v: Any,  # noqa: ANN401
        heads: int,
        mask: Any,  # noqa: ANN401
        attn_precision: torch.dtype | None,
        skip_reshape: bool,
        skip_output_reshape: bool,
        options: dict[str, Any],
    ) -> Tensor:
        """As ComfyUI's function. Where torch raises in it, once more by the fallback (sdpa.py), which stays then.

        What came in containers is held for that until a call of its kind has succeeded; after that it is freed as soon
        as stock frees it, so such a call that raises is not repeated.
        """
        tensors = [self.peek(each) for each in (q, k, v)]
        own = _of_file(options)
        by = overriding(options) or ("" if own is None else title_of(own))
        kind = (
            *(by, *((each.dtype, each.device.type, each.ndim, each.shape[-1]) for each in tensors)),
            *(heads, skip_reshape and tensors[1].shape[1], mask is None),
        )
        known = self._ran.get(kind)
        name = by or self._name(tensors, heads, mask, skip_reshape) if known is None else known
        if known is not None or not may_fall_back():
            tensors.clear()
        try:
            out = self.stock(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not may_fall_back():
                raise
            owned = isinstance(q, self.container)
            if owned and not tensors:
                with falling_back(error):
                    pass
                raise
            tensors = tensors or [q, k, v]
            with falling_back(error):
                given = map(self.container, tensors) if owned else tensors
                out = self.stock(*given, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options)
            self._ran.clear()
            name = by or self._name(tensors, heads, mask, skip_reshape)
        self._ran[kind] = name
        ATTENDED.add(name)
        return out

    def heads(
        self,
        qkv: QKV,
        heads: int,
        mask: Tensor | None,
        *,
        attn_precision: torch.dtype | None,
        options: dict[str, Any],
        owned: bool,
        named: str,
    ) -> Tensor:
        """As an `AttentionFunction`, with the options of a call of ComfyUI's function.

        `owned`: the tensors came in containers, so the function gets them in some, and frees them as soon as it can.
        `named`: the kernel of a package that was asked for, "" for the function.
        """
        given = {**options, "enable_gqa": True} if qkv[1].shape[1] != qkv[0].shape[1] else options
        q, k, v = qkv
        if named and mask is None and attn_precision is None and may_attend(named, exact=is_exact(options)):
            out = attend_heads(named, q, k, v, scale=options.get("scale"))
            if out is not None:
                qkv.clear()
                return out
        q, k, v = map(self.container, qkv) if owned else qkv
        qkv.clear()
        out = self(q, k, v, heads, mask, attn_precision, True, True, given)
        if not isinstance(out, Tensor):
            raise TypeError(f"ComfyUI's attention function returned a {type(out).__name__} instead of a tensor")
        return out

    def each_head_alone(self, options: dict[str, Any]) -> bool:
        """Whether the function that will attend computes a head alike whatever other heads it is given.

        All ranks answer alike: a function that the file asks for may be there on some of their cards alone.
        """
        if getattr(options.get("preferred_attention"), "config", None) is not None or overriding(options):
            return False
        function = _of_file(options) or self.stock
        return getattr(function, "__name__", "") in EACH_HEAD_ALONE

    def peek(self, given: Any, title: str = "attention") -> Tensor:  # noqa: ANN401  a tensor, or a container of one
        """The tensor, which stays in its container. By the container's class: a tensor has a `take` of its own.

        Raises `ValueError` for a container whose tensor was taken; `title` is what was given it.
        """
        if not isinstance(given, self.container):
            return given
        tensor: Tensor | None = given.tensor
        if tensor is None:
            raise ValueError(
                f"{title} was given a container whose tensor another call has taken already; report the model and the "
                "node"
            )
        return tensor

    def take(self, given: Any, title: str = "attention") -> Tensor:  # noqa: ANN401
        """The tensor, out of its container."""
        tensor = self.peek(given, title)
        return tensor if tensor is given else given.take()

    def _name(self, tensors: list[Tensor], heads: int, mask: Tensor | None, by_heads: bool) -> str:
        """For the report of this process: ComfyUI's function, with the kernel that torch takes."""
        name = title_of(self.stock)
        if name != TORCHS:
            return name
        if not by_heads:
            width = tensors[0].shape[-1] // heads if tensors[0].ndim == 3 else tensors[0].shape[-1]
            tensors = [split_heads(each, width) for each in tensors]
        q, k, v = tensors
        backend = backend_of(sys.modules["comfy.ops"], q, k, v, mask)
        return f"{name}: {backend}{failed()}" if backend else f"{name}{failed()}"


def _of_file(options: dict[str, Any]) -> Callable[..., Tensor] | None:
    """The function that a layer's file names for it, which attends in the place of ComfyUI's; None for none."""
    return getattr(options.get("preferred_attention"), "function", None)


def attend_to_all(module: nn.Module) -> None:
    """Have the layers attend to all tokens whose file asks for a function that does not."""
    layers: list[Any] = [each for each in module.modules() if type(each).__name__ == "ComfyAttention"]
    for each in layers:
        if each.function is not None and SPARSE in title_of(each.function):
            each.function = None


def title_of(function: Callable[..., Tensor]) -> str:
    """The name of one of ComfyUI's attention functions, for users; of one with arguments that a file gives, its own."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", "attention").removeprefix("attention_")


def is_exact(options: dict[str, Any]) -> bool:
    """Whether a model says of a call that no kernel that rounds may compute it."""
    return options.get("low_precision_attention") is False


def split_heads(tensor: Tensor, width: int) -> Tensor:
    """(B, S, H * D) or (B, S, H, D) to (B, H, S, D)."""
    heads = tensor.shape[-1] // width if tensor.dim() == 3 else tensor.shape[2]  # reshape infers none of no elements
    return tensor.reshape(*tensor.shape[:2], heads, width).transpose(1, 2)
