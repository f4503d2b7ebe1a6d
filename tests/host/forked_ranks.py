"""Ranks, test hosts and scripts that are forked from a process which has imported what they import first.

To import torch costs each rank 2 s of a core, and a ComfyUI with what its ranks are forked from 10 s. `fork_ranks()`
has this process start what PROGRAMS names so from then on, where the system allows it; everything else that it starts,
it starts as before. What is forked runs its command line as a fresh interpreter would: its descriptors, environment,
folder, session and command line are its own, and it is a child of the process that asked, not of the one that it was
forked from. Tests of how these start and end do without. Forked ranks, and what counts a class or looks for its plan,
take the sizes that a file tells (told_sizes.py). Beside a forked ComfyUI or launcher stands one that forks its ranks,
without imports.

`python -m host.forked_ranks FD` is the process that forks; it ends when the other end of its socket FD closes.
"""

import array
import atexit
import ctypes
import gc
import importlib
import itertools
import json
import os
import platform
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ENTRY = "parallel_runtime.worker.entry"
TOLD = {ENTRY, "parallel_runtime.worker.finding", "parallel_runtime.models.hosted.reference"}  # sizes
COMFYUI = "main.py"
LAUNCHER = "parallel_runtime.machines.launch"  # of a further machine's ranks
WITH_PACK = "parallel_runtime.cli.with_pack"  # ComfyUI without a server, of commands
# Modules that are run with -m, and scripts by their names.
OURS = {ENTRY, LAUNCHER, "parallel_runtime.worker.by_torchrun", "parallel_runtime.machines.relay"}
OURS |= {"benchmarks.gpu", "benchmarks.share"}
OURS |= {"parallel_runtime", WITH_PACK} | TOLD
# Beside these stands a process that forks their ranks.
WITH_RANKS = {COMFYUI, LAUNCHER, "parallel_runtime", WITH_PACK, "benchmarks.gpu"}
PROGRAMS = OURS | {*(COMFYUI, "models.ranks", "trace_samplers.py", "comfy_classes.py", "loaded_comfyui.py")}
ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
CLONE_PARENT, SIGCHLD, SYS_CLONE = 0x8000, 17, 56
PR_SET_PDEATHSIG = 1  # the option of prctl(2)
THREAD_BYTES = 2048  # of glibc's record of a thread, in which it keeps the thread's number
MOST_BYTES, MOST_FDS = 1 << 16, 64
ROOM = 2048  # for a rank's command line
# What ComfyUI's modules import: 3 of the 4 s that a rank would take for them, and 5 of the 7 s of a ComfyUI.
FOR_COMFYUI = (
    "torch._dynamo transformers torchvision torchaudio scipy.integrate scipy.signal einops comfy_kitchen "
    "spandrel kornia av aiohttp.web sqlalchemy.orm alembic.command pydantic_settings psutil comfy_aimdo.model_vbar "
    "transformers.models.clip.tokenization_clip transformers.models.qwen2.tokenization_qwen2 "
    "transformers.models.t5.tokenization_t5 transformers.models.llama.tokenization_llama "
    "transformers.models.byt5.tokenization_byt5"
)
FORKS = "FORKS_RANKS"  # a variable of a forked ComfyUI: its number, and the socket of what forks its ranks
THREADS = "OMP_NUM_THREADS"  # read when torch is imported
HERE = sys.platform == "linux" and platform.machine() == "x86_64"

enabled = False


class _Forking:
    """The process that forks, started when the first is to be forked."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def fork(self, order: dict[str, Any], fds: Sequence[int]) -> int:
        """The process id of what was forked by that order, with these descriptors."""
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with self._lock:
            there = self._ready()
            try:
                there.sendmsg([json.dumps(order).encode()], passed)
            except BrokenPipeError:  # a joined machine kills all its children when a generation of ranks ends
                there.close()
                self._socket = there = self._start()
                there.sendmsg([json.dumps(order).encode()], passed)
            answer = there.recv(64)
        if not answer:
            raise OSError("the process that forks has ended")
        return int(answer)

    def _ready(self) -> socket.socket:
        if self._socket is None or self._pid != os.getpid():
            pid, _, fd = os.environ.get(FORKS, "").partition(" ")
            self._socket = socket.socket(fileno=int(fd)) if pid == str(os.getpid()) else self._start()
            self._pid = os.getpid()
        return self._socket

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, THREADS: "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
        PLAIN_POPEN(
            [sys.executable, "-u", "-m", "host.forked_ranks", str(theirs.fileno()), "-" * ROOM],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            env=environment,
        )
        theirs.close()
        return ours


class EndWithParent:
    """A `preexec_fn` by which a program gets SIGTERM when the process that made this ends; one that is forked, too.

    It heeds SIGINT, which a shell has what it starts in the background ignore, tests and all that they start among it.
    """

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._prctl = ctypes.CDLL(None).prctl  # looked up here, since a forked child should not import

    def __call__(self) -> None:
        """Have the kernel send it. Of a thread's child it would, too, when that thread ends: see `watch`."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._parent:  # it ended before we asked
            os.kill(os.getpid(), signal.SIGTERM)

    @staticmethod
    def watch(parent: int) -> None:
        """In a program that was forked for process `parent`: a thread sends it."""
        ends = os.pidfd_open(parent)

        def end() -> None:
            select.select([ends], [], [])
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=end, name="ends-with-parent", daemon=True).start()


