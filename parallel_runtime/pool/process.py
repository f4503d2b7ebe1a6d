"""One rank as the parent sees it: a process, its channel, its lifeline and the last of what it printed.

Owns spawning, the environment a rank gets, and reaping. Does not own what is said to a rank nor when it has failed
(supervisor.py).

A rank is a plain subprocess of our own entry point: no multiprocessing, which would run ComfyUI's main module again.
Its environment is written out here, because ComfyUI's own may hold what is wrong for a rank, such as the allocator that
ComfyUI chose for itself or somebody's rendezvous address.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ..compiling import compile_environment
from ..devices import Device
from ..wire.channel import Channel

PACK_ROOT = Path(__file__).resolve().parents[2]
TAIL_BYTES = 8 * 1024
SEND_TIMEOUT_S = 10.0  # a rank that leaves its messages unread that long, with a socket's buffer full, is broken
REAP_TIMEOUT_S = 10.0  # after SIGKILL; only a process stuck in a driver takes that long

# Taken over where the caller has them; nothing else is.
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES"),
    *("NVIDIA_DRIVER_CAPABILITIES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION"),
    *("CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_CACHE_PATH"),
    *("CUDA_DISABLE_PERF_BOOST", "NVIDIA_TF32_OVERRIDE", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CC", "CXX"),
)
# And all that begins so: the known ways around trouble with a board or a driver are set there. torch's variables had
# names without TORCH_ before, which it still reads; some NCCL_ ones are among them.
PASSED_ON_FAMILIES = ("NCCL_", "TORCH_NCCL_", "CUDA_MPS_")
# Of those, what makes NCCL listen, or meet others, where somebody else says.
NEVER_PASSED_ON = ("NCCL_COMM_ID", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_RAS_ADDR")
# Both backends listen where these say: nobody outside this machine can connect. No file of NCCL's changes what is set
# here (nccl_files.py). The address of its RAS subsystem is the default one.
LISTEN_HERE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_OOB_NET_IFNAME": "=lo",
    "NCCL_RAS_ADDR": "localhost:28028",
}
# What a rank has unless the caller says otherwise.
DEFAULTS = {
    # Exchanges go ahead of matrix products that would fill the device; of all groups, those of new_group included.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # The parent watches: NCCL's own monitor ends a rank whose machine was frozen for eight minutes, and
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # its watchdog, seeing a CUDA error first, aborts the process before Python has said which.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What every rank of a pool is started with. `python_path` is searched after the pack's own folder.

    Without `peer_access`, NCCL copies between GPUs through the host's memory.
    """

    devices: tuple[Device, ...]
    threads: int
    engine: str
    python_path: tuple[str, ...] = ()
    peer_access: bool = True

    @property
    def backend(self) -> str:
        """NCCL where each rank has a CUDA device of its own, gloo elsewhere."""
        distinct = len(set(self.devices)) == len(self.devices)
        return "nccl" if distinct and all(device.kind == "cuda" for device in self.devices) else "gloo"


class Output:
    """The last of what a rank printed, read as it comes so that the rank never waits. Safe to use from two threads."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._tail = bytearray()
        self._lock = threading.Lock()
        self._open = True

    def fileno(self) -> int:
        """The pipe's descriptor, for polling."""
        return self._fd

    def drain(self) -> bool:
        """Read what is there. False when nothing more will come."""
        with self._lock:
            for _ in range(16):  # a rank that prints without end must not hold the reader here
                try:
                    chunk = os.read(self._fd, 1 << 16) if self._open else b""
                except BlockingIOError:
                    return True
                if not chunk:
                    return False
                self._tail += chunk
                del self._tail[:-TAIL_BYTES]
            return True

    def text(self) -> str:
        """At most the last 8 KiB."""
        with self._lock:
            return self._tail.decode("utf-8", errors="replace").strip()

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._fd)


