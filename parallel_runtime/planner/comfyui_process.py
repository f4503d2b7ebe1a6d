"""A process in which ComfyUI's own module is counted, described and run alone: found, started, asked, ended.

Owns where a ComfyUI lies and the asking side; the answers are models/hosted/reference.py's. This process never imports
ComfyUI.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from .. import pack_folder
from ..checkpoint import ComfyUI
from ..devices import STOCK_NODES, missing_system
from ..process.temporary_folders import TemporaryFolder
from ..redact_paths import with_short_home

PACK_ROOT = Path(__file__).parents[2]
# The attention that GPUs have anyway; ComfyUI's default for a CPU is slower and would flatter plans.
OPTIONS = ("--use-pytorch-cross-attention",)
ENDING_S = 10
CLOCK = 3  # times its limit: how long a process may live that others keep from computing
TICK_S = 0.2  # between two looks at whether an answer is still wanted
ITS_PYTHON = "run this with the Python that runs ComfyUI, and see that ComfyUI starts"


def find_comfyui(told: str | None) -> ComfyUI:
    """The ComfyUI of a folder, or the one whose custom_nodes this pack lies in. Raises `ValueError` where none is."""
    if told is None:
        pack = pack_folder(os.environ)
        if pack.parent.name != "custom_nodes":
            raise ValueError(
                f"this model needs ComfyUI's own modules, and this pack, in {with_short_home(str(pack))}, is not "
                "in the custom_nodes of a ComfyUI; name the folder of ComfyUI's main.py with --comfyui PATH"
            )
        path = pack.parents[1]
    else:
        path = Path(os.path.expanduser(told)).absolute()  # ~NAME of no user stays as it is
    if not os.path.isfile(path / "comfy" / "model_base.py"):
        raise ValueError(
            f"{path} has no comfy/model_base.py; name the folder that ComfyUI's main.py lies in with --comfyui PATH"
        )
    return ComfyUI(str(path), OPTIONS)


def version_of(comfyui: ComfyUI) -> str:
    """Its version as it writes it; "" for one from before it wrote any."""
    file = Path(comfyui.path) / "comfyui_version.py"
    found = re.search(r'__version__ = "([^"]*)"', file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[1] if found else ""


ANSWERS = "parallel_runtime.models.hosted.reference"


class NotStartedError(ValueError):
    """There is no room for the process's files now."""


class NoAnswerError(ValueError):
    """The process ended, or ran out of time, before it had answered."""


class ComfyUIProcess:
    """A process with ComfyUI imported, until `close`. `folder` is for tensors that go between.

    `counting`: it answers "count", for which ComfyUI's attention is replaced as in the workers, and nothing else.
    `program`: the module that answers. `limit_s`: how long it may live where it has the CPU to itself: that long by the
    clock and by what it computed, `CLOCK` times as long by the clock alone. `tick`: called with the seconds since it
    was started while an answer is waited for. What `tick` raises, and the end of its time, end it and what it started.

    Raises `ValueError` for what it refuses, also when it is made: a ComfyUI that cannot be imported; `NoAnswerError`
    when it ends instead, or has no more time.
    """

    def __init__(
        self,
        comfyui: ComfyUI,
        device: str,
        *,
        counting: bool = False,
        program: str = ANSWERS,
        limit_s: float | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> None:
        if (missing := missing_system()) is not None:
            raise ValueError(f"{missing}; {STOCK_NODES}")
        self.comfyui = comfyui
        self._limit_s, self._tick, self._began_s = limit_s, tick, time.monotonic()
        try:
            self._folder = TemporaryFolder()
        except OSError as error:
            raise NotStartedError(
                f"no temporary folder can be made ({error.strerror}); free some space there, or set TMPDIR to a folder "
                "that can be written"
            ) from error
        self.folder = self._folder.path
        try:
            self._process = self._started(program)
        except OSError as error:  # no memory, or too many processes or files
            self._folder.cleanup()
            raise NotStartedError(
                f"a process for ComfyUI's own code cannot be started ({error.strerror}); end some programs, and try "
                "again"
            ) from error
        self._asks, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        try:
            self.ask("start", path=comfyui.path, options=list(comfyui.options), device=device, counting=counting)
        except BaseException:
            self.close()
            raise

    def _started(self, program: str) -> subprocess.Popen[str]:
        """The process. What it was to hold of this one is closed where it cannot be started."""
        self._errors = (self.folder / "stderr").open("w+b")
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)  # it ends with this process (process/lifeline.py)
        try:
            return subprocess.Popen(  # noqa: S603  our own interpreter and program, no shell
                [sys.executable, "-u", "-m", program, str(lifeline), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=PACK_ROOT,
                text=True,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        except OSError:
            os.close(self._lifeline)
            self._errors.close()
            raise
        finally:
            os.close(lifeline)

    def __enter__(self) -> "ComfyUIProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; its files go."""
        with suppress(BrokenPipeError):  # of a question that it ended before
            self._asks.close()  # the process ends when no more requests can come
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()
        os.close(self._lifeline)
        self._answers.close()
        self._errors.close()
        self._folder.cleanup()

    def ask(self, what: str, told: Callable[[str], None] = lambda _: None, /, **with_: object) -> dict[str, Any]:
        """The answer to a question; `told` hears what goes on meanwhile, where the program says so.

        Raises `ValueError` for what it refuses, `NoAnswerError` when it ends instead or has no more time, and whatever
        `tick` raises.
        """
        line = ""
        try:
            self._asks.write(json.dumps({"do": what, "with": with_}) + "\n")
            self._asks.flush()
            self._wait(self._answers.fileno())
            line = self._answers.readline()
            while line.startswith('{"told":'):
                told(json.loads(line)["told"])
                line = self._answers.readline()
        except BrokenPipeError:
            pass
        except BaseException:  # the caller does not wait for the answer any more
            self._kill()
            raise
        if not line:
            status = self._process.wait(ENDING_S)
            raise NoAnswerError(f"ComfyUI's process ended with status {status} ({self._last_line()}); {ITS_PYTHON}")
        said = json.loads(line)
        if "missing" in said:
            raise ValueError(
                f"ComfyUI of {self.comfyui.path} cannot be imported: {sys.executable} has no {said['missing']}; "
                f"{ITS_PYTHON}"
            )
        if "refused" in said:
            raise ValueError(said["refused"])
        if "failed" in said:
            raise ValueError(f"ComfyUI's own code ({self.comfyui.path}) failed: {said['failed']}; {ITS_PYTHON}")
        answer: dict[str, Any] = said["answer"]
        return answer

    def _wait(self, answers: int) -> None:
        """Until it has answered, or ended."""
        ready = select.poll()  # unlike `select`, it takes any descriptor
        ready.register(answers, select.POLLIN)
        while self._tick is not None or self._limit_s is not None:
            since_s = time.monotonic() - self._began_s
            if self._limit_s is not None:
                took_s = min(since_s, self._computed_s())
                for most_s, is_s in ((self._limit_s, took_s), (CLOCK * self._limit_s, since_s)):
                    if is_s >= most_s:
                        raise NoAnswerError(f"it took more than {most_s:g} s")
            if self._tick is not None:
                self._tick(since_s)
            if ready.poll(TICK_S * 1000):
                return

    def _computed_s(self) -> float:
        """CPU seconds of all its threads and of processes of its own that have ended."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def _kill(self) -> None:
        """Unless it has ended. It leads a session, and its number is its own until it has been waited for."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines: Sequence[str] = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