PLAIN_POPEN = subprocess.Popen
FORKING = _Forking()


class Popen(PLAIN_POPEN):  # type: ignore[misc,type-arg]
    """`subprocess.Popen`; what PROGRAMS names is forked while `enabled`."""

    def __init__(self, args: Any, *more: Any, **settings: Any) -> None:
        self._asked = settings
        super().__init__(args, *more, **settings)

    def _execute_child(self, args: Any, *more: Any) -> None:
        if not (enabled and _can_be_forked(args, self._asked)):
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        # In the order of the standard library: descriptors of pipes, -1 where there is none.
        read_in, write_in, read_out, write_out, read_error, write_error = more[9:15]
        given = (read_in, write_out, write_error)
        fds = [number if fd == -1 else fd for number, fd in enumerate(given)] + sorted(self._asked.get("pass_fds", ()))
        order = {
            "command": list(args),
            "env": dict(os.environ if self._asked.get("env") is None else self._asked["env"]),
            "cwd": str(self._asked.get("cwd") or os.getcwd()),
            "numbers": [0, 1, 2, *fds[3:]],
            "new_session": bool(self._asked.get("start_new_session")),
            "ends_with": os.getpid() if self._asked.get("preexec_fn") else 0,
        }
        self.pid = FORKING.fork(order, fds)
        self._child_created = True
        self._close_pipe_fds(read_in, write_in, read_out, write_out, read_error, write_error)  # type: ignore[attr-defined]


def _program(command: Sequence[str]) -> int | None:
    """Where a command line of Python names its module or script; None for one with options of Python's."""
    first = 1 + ("-u" in command[1:2])
    first += "-m" in command[first : first + 1]
    return first if first < len(command) and not command[first].startswith("-") else None


def _can_be_forked(command: object, asked: Mapping[str, Any]) -> bool:
    """Whether it is a program of PROGRAMS, of this interpreter and of this copy of the pack, and nothing is odd."""
    if not isinstance(command, list | tuple) or not all(isinstance(part, str) for part in command):
        return False
    if not command or command[0] != sys.executable or (place := _program(command)) is None:
        return False
    if command[place] in OURS:  # a copy of the pack has its own modules
        return Path(asked.get("cwd") or "").resolve() == ROOT
    if Path(command[place]).name not in PROGRAMS or not isinstance(asked.get("preexec_fn"), EndWithParent | None):
        return False
    environment = os.environ if asked.get("env") is None else asked["env"]
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    others = any(Path(path).resolve() not in (ROOT, TESTS) for path in paths)  # whose modules stand in place of some
    on_gpus = Path(command[place]).name == COMFYUI and "--cpu" not in command  # it sets variables before torch
    return not others and not on_gpus and environment.get(THREADS) == "1"


def fork_ranks() -> None:
    """Have this process fork the ranks of its pools, and test hosts, unless START_EACH_RANK is in its environment."""
    global enabled  # noqa: PLW0603  a switch of the tests' own
    enabled = HERE and "START_EACH_RANK" not in os.environ
    subprocess.Popen = Popen  # type: ignore[misc]


def start_ranks() -> None:
    """Have this process start them again as everybody does."""
    global enabled  # noqa: PLW0603
    enabled = False


def is_forked(pid: int) -> bool:
    """Whether a process was: after its command line there is the room that this would have had."""
    return len(Path(f"/proc/{pid}/cmdline").read_bytes()) > ROOM


def serve(fd: int) -> None:
    """Import what most import, then fork one for each order until nobody can send one."""
    from . import forked_ranks  # as those know it that are forked; this is __main__

    subprocess.Popen = forked_ranks.Popen  # type: ignore[misc]  torch's agent, which starts a launcher's ranks, keeps it
    import torch.distributed

    import parallel_runtime.worker.engine  # noqa: F401

    for name in FOR_COMFYUI.split():
        with suppress(ImportError):  # another ComfyUI comes with other packages
            importlib.import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or a collection in what is forked copies every page
    fork_each(socket.socket(fileno=fd), _command_line())


