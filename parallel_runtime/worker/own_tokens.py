"""The negative control of a hosted model: each rank attends to its own tokens alone, which is wrong on purpose.

A call's option `local_attention` asks for it.
"""

from collections.abc import Sequence

import torch

from ..parallel.attention import QKV, AttentionFunction, SequenceParallelAttention


class OwnTokens(SequenceParallelAttention):
    """Attention of each rank to its own tokens alone.

    Wrong for more than one rank; in a pipeline, where nothing is kept, for more than one patch too.
    """

    def attend(self, kernel: AttentionFunction, qkv: QKV, **_: object) -> torch.Tensor:
        """As `SequenceParallelAttention.attend`, without any exchange and without the mask."""
        return kernel(qkv, qkv[0].shape[1], None) if qkv[0].shape[2] else qkv[0]

    def whole_keys(
        self, k: torch.Tensor, v: torch.Tensor, *, lengths: Sequence[int], exact: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SequenceParallelAttention.whole_keys`, without any exchange."""
        return k, v
