"""Keys of a module's first attention in its run, which those of later ones come behind (the word "frames again")."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ...parallel.attention import QKV, AttentionFunction

if TYPE_CHECKING:
    from .call import TokenCall


@dataclass
class FirstKeys:
    """Keys and values of all ranks in the first attention of a module's run, and room for those of a later one behind.

    `lengths`: tokens of each rank among those of the first; `total`: of all of them.
    """

    lengths: Sequence[int]
    total: int
    keys: Tensor  # (B, H, total + room, D)
    values: Tensor

    def followed_by(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the first, and behind them these."""
        wanted = self.total + keys.shape[2]
        if self.keys.shape[2] < wanted:
            self.keys, self.values = (self._longer(each, wanted) for each in (self.keys, self.values))
        found = self.keys[:, :, :wanted], self.values[:, :, :wanted]
        for each, more in zip(found, (keys, values), strict=True):
            each[:, :, self.total :] = more
        return found

    def _longer(self, kept: Tensor, wanted: int) -> Tensor:
        longer = kept.new_empty((*kept.shape[:2], wanted, kept.shape[3]))
        longer[:, :, : self.total] = kept[:, :, : self.total]
        return longer


def attend_again(
    call: "TokenCall", kernel: AttentionFunction, qkv: QKV, key_lengths: Sequence[int], *, exact: bool
) -> Tensor:
    """This rank's queries, with all heads, over the keys of all ranks, of which those of the first call are kept.

    `qkv`, which is emptied: (B, H, S, D) each; the keys of the module's first call in this run come first in k, v.
    """
    q, k, v = qkv
    qkv.clear()
    kept = call.first_keys
    if kept is None:
        keys, values = call.group.whole_keys(k, v, lengths=key_lengths, exact=exact)
        call.first_keys = FirstKeys(key_lengths, keys.shape[2], keys, values)
    else:
        mine = kept.lengths[call.index]
        lengths = [now - first for now, first in zip(key_lengths, kept.lengths, strict=True)]
        more = call.group.whole_keys(k[:, :, mine:], v[:, :, mine:], lengths=lengths, exact=exact)
        keys, values = kept.followed_by(*more)
    return kernel([q, keys, values], q.shape[1], None)
