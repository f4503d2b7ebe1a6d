"""Masks of attention over whole tokens, made of those that a model made from this rank's.

Cuts none: what of a mask a rank needs is cut where it attends (parallel/attention.py).
"""

import torch
from torch import Tensor

from ..specs.words import Attention
from .call import TokenCall


def whole_mask(
    call: TokenCall, attention: Attention, mask: Tensor, queries: tuple[int, ...], keys: tuple[int, ...], held: int
) -> Tensor:
    """A mask (B, H or 1, all queries or 1, all keys), gathered where a model made it from this rank's tokens.

    `held`: the keys that this rank had before those of an uncut stream were left to the first.
    """
    while mask.ndim < 4:
        mask = mask.unsqueeze(0 if mask.ndim == 2 else 1)
    if mask.shape[-1] == held != sum(keys):
        if mask.shape[-2] != 1:
            raise ValueError(
                f"{call.name}: a mask of {mask.shape[-2]} queries x {mask.shape[-1]} keys holds this rank's keys "
                "alone; use cfg parallel or data parallel for this input"
            )
        return call.gather_keys(attention, call.counted(attention.keys, mask, 3), dim=3, lengths=keys)
    if not _has_own_rows(call, mask, queries):
        return mask
    return call.gather_rows(mask, dim=2, lengths=queries)


def window_mask(mask: Tensor, window: int, tokens: int) -> Tensor:
    """(1, 1, tokens, tokens): a mask that a model added to its own tokens, as it would have made it for all."""
    at = torch.arange(tokens, device=mask.device)
    out = torch.zeros(1, 1, tokens, tokens, device=mask.device, dtype=mask.dtype)
    return out.masked_fill_((at[:, None] - at).abs() > window, torch.finfo(mask.dtype).min)


def _has_own_rows(call: TokenCall, mask: Tensor, queries: tuple[int, ...]) -> bool:
    """Whether a mask has a row for each query of this rank, and neither for those of all ranks nor one row for all.

    All ranks must say the same, and a rank with one query cannot know: then they tell each other what they have. Where
    all have one query and one row, each may take the row for its own.
    """
    rows = mask.shape[-2]
    if rows == sum(queries) or 1 not in queries:
        return rows == queries[call.index] != sum(queries)
    told = call.gather_rows(torch.tensor([rows], device=mask.device), dim=0, lengths=(1,) * call.parts)
    return tuple(told.tolist()) == tuple(call.of_chunk(queries))
