"""One rank as the parent sees it: a process, its channel, its lifeline and the last of what it printed.

Owns spawning and reaping. Does not own the environment a rank gets (environment.py), what is said to a rank, nor
when it has failed (generation.py).

A rank is a plain subprocess of our own entry point: no multiprocessing, which would run ComfyUI's main module again.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from ..devices import numbered_uuid
from ..kernel_calls import P_PIDFD, pidfd_open
from ..wire.channel import Channel
from .control_groups import most_cpus
from .environment import PACK_ROOT, RankSettings, rank_environment
from .signs import Output, ProcessWork, is_stopped, killed_by, memory_kills

SEND_TIMEOUT_S = 10.0  # a rank that leaves its messages unread that long, with a socket's buffer full, is broken
REAP_TIMEOUT_S = 10.0  # after SIGKILL; only a process stuck in a driver takes that long


class OwnedProcess:
    """A process that the parent started, and what ties it to the parent."""

    def __init__(self, process: subprocess.Popen[bytes], output: Output, *, fds: tuple[int, int]) -> None:
        self.output = output
        self.pidfd, self._lifeline = fds
        self._process = process
        self._kills_before = memory_kills()
        self._work = ProcessWork(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end_text(self) -> str:
        """How the process ended: "killed by SIGKILL", "exited with code 1"; "still running" before."""
        code = self._process.returncode
        if code is None:
            # Peek with WNOWAIT: until the zombie is reaped its PID cannot be reused, so killing its group is safe.
            try:
                found = os.waitid(P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return "ended, and its exit was taken by other code of this process"
            if found is None:
                return "still running"
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return f"exited with code {code}" if code >= 0 else killed_by(-code, kills_before=self._kills_before)

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, a debugger) holds the process."""
        return is_stopped(self.pid)

    def gets_on(self) -> bool:
        """Whether the process has done anything since this was asked last."""
        return self._work.gets_on()

    def kill(self) -> None:
        """SIGKILL, to what it has started as well: inside a collective a rank hears nothing else."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> bool:
        """Wait for the killed process and close its files here. False when the system has not let go of it."""
        try:
            self._process.wait(REAP_TIMEOUT_S)
            reaped = True
        except subprocess.TimeoutExpired:
            reaped = False
        self.output.drain()
        self.output.close()
        os.close(self._lifeline)
        os.close(self.pidfd)
        return reaped


class RankProcess(OwnedProcess):
    """One rank of this machine."""

    def __init__(self, rank: int, place: str, channel: Channel, owned: OwnedProcess) -> None:
        super().__init__(owned._process, owned.output, fds=(owned.pidfd, owned._lifeline))
        self.rank, self.place, self.channel = rank, place, channel
        self.last_beats = self.last_pulses = 0
        self.last_heard_s = self.last_pulse_s = time.monotonic()

    def is_process(self, pid: int) -> bool:
        """Whether that is the number of the rank's process."""
        return pid == self.pid

    def reap(self) -> bool:
        """As `OwnedProcess.reap`."""
        self.channel.close()
        return super().reap()


def spawn(rank: int, settings: RankSettings, *, generation: int, store_fd: int | None) -> RankProcess:
    """Start one rank. `store_fd` is the empty memfd in which the ranks find each other, where all are of this machine.

    Raises OSError.
    """
    with ExitStack() as undo, ExitStack() as theirs:
        channel, far_end = Channel.pair()
        undo.callback(channel.close)
        theirs.callback(far_end.close)
        numbers = {"rank": rank, "ranks": settings.num_ranks, "generation": generation, "threads": settings.threads}
        device = settings.devices[rank]
        words = {"device": device, "backend": settings.backend, "engine": settings.engine}
        meeting = {"store": store_fd} if settings.meeting is None else {"meet": settings.meeting.address}
        arguments = {**numbers, **words, **meeting, "uuid": numbered_uuid(device), "socket": far_end.fileno()}
        fds = (far_end.fileno(), *(() if store_fd is None else (store_fd,)))
        owned = spawn_owned("parallel_runtime.worker.entry", arguments, fds, rank_environment(os.environ, settings))
        channel.set_timeout(SEND_TIMEOUT_S)
        undo.pop_all()
    return RankProcess(rank, str(device), channel, owned)


def spawn_owned(
    module: str, arguments: Mapping[str, object], fds: Sequence[int], environment: Mapping[str, str]
) -> OwnedProcess:
    """Start a module of this pack as a process that inherits `fds` and ends with us. Raises OSError.

    Beside its arguments it gets `--parent`, our process, and `--lifeline`, what to give `lifeline.arm`.
    """
    with ExitStack() as undo, ExitStack() as theirs:
        lifeline_read, lifeline_write = _pipe(near=undo, far=theirs, near_end=1)
        output_read, output_write = _pipe(near=undo, far=theirs, near_end=0)
        given = {**arguments, "parent": os.getpid(), "lifeline": lifeline_read}
        process = subprocess.Popen(  # noqa: S603  our own interpreter and entry, no shell
            [sys.executable, "-u", "-m", module, *(f"--{name}={value}" for name, value in given.items())],
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            pass_fds=(*fds, lifeline_read),
            cwd=PACK_ROOT,
            env=dict(environment),
            start_new_session=True,
        )
        undo.callback(process.wait)
        undo.callback(process.kill)
        pidfd = pidfd_open(process.pid)
        undo.pop_all()
    return OwnedProcess(process, Output(output_read), fds=(pidfd, lifeline_write))


def _pipe(*, near: ExitStack, far: ExitStack, near_end: int) -> tuple[int, int]:
    """A pipe, read end first, neither end inherited; `near_end` (0 or 1) is the one that stays with us."""
    ends = os.pipe2(os.O_CLOEXEC)
    near.callback(os.close, ends[near_end])
    far.callback(os.close, ends[1 - near_end])
    return ends


def available_cpus() -> int:
    """The CPUs that this process may use: a container, its quota of time, or taskset may leave it fewer than the
    machine has."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), most_cpus())))
