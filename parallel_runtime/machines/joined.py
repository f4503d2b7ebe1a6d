"""A joined machine's own side: one control connection after another, and the processes that it is told to start.

Owns the connection's client end and that no process of a generation outlives it. Does not own what the launcher does
(launch.py), nor the command line (cli/join.py).

A generation is a launcher and what it starts, which have MARK in their environment. Each launcher adopts what its own
processes leave behind, and this process what a dead launcher leaves: a child with that mark that is no launcher is an
orphan, and ended. Other children are not ours: a shell may have started them before it became this process by `exec`.
"""

import ctypes
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from ..kernel_calls import pidfd_open
from ..process import nccl_segments
from ..wire.protocol import ProtocolError
from ..wire.records import to_body
from .connection import CLOSED, GREETING, VERDICT, MachineChallenge, Session, in_words
from .messages import (
    FROM_SERVER,
    MAX_LINES_CHARS,
    Beat,
    FindFile,
    FoundFile,
    FromServer,
    GenerationEnded,
    Introduction,
    KillGeneration,
    Launch,
    Refused,
    StartGeneration,
    Welcome,
    from_frame,
    to_frame,
)

PACK_ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("-m", "parallel_runtime.machines.launch")
MARK = "PARALLEL_DIT_JOIN"  # the number of the process that `join` runs in
CONNECT_S = 5.0
END_S = 10.0  # after SIGKILL; only a process stuck in a driver takes that long
EXEC_S = 1.0  # a process that is about to run another program has no environment for a moment, longer on a busy machine
LOOK_S = 0.005
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class RefusedError(ValueError):
    """ComfyUI's side does not take this machine."""


class ConnectionLostError(OSError):
    """The control connection has ended, or is silent."""


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What a machine joins with. `models` are the folders where its weights lie, `comfyui` its ComfyUI or "".

    `outdated()` says what was updated since, "" for nothing: each generation's processes read it anew.
    """

    host: str
    port: int
    token: bytes
    introduction: Introduction
    models: tuple[str, ...]
    comfyui: str = ""
    outdated: Callable[[], str] = str


def adopt_orphans() -> None:
    """Have processes whose parent dies become children of this one. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans (PR_SET_CHILD_SUBREAPER)")


class Told:
    """The signals that tell this process to end: they raise KeyboardInterrupt or SystemExit, but not within `held`.

    There `fileno` alone tells of them, which can be read from the first on: a handler that raises would end the end of
    a generation half-way. It tells, too, of one that raised in a `__del__`, where Python drops exceptions.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._first, self._held = 0, False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup
                signal.signal(number, self._hear)

    def fileno(self) -> int:
        """For selectors."""
        return self._fd

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is raised within."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def end(self) -> NoReturn:
        """End as the first signal would by itself. Raises KeyboardInterrupt or SystemExit."""
        if self._first == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + self._first)

    def _hear(self, number: int, _: object) -> None:
        self._first = self._first or number
        os.eventfd_write(self._fd, 1)
        if not self._held:
            self.end()


def serve(joining: Joining, say: Callable[[str], None], told: Told) -> None:
    """Join once, and do what is asked until the connection ends or a signal tells this process to end.

    By then no process of a generation is left. Raises RefusedError, TokenRefusedError or ProtocolError where trying
    again cannot help, else ConnectionLostError.
    """
    try:
        sock = socket.create_connection((joining.host, joining.port), timeout=CONNECT_S)
    except OSError as error:
        raise ConnectionLostError(f"no answer ({error.strerror or error})") from error
    with sock:
        try:
            connection = _Connection(sock, _prove(sock, joining.token))
            connection.send(joining.introduction)
            silence_s = connection.welcome()
        except ConnectionLostError:
            raise
        except OSError as error:
            reason = f"it did not let us in ({error.strerror or error}); is this the right address and port?"
            raise ConnectionLostError(reason) from error
        say("joined; waiting for work")
        member = _Member(joining, connection, silence_s, say)
        with told.held():
            try:
                member.run(told)
            finally:
                member.close()


def _prove(sock: socket.socket, token: bytes) -> Session:
    """Both sides' proofs, within CONNECT_S."""
    until = time.monotonic() + CONNECT_S
    challenge = MachineChallenge(token)
    sock.sendall(challenge.answer(_exactly(sock, GREETING.size, until)))
    return challenge.session(_exactly(sock, VERDICT.size, until))


def _exactly(sock: socket.socket, num_bytes: int, until: float) -> bytes:
    come = b""
    while len(come) < num_bytes:
        sock.settimeout(max(0.01, until - time.monotonic()))
        if not (data := sock.recv(num_bytes - len(come))):
            raise ConnectionLostError(CLOSED)
        come += data
    return come


