"""All ranks of the default process group as those that share a call's heads; and ranks that exchange nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.overlap import SharedHeads
from parallel_runtime.worker.own_tokens import OwnTokens


class GlooGroup(SequenceParallelAttention):
    """Counts the calls of attention that went through it, and those whose heads may go in chunks (`divisible`)."""

    def __init__(self, chunks: int = 1, *, shares: tuple[int, ...] = (), ring: bool = False) -> None:
        """`chunks`: into which heads are sent, where ranks have as many; `shares` of ranks that are unequal, the first
        of them; as a `ring` they share keys instead of heads."""
        size = dist.get_world_size()
        self.axis = Axis("ring" if ring else "ulysses", size, dist.get_rank(), dist.group.WORLD)
        of_axis = (shares[:size], ()) if ring else ((), shares[:size])
        super().__init__(**{self.axis.name: self.axis}, chunks=self._into, shares=of_axis)
        self._chunks_of_call, self.attentions, self.divisible = chunks, 0, 0

    def _into(self, heads: SharedHeads) -> int:
        self.divisible += heads.groups >= 2 * heads.ranks
        return self._chunks_of_call

    def whole_keys(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """As the group."""
        self.attentions += 1
        return super().whole_keys(*tensors, **options)

    def attend(self, *arguments: Any, **options: Any) -> Tensor:
        """As the group."""
        self.attentions += 1
        return super().attend(*arguments, **options)


@contextmanager
def pairs_in_a_ring() -> Iterator[tuple[SequenceParallelAttention, SequenceParallelAttention]]:
    """Of four ranks, of which each two share heads, and the pairs a ring: heads sent at once, and in two chunks."""
    rank, axes, made = dist.get_rank(), list[Axis](), list[dist.ProcessGroup]()
    for name, groups in {"ring": ([0, 2], [1, 3]), "ulysses": ([0, 1], [2, 3])}.items():
        for members in groups:
            made.append(dist.new_group(members))
            if rank in members:
                axes.append(Axis(name, 2, members.index(rank), made[-1]))
    ring, ulysses = axes
    try:
        yield tuple(SequenceParallelAttention(ring=ring, ulysses=ulysses, chunks=lambda _, n=n: n) for n in (1, 2))
    finally:
        for group in made:
            dist.destroy_process_group(group)


class OwnTokensOnly(OwnTokens, GlooGroup):
    """The negative control: each rank attends to its own tokens alone. Wrong on purpose."""
