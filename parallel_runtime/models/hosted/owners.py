"""Which patch of a pipeline writes which numbers of a latent.

A sampler updates a latent number by number. So a patch may enter the next call as soon as it has left this one, if the
numbers that its tokens become are numbers that no other patch reads or writes. No class says so: it is found by calls
in which no block runs, with NaN in the place of what is asked about.

    written by patch p:  NaN for its tokens where the first block would run -> the numbers of the output that are NaN
    read by patch p:     NaN for all other numbers of the latent            -> no token of the patch may be NaN
    read by anything:    NaN for the whole latent, no NaN for the tokens    -> nothing else may be NaN

Letters: `B` rows, `N` numbers of a row. Owns what is asked. Does not own how a call is made (worker/steady_pipeline.py)
nor what stands in the place of blocks (stage.py).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...parallel.attention import SequenceParallelAttention
from ...parallel.kept_keys import HeldRows
from .call import TokenCall
from .pass_call import PassCall
from .stage import StagedBlocks, tensors_in, with_tensors

# (latent (B, 1, N), which ranks share a call's tokens, its state by the model's name) -> what the model says, each (B,
# 1, N)
Outputs = Callable[[Tensor, SequenceParallelAttention, Callable[[str], TokenCall]], Sequence[Tensor]]


class MixedPatchesError(ValueError):
    """No patch has numbers of the latent to itself."""


class BlocksLookedAt:
    """Stands in the place of a call's blocks: what they are given is looked at, and they return `tokens`."""

    def __init__(self, tokens: float) -> None:
        self._tokens = tokens
        self.tokens_nan = self.others_nan = False  # what blocks were given

    def __call__(self, number: int, handed: Any, others: Any) -> Any:  # noqa: ANN401
        """What block `number` is handed becomes what it hands on."""
        self.others_nan |= _has_nan(others)
        if number:
            return handed
        self.tokens_nan = _has_nan(handed)
        floats = [torch.full_like(t, self._tokens) if t.is_floating_point() else t for t in tensors_in(handed)]
        return with_tensors(handed, floats)


def find_owners(outputs: Outputs, staged: StagedBlocks, latent: Tensor, *, patches: int, parts: int) -> Tensor:
    """The patch that each number of `latent` (B, 1, N) belongs to, (N,) int32; `parts` ranks share a patch.

    This rank makes the calls of all parts by itself. Raises `MixedPatchesError` where patches cannot be told apart.
    """
    mixes = f"{staged.name} mixes the tokens of patches outside of its blocks"
    if staged.before:
        raise MixedPatchesError(mixes)
    alone = SequenceParallelAttention()

    def run(x: Tensor, part: int, tokens: float) -> tuple[BlocksLookedAt, list[Tensor]]:
        looking = BlocksLookedAt(tokens)
        deal = partial(
            PassCall,
            alone,
            patches=patches * parts,
            patch=part,
            held=HeldRows(),
            before=staged.before,
            ends=False,
        )
        with staged.looked_at(looking):
            return looking, [out.clone() for out in outputs(x, alone, deal)]

    nan = torch.full_like(latent, math.nan)
    owners = torch.zeros(latent.shape[-1:], dtype=torch.int32, device=latent.device)
    writers = torch.zeros_like(owners)  # parts that write each number
    mixed = beside = False
    for part in range(patches * parts):
        _, outs = run(latent, part, math.nan)
        mine = torch.stack([out.isnan().flatten(0, -2).any(0) for out in outs]).any(0)
        writers += mine
        owners[mine] = part // parts
        others, _ = run(torch.where(mine, latent, nan), part, 0.0)
        whole, outs = run(nan, part, 0.0)
        mixed |= others.tokens_nan or (bool(mine.any()) and not whole.tokens_nan)
        beside |= whole.others_nan or any(bool(out.isnan().any()) for out in outs)
    if beside:
        raise MixedPatchesError(f"{staged.name} gives its blocks or its output more of the latent than its tokens")
    if mixed or bool((writers != 1).any()):
        raise MixedPatchesError(mixes)
    return owners


def _has_nan(value: Any) -> bool:  # noqa: ANN401
    return any(bool(t.isnan().any()) for t in tensors_in(value) if t.is_floating_point())
