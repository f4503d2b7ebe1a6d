"""The negative control of a hosted model: each rank attends to its own tokens alone, which is wrong on purpose.

What asks for it is a call's option `local_attention`.
"""

from collections.abc import Sequence

import torch

from ..parallel.attention import QKV, AttentionFunction, SequenceParallelAttention
from ..parallel.displaced_uneven import DisplacedUneven


class OwnTokens(SequenceParallelAttention):
    """Wrong for more than one rank."""

    def attend(self, kernel: AttentionFunction, qkv: QKV, **_: object) -> torch.Tensor:
        """As `SequenceParallelAttention.attend`, without any exchange and without the mask."""
        return kernel(qkv, qkv[0].shape[1], None)

    def whole_keys(
        self, k: torch.Tensor, v: torch.Tensor, *, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SequenceParallelAttention.whole_keys`, without any exchange."""
        return k, v


class OwnTokensHeld(DisplacedUneven):
    """The same in a pipeline: of its pass alone, so wrong for more than one patch too."""

    def attend_held(self, kernel: AttentionFunction, qkv: QKV, **_: object) -> torch.Tensor:
        """As `DisplacedUneven.attend_held`, with nothing kept and without any exchange."""
        return kernel(qkv, qkv[0].shape[1], None)
