"""All ranks of the default process group as those that share a call's heads; and ranks that exchange nothing."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.worker.own_tokens import OwnTokens


class GlooGroup(SequenceParallelAttention):
    """Counts the calls of attention that went through it."""

    def __init__(self, chunks: int = 1, *, shares: tuple[int, ...] = (), ring: bool = False) -> None:
        """`chunks`: into which heads are sent, where ranks have as many; `shares` of ranks that are unequal, the first
        of them; as a `ring` they share keys instead of heads."""
        size = dist.get_world_size()
        self.axis = Axis("ring" if ring else "ulysses", size, dist.get_rank(), dist.group.WORLD)
        of_axis = (shares[:size], ()) if ring else ((), shares[:size])
        super().__init__(**{self.axis.name: self.axis}, chunks=lambda _: chunks, shares=of_axis)
        self.attentions = 0

    def whole_keys(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """As the group."""
        self.attentions += 1
        return super().whole_keys(*tensors, **options)

    def attend(self, *arguments: Any, **options: Any) -> Tensor:
        """As the group."""
        self.attentions += 1
        return super().attend(*arguments, **options)


class OwnTokensOnly(OwnTokens, GlooGroup):
    """The negative control: each rank attends to its own tokens alone. Wrong on purpose."""
