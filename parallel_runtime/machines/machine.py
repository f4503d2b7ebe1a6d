"""A joined machine as ComfyUI's side sees it: its name, what it is told, what it says.

Owns the state of one proven connection but not its socket, which the server's thread reads and writes (server.py).
"""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import PoolError
from ..wire.protocol import ProtocolError
from .connection import Session
from .messages import (
    Beat,
    FileIdentity,
    FindFile,
    FoundFile,
    FromMachine,
    GenerationEnded,
    Introduction,
    KillGeneration,
    StartGeneration,
    to_frame,
)

MAX_UNSENT_BYTES = 1 << 20
MAX_ENDED = 64  # generations of which is known how they ended
MAX_FILES = 8  # that are remembered
FIND_S = 60.0
FIND_RATE = 25e6  # bytes a second that a slow disk is read at
LOOK_THERE = "look at what `join` prints there, and at the network between the machines"


def other_weights(path: str, identity: FileIdentity) -> str:
    """What is wrong with a copy that has the same name, size and header, and what to do."""
    alike = f"of the same {identity.size_bytes} bytes and header, with other weights"
    return f"{path} is another file than beside ComfyUI: {alike}; copy ComfyUI's file to {path}"


@dataclass(frozen=True)
class Lost:
    """The machine is gone, and why: nothing comes from it any more."""

    reason: str


class Machine:
    """One machine, from joining until it is lost, which `lost` says. Usable from any thread.

    `address` is its end of the control connection, "HOST:PORT", and `here` our host's.
    """

    def __init__(
        self, introduction: Introduction, address: str, session: Session, *, here: str, wake: Callable[[], None]
    ) -> None:
        self.name, self.devices = introduction.name, introduction.devices
        self.device_names, self.versions = introduction.device_names, introduction.versions
        self.pid = introduction.pid
        self.address, self.here = address, here
        self.lost: Lost | None = None
        self.files: dict[str, str] = {}  # by name, those that were asked for last: "" or the problem
        self._session, self._wake = session, wake
        self._unsent = bytearray()
        self._ended: OrderedDict[int, GenerationEnded] = OrderedDict()
        self._found: dict[int, FoundFile | None] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()

    def __str__(self) -> str:
        return f"machine {self.name} ({self.address})"

    def start(self, generation: StartGeneration) -> None:
        """Have ranks started. Raises PoolError when the machine is lost."""
        self._tell(generation)

    def kill(self, generation: int) -> None:
        """Have a generation ended; `ended` says when no process is left. Nothing when the machine is lost."""
        try:
            self._tell(KillGeneration(generation))
        except PoolError:
            return

    def ended(self, generation: int) -> GenerationEnded | None:
        """How a generation ended, once no process of it is left there. Never waits."""
        return self._ended.get(generation)

    def wait_ended(self, generation: int, deadline_s: float) -> bool:
        """Wait until no process of it is left there, or the machine is lost, which ends them. False when it is late."""
        with self._changed:
            return self._changed.wait_for(lambda: generation in self._ended or self.lost is not None, deadline_s)

    def find_file(self, identity: FileIdentity, content: Callable[[], str]) -> FoundFile:
        """The machine's own copy of a file; `content()` is the hash of ComfyUI's copy (files.py).

        It has a minute, and a second more for each 25 MB. Raises ValueError where it has none or another, PoolError
        when it is lost or late.
        """
        found = self._search(identity, FIND_S + identity.size_bytes / FIND_RATE)
        if not found.problem and found.content_sha256 != content():
            found = replace(found, problem=other_weights(found.path, identity))
        self.files = {**self.files, identity.name: found.problem}
        if len(self.files) > MAX_FILES:
            self.files = dict(list(self.files.items())[1:])
        if found.problem:
            raise ValueError(f"{self}: {found.problem}")
        return found

    def _search(self, identity: FileIdentity, deadline_s: float) -> FoundFile:
        number = next(self._numbers)
        with self._changed:
            self._found[number] = None
        self._tell(FindFile(number, identity))
        until = time.monotonic() + deadline_s
        with self._changed:
            try:
                while (found := self._found[number]) is None:
                    if self.lost is not None:
                        raise self._gone(self.lost)
                    if (left_s := until - time.monotonic()) <= 0:
                        raise PoolError(
                            f"{self} did not say within {deadline_s:g} s whether it has {identity.name}",
                            remedy="its disk may be slow or away; " + LOOK_THERE,
                        )
                    self._changed.wait(left_s)
            finally:
                del self._found[number]
        return found

    def _tell(self, message: object) -> None:
        with self._changed:
            if self.lost is not None:
                raise self._gone(self.lost)
            self._unsent += self._session.frame(to_frame(message))
        self._wake()

    def _gone(self, lost: Lost) -> PoolError:
        return PoolError(f"{self} is lost: {lost.reason}", remedy=LOOK_THERE)

    # For the server's thread.

    def take(self, message: FromMachine) -> None:
        """Note what the machine says. Raises ProtocolError for what it may not say now."""
        with self._changed:
            if isinstance(message, Introduction):
                raise ProtocolError("it introduces itself twice")
            if isinstance(message, GenerationEnded):
                self._ended[message.generation] = message
                if len(self._ended) > MAX_ENDED:
                    self._ended.popitem(last=False)
            elif isinstance(message, FoundFile) and message.number in self._found:  # else its caller has given up
                self._found[message.number] = message
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """Nothing is heard of the machine any more."""
        with self._changed:
            self.lost = Lost(reason)
            self._changed.notify_all()

    def beat(self) -> None:
        """Show the machine that we are here."""
        with self._changed:
            self._unsent += self._session.frame(to_frame(Beat()))

    def unsent(self) -> bytes:
        """What waits to be sent, at most 64 KiB of it; `sent` says how much has gone."""
        with self._changed:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise ProtocolError(f"it leaves {len(self._unsent)} bytes unread")
            return bytes(self._unsent[: 1 << 16])

    def sent(self, num_bytes: int) -> None:
        """The first bytes of `unsent` have gone."""
        with self._changed:
            del self._unsent[:num_bytes]
