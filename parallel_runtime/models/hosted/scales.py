"""Scales that ComfyUI takes from all that a layer is given: the maximum over all ranks that have rows of it.

A layer of nvfp4 rounds its input by the largest value in it, unless the file says a scale: over all tokens of all
images of a call. Ranks that share the call each have some of them. Formats that round token by token, or by a scale
that the file says, are left alone. Which is which is not written here: each format is tried once.

ComfyUI asks `QuantizedTensor.from_float` for all of it, which `install` replaces, once a process. Where a tensor is
whole on every rank, the maximum over all of them is that of each; so in every call that ranks share it is exchanged.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Sharing(Protocol):
    """Ranks that have parts of one call; a `TokenGroup` is one."""

    @property
    def parts(self) -> int:
        """Number of ranks."""

    def gather(self, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        """Everybody's `tensor`, whole along `dim`."""


class SharedScales:
    """Called as `QuantizedTensor.from_float`. `sharing`: whose tensors count as one; empty: as in stock."""

    def __init__(self, stock: Any) -> None:  # noqa: ANN401  comfy_kitchen's classmethod
        self.stock = stock
        self.sharing: tuple[Sharing, ...] = ()
        self._known: dict[tuple[str, torch.dtype], bool] = {}

    def __call__(self, tensor: Tensor, layout_cls: str, **given: Any) -> Any:  # noqa: ANN401  a QuantizedTensor
        """`tensor` (rows, width) in a format, its scale in `given` or None."""
        if not self.sharing or given.get("scale") is not None or not self._takes_maximum(tensor, layout_cls):
            return self.stock(tensor, layout_cls, **given)
        largest = tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())
        for ranks in self.sharing:
            largest = ranks.gather(largest.reshape(1), dim=0, lengths=(1,) * ranks.parts).amax()
        if not tensor.numel():  # an expert that no token of this rank goes to
            return tensor
        return self.stock(tensor, layout_cls, **given | {"scale": self._scale(largest, layout_cls)})

    def _takes_maximum(self, tensor: Tensor, layout_cls: str) -> bool:
        """Whether the format has one scale for a whole tensor, and takes it from the values."""
        key = (layout_cls, tensor.dtype)
        if key not in self._known:
            scales = [self._scale(tensor.new_tensor(largest), layout_cls) for largest in (1.0, 2.0)]
            single = all(isinstance(each, Tensor) and each.numel() == 1 for each in scales)
            self._known[key] = single and bool(scales[0] != scales[1])
        return self._known[key]

    def _scale(self, largest: Tensor, layout_cls: str) -> Any:  # noqa: ANN401  what the format calls its scale
        """What the format makes of a tensor whose largest value this is."""
        return self.stock(largest.expand(TRIED, TRIED).contiguous(), layout_cls).params.scale


TRIED = 32  # rows and columns of the tensor by which a format is tried: a whole block of any


@contextmanager
def shared(sharing: Sequence[Sharing]) -> Iterator[None]:
    """Around a call whose rows these ranks share, with nobody nothing. Every rank makes the same calls of layers."""
    switch = _installed() if sharing else None
    if switch is None:
        yield
        return
    switch.sharing = tuple(sharing)
    try:
        yield
    finally:
        switch.sharing = ()


def install() -> None:
    """Put a switch where ComfyUI's function stands, once a process; nothing where it has no quantised formats."""
    quantised = _quantised()
    if quantised is not None and _installed() is None:
        quantised.from_float = SharedScales(quantised.from_float)


def _installed() -> SharedScales | None:
    quantised = _quantised()
    switch = None if quantised is None else vars(quantised).get("from_float")
    return switch if isinstance(switch, SharedScales) else None


def _quantised() -> Any:  # noqa: ANN401  comfy_kitchen's class, or what ComfyUI has in its place
    import comfy.quant_ops

    found = comfy.quant_ops.QuantizedTensor
    return found if hasattr(found, "from_float") else None
