"""Keys of a module's first attention in its run, which those of later ones come behind (the word "frames again")."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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