def fork_each(orders: socket.socket, room: tuple[int, int]) -> None:
    """Fork one for each order until nobody can send one. `room` is where this process's command line lies."""
    number = _thread_number()
    while True:
        data, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, MOST_FDS)
        if not data:
            return
        order, (begins, begun) = json.loads(data), os.pipe()
        pid = ctypes.PyDLL(None).syscall(SYS_CLONE, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            number.value = os.getpid()  # as fork() of the C library would, which knows no CLONE_PARENT
            ctypes.pythonapi.PyOS_AfterFork_Child()
            if order["new_session"]:
                os.setsid()
            os.close(begun)
            _become(order, fds, room)
        os.close(begun)
        os.read(begins, 1)  # it has its session: who kills its group at once finds it
        for each in (*fds, begins):
            os.close(each)
        orders.send(str(pid).encode())


def _thread_number() -> ctypes.c_int:
    """Where the C library keeps this thread's number."""
    library = ctypes.CDLL(None)
    library.pthread_self.restype = ctypes.c_void_p
    return number_in(library.pthread_self(), os.getpid())


def number_in(record: int, number: int) -> ctypes.c_int:
    """Where the C library's record of a thread, at that address, has its number.

    It begins eight bytes, and addresses fill theirs: the upper half of 0x7f23aee00740 is a process id, too.
    """
    for offset in range(0, THREAD_BYTES, 8):
        found = ctypes.c_int.from_address(record + offset)
        if found.value == number:
            return found
    raise RuntimeError("the C library keeps a thread's number elsewhere; tests must start ranks one by one")


def _command_line() -> tuple[int, int]:
    """Where this process's command line lies, from and to."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])


def _become(order: dict[str, Any], fds: list[int], room: tuple[int, int]) -> NoReturn:
    """Run the program that the command line names as a fresh interpreter would, as far as it can tell."""
    code = 1
    try:
        _place(fds, order["numbers"])
        for below, above in itertools.pairwise((*sorted(order["numbers"]), 1 << 16)):
            os.closerange(below + 1, above)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        place = _program(order["command"])
        assert place is not None
        _write_command_line(order["command"], room)
        name, is_module = order["command"][place], order["command"][place - 1] == "-m"
        if name in TOLD:
            from .told_sizes import tell_sizes_when_imported

            tell_sizes_when_imported()
        # What was imported before the fork stays frozen: to look at it is to copy every page of it. What comes later is
        # never frozen, so a model that is dropped is found by any collection.
        gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
        if Path(name).name in WITH_RANKS:
            _fork_ranks_beside(room)
        if name in WITH_RANKS:
            from . import forked_ranks  # this program's module is __main__

            forked_ranks.FORKING._ready()  # before a launcher takes its environment away
            forked_ranks.fork_ranks()
        sys.dont_write_bytecode = bool(order["env"].get("PYTHONDONTWRITEBYTECODE"))
        paths = filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))
        first = order["cwd"] if is_module else str(Path(name).resolve().parent)
        sys.path[:] = [first, *paths, *(path for path in sys.path if _is_library(path))]
        sys.argv = list(order["command"][place:])
        if order["ends_with"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            EndWithParent.watch(order["ends_with"])
        code = _run(name, is_module=is_module)
    except BaseException:  # noqa: BLE001  the end of the process, whatever it was
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(name: str, *, is_module: bool) -> int:
    """Run it to its end, and all that waits for the end of an interpreter; returns the exit status."""
    code = 0
    if (measuring := sys.modules.get("measured_process")) is not None and name not in measuring.FORKS:
        measuring.follow()  # of `make coverage`
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)  # noqa: T201  as an interpreter does
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _fork_ranks_beside(room: tuple[int, int]) -> None:
    """Fork, before there are threads, what forks this ComfyUI's ranks, and say in its environment how to ask it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            ours.close()
            _write_command_line([sys.executable, "-m", "host.forked_ranks"], room)
            fork_each(theirs, room)
        finally:
            os._exit(0)
    theirs.close()
    os.environ[FORKS] = f"{os.getpid()} {ours.detach()}"


def _write_command_line(command: Sequence[str], room: tuple[int, int]) -> None:
    line = b"\0".join(part.encode() for part in command)[: room[1] - room[0] - 1]
    ctypes.memmove(room[0], line.ljust(room[1] - room[0], b"\0"), room[1] - room[0])


def _place(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers that the command line says, none of them over another."""
    above = [os.dup(fd) for fd in fds]
    while min(above) <= max(numbers):  # dup gives the lowest free one
        above = [os.dup(fd) for fd in above]
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)


def _is_library(path: str) -> bool:
    return bool(path) and not path.startswith(str(ROOT)) or "site-packages" in path


if __name__ == "__main__":
    serve(int(sys.argv[1]))