class _Connection:
    """The proven connection. `send` may be called from any thread."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock, self._session = sock, session
        self._lock = threading.Lock()
        self.early: list[FromServer] = []
        sock.settimeout(CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: object) -> None:
        """Send one message. Raises ConnectionLostError."""
        with self._lock:
            try:
                self.sock.sendall(self._session.frame(to_frame(message)))
            except OSError as error:
                raise ConnectionLostError(in_words(error, "it takes no message: ")) from error

    def take(self) -> list[FromServer]:
        """What has come; waits at most CONNECT_S. Raises ConnectionLostError at the end, ProtocolError."""
        if early := self.early:
            self.early = []
            return early
        try:
            data = self.sock.recv(1 << 16)
        except OSError as error:
            raise ConnectionLostError(in_words(error)) from error
        if not data:
            raise ConnectionLostError(CLOSED)
        return [from_frame(FROM_SERVER, frame) for frame in self._session.take(data)]

    def welcome(self) -> float:
        """How long silence may last. Raises RefusedError."""
        while not (come := self.take()):
            pass
        first, *self.early = come
        if isinstance(first, Refused):
            raise RefusedError(first.reason)
        if not isinstance(first, Welcome):
            raise ProtocolError(f"it said {type(first).__name__} before Welcome")
        return first.silence_s


class _Member:
    """A joined machine: what is asked, done."""

    def __init__(self, joining: Joining, connection: _Connection, silence_s: float, say: Callable[[str], None]) -> None:
        self._joining, self._connection, self._silence_s, self._say = joining, connection, silence_s, say
        self._running: dict[int, _Process] = {}
        self._answers: queue.SimpleQueue[FoundFile] = queue.SimpleQueue()
        self._answered = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection.sock, selectors.EVENT_READ, self._hear)
        self._selector.register(self._answered, selectors.EVENT_READ, self._answer)
        self._heard_s = self._beaten_s = time.monotonic()

    def __del__(self) -> None:
        os.close(self._answered)  # not in `close`: a search may still write to it

    def run(self, told: Told) -> None:
        """Until told to end, or the connection ends, which raises ConnectionLostError or ProtocolError."""
        self._selector.register(told, selectors.EVENT_READ)
        if self._connection.early:
            self._hear()
        while True:
            for key, _ in self._selector.select(self._silence_s / 16):
                if key.fileobj is told:
                    return
                # Else one before it in this round has ended it; another may have its descriptor's number by now.
                if self._selector.get_map().get(key.fileobj) is key:
                    key.data()
            now = time.monotonic()
            if now - self._heard_s > self._silence_s:
                raise ConnectionLostError(f"ComfyUI's side is silent for {self._silence_s:g} s")
            if now - self._beaten_s > self._silence_s / 4:
                self._beaten_s = now
                self._connection.send(Beat())

    def close(self) -> None:
        """End every process of every generation."""
        for process in tuple(self._running.values()):
            self._end(process)
        self._selector.close()

    def _hear(self) -> None:
        for message in self._connection.take():
            self._heard_s = time.monotonic()
            if isinstance(message, StartGeneration):
                self._start(message)
            elif isinstance(message, KillGeneration):
                if (process := self._running.get(message.generation)) is not None:
                    self._connection.send(self._end(process))
                else:
                    self._connection.send(GenerationEnded(message.generation, 0, ""))
            elif isinstance(message, FindFile):
                threading.Thread(target=self._find, args=(message,), name="find", daemon=True).start()
            elif not isinstance(message, Beat):
                raise ProtocolError(f"it said {type(message).__name__}, which was not asked for")

    def _find(self, asked: FindFile) -> None:
        try:
            from .files import find  # here: it imports torch, which only the command has done already

            answer = find(asked.number, asked.identity, self._joining.models)
        except Exception as error:  # noqa: BLE001  whatever it is, ComfyUI waits for an answer
            problem = f"the search for {asked.identity.name!r} failed: {type(error).__name__}: {error}"
            answer = FoundFile(asked.number, problem=problem[:MAX_LINES_CHARS])
        self._answers.put(answer)
        os.eventfd_write(self._answered, 1)

    def _answer(self) -> None:
        os.eventfd_read(self._answered)
        with suppress(queue.Empty):
            while True:
                self._connection.send(self._answers.get_nowait())

    def _start(self, start: StartGeneration) -> None:
        if start.generation in self._running:
            raise ProtocolError(f"it started generation {start.generation} twice")
        if not set(start.devices) <= set(self._joining.introduction.devices):
            raise ProtocolError(f"it wants ranks on {', '.join(start.devices)}, which this machine does not offer")
        if changed := self._joining.outdated():
            self._say(changed)
            self._connection.send(GenerationEnded(start.generation, -1, changed))
            return
        self._say(f"starting {len(start.devices)} ranks of {start.world_size} on {', '.join(start.devices)}")
        address = self._connection.sock.getsockname()[0]
        launch = Launch(start, self._joining.introduction.name, address, self._joining.comfyui)
        try:
            process = _Process(launch)
        except OSError as error:
            self._connection.send(GenerationEnded(start.generation, -1, f"ranks cannot be started: {error}"))
            return
        self._running[start.generation] = process
        self._selector.register(process.output, selectors.EVENT_READ, lambda: self._drain(process))
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._connection.send(self._end(process)))

    def _drain(self, process: "_Process") -> None:
        if not process.drain():
            self._selector.unregister(process.output)

    def _end(self, process: "_Process") -> GenerationEnded:
        """Kill the launcher and all that it started; what to say of it."""
        del self._running[process.generation]
        for fd in (process.output, process.pidfd):
            with suppress(KeyError):
                self._selector.unregister(fd)
        launchers = {each.pid for each in self._running.values()}
        left = process.end(others=launchers)
        stuck = f"processes {left} do not end after SIGKILL" if left else ""
        # One that was killed was told to end, or said nothing.
        why = process.last_lines().rpartition("\n")[2] if process.code > 0 else ""
        self._say("; ".join(filter(None, ("the ranks have ended", why, stuck))))
        lines = "\n".join(filter(None, (process.last_lines(), stuck)))
        process.close()
        return GenerationEnded(process.generation, process.code, lines[-MAX_LINES_CHARS:])


class _Process:
    """The launcher of one generation. Raises OSError when it cannot be started."""

    def __init__(self, launch: Launch) -> None:
        self.generation, self.code = launch.start.generation, -1
        self._tail = bytearray()
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        self.output, output = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter and module, no shell
                [sys.executable, "-u", *LAUNCHER, f"--lifeline={lifeline}", f"--parent={os.getpid()}"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(lifeline,),
                cwd=PACK_ROOT,
                env={**os.environ, MARK: str(os.getpid())},
                start_new_session=True,
            )
        except OSError:
            os.close(self._lifeline)
            os.close(self.output)
            raise
        finally:
            os.close(lifeline)
            os.close(output)
        self.pid = self._process.pid
        self.pidfd = pidfd_open(self.pid)
        os.set_blocking(self.output, False)
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # type: ignore[union-attr]
            pipe.write(json.dumps(to_body(launch)).encode())

    def drain(self) -> bool:
        """Keep the last of what is printed. False at its end."""
        with suppress(BlockingIOError):
            for _ in range(16):  # a rank that prints without end must not hold us here
                if not (data := os.read(self.output, 1 << 16)):
                    return False
                self._tail += data
                del self._tail[: -4 * MAX_LINES_CHARS]
        return True

    def last_lines(self) -> str:
        """The last that was printed."""
        return self._tail.decode("utf-8", errors="replace").strip()

    def end(self, *, others: set[int]) -> list[int]:
        """Kill the launcher, all that it started, and orphans; the processes that did not end within END_S.

        `others` are the launchers of other generations, which live on with what they have started. What NCCL has in
        /dev/shm for those that are killed goes.
        """
        until, laid_out = time.monotonic() + END_S, time.monotonic() + EXEC_S
        mine = psutil.Process(self.pid).children(recursive=True)
        # Looked for while they are mapped: NCCL removes none of a killed rank's.
        segments = nccl_segments.segments_of(process.pid for process in mine)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.code = self._process.wait()
        while left := [each for each in (*mine, *_orphans(others, laid_out)) if each.is_running()]:
            segments |= nccl_segments.segments_of(process.pid for process in left)
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            _, alive = psutil.wait_procs(left, timeout=max(0.0, until - time.monotonic()))
            if alive and time.monotonic() > until:
                nccl_segments.remove(segments)
                return [process.pid for process in alive]
        nccl_segments.remove(segments)
        self.drain()
        return []

    def close(self) -> None:
        """Close what is ours."""
        for fd in (self._lifeline, self.output, self.pidfd):
            os.close(fd)


def _orphans(launchers: set[int], laid_out: float) -> list[psutil.Process]:
    """What launchers have started and none has any more, with all that it has started; `laid_out` as of `_is_ours`."""
    children = (child for child in psutil.Process().children() if child.pid not in launchers)
    found = [child for child in children if _is_ours(child, laid_out)]
    return [*found, *(below for child in found for below in child.children(recursive=True))]


def _is_ours(child: psutil.Process, laid_out: float) -> bool:
    """Whether a launcher has started it; also of one that ends or has ended, which has no memory any more to say so,
    and is only waited for. A child without an environment is looked at until the moment `laid_out`."""
    try:
        while child.status() != psutil.STATUS_ZOMBIE and child.memory_info().vms:
            environment = child.environ()
            if environment or time.monotonic() > laid_out:
                return environment.get(MARK) == str(os.getpid())
            time.sleep(LOOK_S)
        return True
    except psutil.ZombieProcess:
        return True
    except psutil.Error:  # gone, or another user's
        return False
