"""What hooks ask of the ranks that share a model's tokens. parallel_runtime/parallel implements it.

Letters: `B` batch, `H` heads, `S` tokens of this rank, `D` head size.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

# q, k and v. Whoever is given the list empties it, so that nobody holds what is not needed while a kernel runs.
QKV = list[Tensor]
# (qkv, heads, mask) -> (B, heads, Sq, Dv): ComfyUI's attention function, for some heads and whole keys.
Kernel = Callable[[QKV, int, Tensor | None], Tensor]


class TokenGroup(Protocol):
    """The ranks that share the tokens of one call. Lengths are planned ints, a number for each rank, in part order."""

    named: str
    """The attention kernel of a package that was asked for, "" for ComfyUI's function."""

    @property
    def parts(self) -> int:
        """Number of ranks that share the tokens."""

    @property
    def index(self) -> int:
        """This rank's part."""

    def gather(self, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        """Everybody's `tensor`, whole along `dim`, parts in order; `lengths[i]` rows of part i."""

    def whole_keys(self, k: Tensor, v: Tensor, *, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Everybody's keys and values (B, H, S, D), parts in order; `lengths[i]` tokens of part i."""

    def attend(
        self,
        kernel: Kernel,
        qkv: QKV,
        *,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: Tensor | None = None,
        scale: float | None = None,
        each_head_alone: bool = True,
        exact: bool = False,
        common: int = 0,
    ) -> Tensor:
        """Attention of this rank's queries over everybody's keys.

        `qkv`, which is emptied: q (B, Hq, Sq, D), k and v (B, Hk, Sk, D), this rank's tokens with all heads; Hq is a
        multiple of Hk. `mask`
        is broadcastable to (B, Hq or 1, all queries or 1, all keys), tokens in part order, bool or added to the scores.
        `each_head_alone`: what `kernel` makes of a head does not depend on the other heads that it is given.
        `exact`: no kernel that rounds may take its place.
        `common`: so many keys, before the Sk, are the same on every rank, and come first in `mask`.
        Returns (B, Hq, Sq, Dv). Some ranks may have no queries, none may have no keys.
        """
