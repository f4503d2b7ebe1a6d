"""Whether the GPUs of a pool's ranks copy to each other by themselves, and why not, once such copies were seen broken.

Owns what was seen of them. Starting workers and sending them what to copy are the pool's and the worker group's.
"""

import os
from collections import Counter
from collections.abc import Sequence

from ..devices import Device


class PeerAccess:
    """Ranks use it until `leave`; `why_not` says then why they do without, else it is "".

    `checked`: workers are seen to get what others send them before they are asked for anything else.
    """

    def __init__(self, devices: Sequence[Device], *, checked: bool) -> None:
        self.checked, self.why_not = checked, ""
        self._several = max(Counter(device.machine for device in devices).values()) > 1
        self._sound_without = False

    @property
    def used(self) -> bool:
        """Whether ranks that are started from now on may use it."""
        return not self.why_not

    @property
    def suspect(self) -> bool:
        """Whether it may be what is broken, where copies are: ranks had it to use, and were checked."""
        off = os.environ.get("NCCL_P2P_DISABLE", "0") != "0"  # as a user says
        return self.checked and self.used and self._several and not off

    def leave(self, why: str) -> None:
        """Copies were seen broken, as `why` says: ranks that are started from now on do without."""
        self.why_not, self._sound_without = why, False

    def worked(self) -> None:
        """Copies were seen to arrive, by peer access or without."""
        self._sound_without = not self.used

    def try_again(self) -> None:
        """Workers failed: the next start uses it again, unless they were sound without it: nothing else says that it is
        what is broken."""
        if not self._sound_without:
            self.why_not = ""
