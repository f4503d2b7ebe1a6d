"""Stands for `SequenceParallelAttention` over gloo: all keys and values are gathered, or nothing is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.parallel.attention import QKV, AttentionFunction
from parallel_runtime.parallel.collectives import Axis


class GlooGroup:
    """All ranks of the default process group."""

    def __init__(self) -> None:
        self.parts, self.index = dist.get_world_size(), dist.get_rank()
        self.named = ""  # no kernel was asked for
        self.attentions = self.most_keys = 0

    @property
    def axis(self) -> Axis:
        """An axis of all ranks."""
        return Axis("all", self.parts, self.index, dist.group.WORLD)

    def gather(self, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        """Whole along `dim`."""
        shapes = [(*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]) for length in lengths]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = tensor.new_empty(sum(sizes))
        dist.all_to_all_single(received, tensor.flatten().repeat(self.parts), sizes, [tensor.numel()] * self.parts)
        return torch.cat([part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)], dim)

    def whole_keys(self, k: Tensor, v: Tensor, *, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Everybody's."""
        self.attentions += 1
        keys, values = (self.gather(each, dim=2, lengths=lengths) for each in (k, v))
        return keys, values

    def attend(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        *,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: Tensor | None = None,
        scale: float | None = None,
        each_head_alone: bool = True,
        exact: bool = False,
        common: int = 0,
        kept: None = None,
    ) -> Tensor:
        """All heads of this rank's queries over everybody's keys, behind those that each rank has."""
        self.attentions += 1
        q, k, v = qkv
        qkv.clear()
        here = [each[:, :, :common] for each in (k, v)]
        others = [self.gather(each[:, :, common:], dim=2, lengths=key_lengths) for each in (k, v)]
        k, v = (torch.cat(each, 2) for each in zip(here, others, strict=True))
        if mask is not None and mask.shape[2] > 1:
            mask = mask.narrow(2, sum(query_lengths[: self.index]), query_lengths[self.index])
        return kernel([q, k, v], q.shape[1], mask) if q.shape[2] else q


class OwnTokensOnly(GlooGroup):
    """The negative control: each rank attends to its own tokens alone. Wrong on purpose."""

    def attend(self, kernel: AttentionFunction, qkv: QKV, **_: object) -> Tensor:
        """Without exchange and without the mask."""
        return kernel(qkv, qkv[0].shape[1], None) if qkv[0].shape[2] else qkv[0]

    def whole_keys(self, k: Tensor, v: Tensor, *, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Its own."""
        return k, v


def chunks_of(number: int, _: object) -> int:
    """For `SequenceParallelAttention`: heads go in so many chunks, whether or not they pay."""
    return number