class RankProcess:
    """One rank's process and what ties it to us."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], channel: Channel, output: Output, *, fds: tuple[int, int]
    ) -> None:
        self.rank = rank
        self.channel = channel
        self.output = output
        self.pidfd, self._lifeline = fds
        self._process = process
        self.last_beats = 0
        self.last_heard_s = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end_text(self) -> str:
        """How the process ended: "killed by SIGKILL", "exited with code 1"; "still running" before."""
        code = self._process.returncode
        if code is None:
            # Looked at, not reaped: while it is a corpse, its process group is surely ours to kill.
            try:
                found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return "ended, and its exit was taken by other code of this process"
            if found is None:
                return "still running"
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, a debugger) holds the process."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def kill(self) -> None:
        """SIGKILL, to what the rank has started as well: inside a collective it hears nothing else."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> bool:
        """Wait for the killed process and close everything of ours. False when the system has not let go of it."""
        try:
            self._process.wait(REAP_TIMEOUT_S)
            reaped = True
        except subprocess.TimeoutExpired:
            reaped = False
        self.output.drain()
        self.output.close()
        self.channel.close()
        os.close(self._lifeline)
        os.close(self.pidfd)
        return reaped


def spawn(rank: int, settings: RankSettings, *, generation: int, store_fd: int) -> RankProcess:
    """Start one rank. `store_fd` is the empty memfd in which the ranks find each other. Raises OSError."""
    with ExitStack() as undo, ExitStack() as theirs:
        channel, far_end = Channel.pair()
        undo.callback(channel.close)
        theirs.callback(far_end.close)
        lifeline_read, lifeline_write = _pipe(near=undo, far=theirs, near_end=1)
        output_read, output_write = _pipe(near=undo, far=theirs, near_end=0)
        numbers = {
            "rank": rank,
            "ranks": len(settings.devices),
            "generation": generation,
            "parent": os.getpid(),
            "socket": far_end.fileno(),
            "lifeline": lifeline_read,
            "store": store_fd,
            "threads": settings.threads,
        }
        words = {"device": settings.devices[rank], "backend": settings.backend, "engine": settings.engine}
        arguments = [f"--{name}={value}" for name, value in {**numbers, **words}.items()]
        process = subprocess.Popen(  # noqa: S603  our own interpreter and entry, no shell
            [sys.executable, "-u", "-m", "parallel_runtime.worker.entry", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            pass_fds=(far_end.fileno(), lifeline_read, store_fd),
            cwd=PACK_ROOT,
            env=rank_environment(os.environ, settings),
            start_new_session=True,
        )
        undo.callback(process.wait)
        undo.callback(process.kill)
        pidfd = os.pidfd_open(process.pid)
        channel.set_timeout(SEND_TIMEOUT_S)
        undo.pop_all()
    return RankProcess(rank, process, channel, Output(output_read), fds=(pidfd, lifeline_write))


def rank_environment(ours: Mapping[str, str], settings: RankSettings) -> dict[str, str]:
    """A rank's whole environment, from the caller's."""
    families = {name for name in ours if name.startswith(PASSED_ON_FAMILIES)}.difference(NEVER_PASSED_ON)
    taken_over = {name: ours[name] for name in (*PASSED_ON, *sorted(families)) if name in ours}
    if taken_over.get("NCCL_CONF_FILE"):  # a rank's current folder is another
        taken_over["NCCL_CONF_FILE"] = str(Path(taken_over["NCCL_CONF_FILE"]).absolute())
    return (
        (DEFAULTS if settings.backend == "nccl" else {})
        | taken_over
        | compile_environment(taken_over)
        | ({} if settings.peer_access else {"NCCL_P2P_DISABLE": "1"})
        | {
            # Last, where the caller itself finds packages that are not installed in its environment.
            "PYTHONPATH": os.pathsep.join((str(PACK_ROOT), *settings.python_path, *_own_python_path(ours))),
            "PYTHONSAFEPATH": "1",  # not the current folder, whatever it is
            "OMP_NUM_THREADS": str(settings.threads),
        }
        | LISTEN_HERE
    )


def _own_python_path(ours: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH. A relative one, and an empty one, would be a folder of a rank's own current folder."""
    return [folder for folder in ours.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(folder)]


def _pipe(*, near: ExitStack, far: ExitStack, near_end: int) -> tuple[int, int]:
    """A pipe, read end first, neither end inherited; `near_end` (0 or 1) is the one that stays with us."""
    ends = os.pipe2(os.O_CLOEXEC)
    near.callback(os.close, ends[near_end])
    far.callback(os.close, ends[1 - near_end])
    return ends


def available_cpus() -> int:
    """The CPUs that this process may use: a container or taskset may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
