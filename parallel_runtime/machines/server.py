"""Where further machines join: one socket on one address, and a thread that reads, writes and watches.

Owns which machines are let in and which have gone. Does not own what a machine is told (machine.py), nor the bytes
(connection.py).

What a stranger without the token can do is bounded: `MAX_STRANGERS` connections at a time, of which the oldest goes for
a new one, `CHALLENGE_S` for each, and `ANSWER.size` bytes that are read of it. Nothing it sends is parsed further.
"""

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..errors import PoolError
from ..plan import MAX_RANKS
from ..process.environment import interface_of
from ..wire.protocol import ProtocolError
from .connection import (
    ANSWER,
    CLOSED,
    REFUSAL,
    ServerChallenge,
    Session,
    TokenRefusedError,
    in_words,
    join_address,
    listen_address,
    split_address,
)
from .machine import Machine
from .messages import FROM_MACHINE, Introduction, Refused, Versions, Welcome, from_frame, to_frame
from .versions import difference

SILENCE_S = 20.0
CHALLENGE_S = 5.0
MAX_STRANGERS = 32
MAX_REFUSALS = 8  # that are remembered
TICK_S = 0.25
READ_BYTES = 1 << 16
BIND_REMEDIES = {errno.EADDRINUSE: "give another port", errno.EACCES: "give a port from 1024 on"}
JOIN = "on each further machine run: python -m parallel_runtime join {} --token-file FILE"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """An address of this machine, "HOST:PORT", and how many further machines to wait for."""

    address: str
    count: int

    @classmethod
    def parse(cls, text: str) -> "Offer | None":
        """Read `HOST:PORT` or `HOST:PORT, 2`; None for nothing. Raises `ValueError` on anything else."""
        if not text.strip():
            return None
        address, count = cls.address_in(text), text.partition(",")[2].strip()
        split_address(address)
        if count and not (count.isascii() and count.isdigit() and 1 <= int(count) < MAX_RANKS):
            raise ValueError(
                f"machines={text!r} waits for {count!r} machines; write HOST:PORT, or HOST:PORT, N with N from 1 to "
                f"{MAX_RANKS - 1}"
            )
        return cls(address, int(count or 1))

    @staticmethod
    def address_in(text: str) -> str:
        """What stands where the address is to stand."""
        return text.partition(",")[0].strip()


class _Connection:
    """One accepted socket: a stranger's until `session`, of an unknown machine until `machine`."""

    def __init__(self, sock: socket.socket, host: str, port: int, token: bytes) -> None:
        self.sock, self.host, self.address = sock, host, join_address(host, port)
        self.challenge = ServerChallenge(token)
        self.answer = bytearray()
        self.session: Session | None = None
        self.machine: Machine | None = None
        self.since_s = self.heard_s = self.beaten_s = time.monotonic()


