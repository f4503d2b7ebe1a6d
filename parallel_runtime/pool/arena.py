"""Where a request's tensors lie: one after another in the generation's segment, in a further one when they do not fit.

Owns the layout of shared memory on the parent's side. Does not own the memory itself (wire/channel.py), nor who may
write it when: a request's area is written again only after all ranks have answered it (crew.py).
"""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..wire.channel import CONTROL_BYTES, Segment, SegmentTable
from ..wire.protocol import ALIGNMENT, TensorSpec
from .failure import system_error

OUT = "out"
# A further segment is a multiple of this, so that sizes that creep up do not each need a new one.
GROWTH_BYTES = 1 << 24


@dataclass(frozen=True)
class Extent:
    """A tensor to find a place for: a torch dtype's name without "torch.", and a shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Arena:
    """Places tensors in the segments of one generation.

    `announce(index, fd, num_bytes, drop)` tells the ranks about a further segment and the one that it replaces.
    """

    def __init__(self, table: SegmentTable, *, announce: Callable[[int, int, int, list[int]], None]) -> None:
        self._table = table
        self._announce = announce
        self._further = 0  # index of the further segment; 0: none yet. Indices are never used again

    def place(self, tensors: Mapping[str, torch.Tensor], results: Sequence[Extent] = ()) -> tuple[TensorSpec, ...]:
        """Copy `tensors` into shared memory and leave room for the results, which are the last entries.

        Raises ProtocolError (a ValueError) for what cannot travel, PoolError when there is no memory to be had.
        """
        extents = [Extent(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        extents.extend(results)
        specs, end = lay_out(extents, segment=0, start=CONTROL_BYTES)
        if end > self._table[0].num_bytes:
            specs, end = lay_out(extents, segment=self._further, start=0)
            if not self._further or end > self._table[self._further].num_bytes:
                self._replace_further(end)
                specs, _ = lay_out(extents, segment=self._further, start=0)
        for spec in specs[: len(tensors)]:
            _copy(self._table.tensor(spec), tensors[spec.name])
        return specs

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """A copy of a tensor, in memory of its own: the next request overwrites the segment."""
        view = self._table.tensor(spec)
        return _copy(torch.empty_like(view), view)

    def _replace_further(self, num_bytes: int) -> None:
        index, dropped = self._further + 1, [self._further] if self._further else []
        num_bytes = -(-num_bytes // GROWTH_BYTES) * GROWTH_BYTES
        try:
            segment, fd = Segment.create(num_bytes)
        except OSError as error:
            raise system_error(f"no shared memory of {num_bytes} bytes", error) from error
        try:
            for old in dropped:
                self._table.drop(old)
            self._table.add(index, segment)
            self._further = index
            self._announce(index, fd, num_bytes, dropped)
        finally:
            os.close(fd)


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy into a contiguous CPU tensor of the same dtype and shape.

    By memmove where the source allows it: `copy_` wakes a team of threads for more than 32,768 elements, which takes
    milliseconds while the ranks keep the processors busy, where one thread moves 2 MiB in 0.2 ms.
    """
    if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        return target
    return target.copy_(source.detach())


def lay_out(extents: list[Extent], *, segment: int, start: int) -> tuple[tuple[TensorSpec, ...], int]:
    """Entries for `extents` from byte `start` on, each aligned, and the byte after the last."""
    specs = []
    for extent in extents:
        spec = TensorSpec(extent.name, extent.dtype, extent.shape, segment, start)
        specs.append(spec)
        start += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(specs), start


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
