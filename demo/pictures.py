"""The demo's pictures, (B, 3, 128, 128) fp32 in 0..1, and what each shows as numbers. Which combinations there are is
words.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .words import Combination

SIZE = 128


def as_indices(combinations: Sequence[Combination], device: torch.device) -> torch.Tensor:
    """(N, 3) of thing, colour and place."""
    return torch.tensor([(each.thing, each.colour, each.place) for each in combinations], device=device)