class MachineServer:
    """Listens on `address`, "HOST:PORT" with a literal IP address, for machines that have `token`.

    `versions` is what a machine must have. A machine that is silent for `silence_s` is lost, and gives us up when we
    are. Raises ValueError for an address that is not one interface's, or that its workers would not listen on, OSError
    when it cannot be listened on.
    """

    def __init__(self, address: str, token: bytes, *, versions: Versions, silence_s: float = SILENCE_S) -> None:
        host, port = listen_address(address)
        self._token, self._versions, self.silence_s = token, versions, silence_s
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            interface_of(self._listener.getsockname()[0])
            self._listener.listen(MAX_STRANGERS)
        except ValueError:
            self._listener.close()
            raise
        except OSError as error:
            self._listener.close()
            remedy = BIND_REMEDIES.get(error.errno or 0, "give an address of this machine")
            raise OSError(error.errno, f"machines cannot join at {address}: {error.strerror}; {remedy}") from error
        self._listener.setblocking(False)
        bound = self._listener.getsockname()
        self.host, self.port = bound[0], bound[1]
        self.address = join_address(self.host, self.port)
        self._connections: list[_Connection] = []
        self._machines: tuple[Machine, ...] = ()
        self.refusals: deque[str] = deque(maxlen=MAX_REFUSALS)
        self._changed = threading.Condition()
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wake_fd))
        self._thread = threading.Thread(target=self._serve, name="machines", daemon=True)
        self._thread.start()

    def machines(self) -> tuple[Machine, ...]:
        """Those that are here, in order of joining."""
        return self._machines

    def wait_for(self, count: int, deadline_s: float) -> tuple[Machine, ...]:
        """The machines, once there are `count`. Raises PoolError after `deadline_s`, with what was refused."""
        until = time.monotonic() + deadline_s
        while len(self._machines) < count:
            left_s = until - time.monotonic()
            if left_s <= 0:
                refused = f" (refused: {'; '.join(self.refusals)})" if self.refusals else ""
                joined = f"{len(self._machines)} of {count} machines joined at {self.address} within {deadline_s:g} s"
                raise PoolError(joined + refused, remedy=JOIN.format(self.address))
            with self._changed:
                self._changed.wait(min(left_s, TICK_S))
        return self._machines

    def close(self) -> None:
        """Stop listening and let all machines go; they end what they run."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # closed
            os.eventfd_write(self._wake_fd, 1)

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(TICK_S):
                    key.data(key.fileobj)
                for connection in tuple(self._connections):
                    self._guarded(connection, self._tick)
        finally:
            for connection in tuple(self._connections):
                self._drop(connection, "ComfyUI's side has closed")
            self._selector.close()
            self._listener.close()
            os.close(self._wake_fd)

    def _accept(self, _: object) -> None:
        try:
            sock, (host, port, *_rest) = self._listener.accept()
        except OSError as error:  # it has gone already, or we have no descriptor left for it
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(TICK_S)  # it waits, so `select` does not
            return
        sock.setblocking(False)
        strangers = [each for each in self._connections if each.machine is None]
        if len(strangers) >= MAX_STRANGERS:
            self._drop(strangers[0], "")
        connection = _Connection(sock, host, port, self._token)
        self._connections.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._guarded(connection, self._read))
        self._guarded(connection, lambda each: _send_whole(each.sock, each.challenge.greeting))

    def _guarded(self, connection: _Connection, do: Callable[[_Connection], None]) -> None:
        """Do something with a connection; it is dropped for whatever is wrong with it."""
        if connection not in self._connections:
            return
        try:
            do(connection)
        except (BlockingIOError, InterruptedError):
            return
        except TokenRefusedError as error:
            with suppress(OSError):
                _send_whole(connection.sock, REFUSAL)
            self._refuse(connection, str(error))
        except (ProtocolError, OSError) as error:
            reason = in_words(error) if isinstance(error, OSError) else str(error)
            self._drop(connection, reason)

    def _read(self, connection: _Connection) -> None:
        wanted = READ_BYTES if connection.session else ANSWER.size - len(connection.answer)
        data = connection.sock.recv(wanted)
        if not data:
            raise ProtocolError(CLOSED)
        if connection.session is None:
            connection.answer += data
            if len(connection.answer) < ANSWER.size:
                return
            verdict, connection.session = connection.challenge.session(bytes(connection.answer))
            _send_whole(connection.sock, verdict)
            return
        for frame in connection.session.take(data):
            connection.heard_s = time.monotonic()
            message = from_frame(FROM_MACHINE, frame)
            if connection.machine is not None:
                connection.machine.take(message)
            else:
                self._admit(connection, message, connection.session)
                if connection not in self._connections:
                    return

    def _admit(self, connection: _Connection, message: object, session: Session) -> None:
        """Take a machine that introduces itself, or refuse it in words."""
        if not isinstance(message, Introduction):
            raise ProtocolError("it did not introduce itself first")
        reason = difference(self._versions, message.versions) or self._taken(connection, message)
        if not reason and len(self._machines) >= MAX_RANKS - 1:
            reason = f"{len(self._machines)} machines have joined, and a pool has at most {MAX_RANKS} ranks"
        if reason:
            _send_whole(connection.sock, session.frame(to_frame(Refused(reason))))
            self._refuse(connection, f"{message.name}: {reason}")
            return
        connection.machine = Machine(message, connection.address, session, here=self.host, wake=self._wake)
        _send_whole(connection.sock, session.frame(to_frame(Welcome(self.silence_s))))
        others = (line for line in self.refusals if not line.startswith(f"{connection.host}: "))
        self.refusals = deque(others, MAX_REFUSALS)
        with self._changed:
            self._machines += (connection.machine,)
            self._changed.notify_all()
        _log.info("%s has joined with %s", connection.machine, ", ".join(message.device_names))

    def _taken(self, connection: _Connection, newcomer: Introduction) -> str:
        """Why the name is another machine's. The same one that comes back before it was missed replaces itself."""
        for other in tuple(self._connections):
            if other.machine is None or other.machine.name != newcomer.name:
                continue
            is_itself = other.machine.pid == newcomer.pid and other.host == connection.host
            if not is_itself and time.monotonic() - other.heard_s < self.silence_s / 2:
                return f"a machine called {newcomer.name} has joined from {other.host}; give this one another --name"
            self._drop(other, "it has joined again")
        return ""

    def _tick(self, connection: _Connection) -> None:
        """Send what waits, show life, and give up machines of which nothing is heard."""
        now = time.monotonic()
        machine = connection.machine
        if machine is None:
            if now - connection.since_s > CHALLENGE_S:
                raise ProtocolError(f"it did not prove itself within {CHALLENGE_S:g} s")
            return
        if now - connection.heard_s > self.silence_s:
            raise ProtocolError(f"nothing was heard of it for {self.silence_s:g} s")
        if now - connection.beaten_s > self.silence_s / 4:
            connection.beaten_s = now
            machine.beat()
        while data := machine.unsent():
            machine.sent(connection.sock.send(data))

    def _refuse(self, connection: _Connection, reason: str) -> None:
        line = f"{connection.host}: {reason}"
        if line not in self.refusals:
            self.refusals.append(line)
            _log.warning("a machine was refused: %s", line)
        self._drop(connection, reason)

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if (machine := connection.machine) is not None:
            with self._changed:
                self._machines = tuple(each for each in self._machines if each is not machine)
                self._changed.notify_all()
            machine.lose(reason)
            _log.warning("%s is lost: %s", machine, reason)


def _send_whole(sock: socket.socket, data: bytes) -> None:
    """Send a little to a socket whose buffer is empty. Raises OSError where even that does not fit."""
    if sock.send(data) != len(data):
        raise BrokenPipeError("it takes no message")
