"""The failures of one pool's workers: the last one, and whether there were too many to start others by itself.

Owns the count. The wording of a failure is failure.py's; what ends and starts workers is generations.py's.
"""

import time
from collections import deque

from ..errors import PoolError

MAX_FAILURES = 3
WINDOW_S = 60.0
RELEASE = "use Release Parallel Pool, then queue again"


class Failures:
    """What went wrong, since the beginning or since `forget`. `last` is a copy without the caller's frames."""

    def __init__(self) -> None:
        self.last: PoolError | None = None
        self._times: deque[float] = deque(maxlen=MAX_FAILURES)

    def note(self, error: PoolError) -> None:
        """Remember that workers have failed."""
        # A copy: the error itself will carry the caller's frames, and with them its tensors.
        self.last = PoolError(
            error.cause, rank=error.rank, device=error.device, remedy=error.remedy, detail=error.detail
        )
        self._times.append(time.monotonic())

    def retract(self) -> None:
        """The last failure was dealt with by other workers: it neither counts nor is shown."""
        self.last = None
        if self._times:
            self._times.pop()

    def forget(self) -> None:
        """Begin anew: the user has acted."""
        self._times.clear()
        self.last = None

    def refuse_storm(self) -> None:
        """Raise PoolError when workers failed again and again: they need the user, not another start."""
        times = self._times
        if len(times) == MAX_FAILURES and times[-1] - times[0] <= WINDOW_S and self.last is not None:
            raise PoolError(
                f"the workers failed {MAX_FAILURES} times in {times[-1] - times[0]:.0f} s, "
                f"last with: {self.last.cause}",
                rank=self.last.rank,
                device=self.last.device,
                remedy=RELEASE,
                detail=self.last.detail,
            )
