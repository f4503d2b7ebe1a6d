"""Tries mistakes in scratch copies of the tree: writes the mistake, runs tests until one fails, writes it back.

Owns the copies and the runs of pytest. Does not own which mistakes there are, nor which tests.
"""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60.0  # of a mistake's tests
HANGS_S = 25.0  # of one test
# What the tests import beside the pack, what host/forked_ranks.py names for ComfyUI among it.
MODULES = (
    "torch torch.distributed torch._dynamo safetensors.torch numpy PIL.Image hypothesis pytest pytest_timeout psutil "
    "playwright.sync_api aiohttp aiohttp.web transformers torchvision torchaudio scipy.integrate scipy.signal einops "
    "comfy_kitchen spandrel kornia av sqlalchemy.orm alembic.command pydantic_settings"
)
ROOM = 2048
BUILT = "build/pretend_cuda"  # by tests, from what no mistake is made in: once for all copies
PRELOADED = Path(__file__).with_name("preloaded.py")
# A thread ends what hangs: no signal is heard by one that waits for other ranks in torch.
OPTIONS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--timeout={HANGS_S}", "--timeout-method=thread")
HUNG = "+ Timeout +"  # pytest-timeout says it, then the process ends
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?\.py(?:::.+?)?)(?: - |$)", re.MULTILINE)
PASSED, NO_TESTS = 0, 5  # of pytest's statuses


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to: pytest's status, the first test that failed, the end of what it said.

    `took_s` is 0 where no test that passes without the mistake runs its line.
    """

    status: int
    failed: str = ""
    said: str = ""
    took_s: float = 0.0

    @property
    def killed(self) -> bool:
        """A test failed, or nothing can be collected any more. No end in time is not that."""
        return self.status not in (PASSED, NO_TESTS, -signal.SIGKILL)


class Scratch:
    """A copy of a tree's files that may be spoilt, and the process that runs its tests. One run at a time."""

    def __init__(self, root: Path, files: Iterable[str], folder: Path, modules: str) -> None:
        self.root, self.folder = root, folder
        self._written = 0  # seconds, of files that are spoilt: no copy was made in 1970
        self._sound: dict[str, bool] = {}
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
        (root / BUILT).mkdir(parents=True, exist_ok=True)
        (folder / BUILT).parent.mkdir(parents=True, exist_ok=True)
        (folder / BUILT).symlink_to(root / BUILT)
        command = [sys.executable, str(PRELOADED), modules, "-" * ROOM]
        self._runner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
        self._ready = False

    def close(self) -> None:
        """End the process that runs tests."""
        self._runner.communicate()

    def tried(self, file: str, text: str, tests: Sequence[str]) -> Outcome:
        """What tests come to while `file` has this text. A test that fails without it as well finds nothing."""
        left = [test for test in tests if self._sound.get(test, True)]
        while left:
            self._write(file, text)
            try:
                outcome = self.run(left)
            finally:
                self._write(file, (self.root / file).read_text(encoding="utf-8"))
            if not outcome.killed:
                return outcome
            if outcome.failed not in left:  # they cannot be collected
                return outcome if self.run(left, "--collect-only").status == PASSED else Outcome(PASSED)
            if self._is_sound(outcome.failed):
                return outcome
            left.remove(outcome.failed)
        return Outcome(PASSED)

    def _is_sound(self, test: str) -> bool:
        if test not in self._sound:
            self._sound[test] = self.run([test]).status == PASSED
        return self._sound[test]

    def run(self, nodes: Sequence[str], *more: str) -> Outcome:
        """Run these tests here, in this order, until one fails, or time is up. `more`: options of pytest."""
        if not self._ready:
            self._ready = self._hear() == "ready"
        log, noted = self.folder / "pytest.log", self.folder / "pytest.log.test"
        noted.unlink(missing_ok=True)
        began = time.monotonic()
        self._say({"folder": str(self.folder), "options": [*OPTIONS, *more], "nodes": nodes, "log": str(log)})
        child = int(str(self._hear()))
        late = threading.Timer(LIMIT_S, _end, [child])
        late.start()
        status = int(str(self._hear()))
        late.cancel()
        _end(child)
        said = log.read_text(encoding="utf-8", errors="replace")
        found = FAILED.search(said)
        hung = HUNG in said and noted.exists()
        failed = found[1] if found else noted.read_text(encoding="utf-8") if hung else ""
        return Outcome(status, failed, said[-2000:], time.monotonic() - began)

    def _say(self, order: dict[str, object]) -> None:
        assert self._runner.stdin is not None
        self._runner.stdin.write(f"{json.dumps(order)}\n")
        self._runner.stdin.flush()

    def _hear(self) -> object:
        assert self._runner.stdout is not None
        line = self._runner.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs tests has ended; see what it printed")
        return json.loads(line)

    def _write(self, name: str, text: str) -> None:
        """Write a file with a time that it never had: Python knows compiled files by time and size alone."""
        self._written += 1
        (self.folder / name).write_text(text, encoding="utf-8")
        os.utime(self.folder / name, (self._written, self._written))


def each(
    root: Path, folder: Path, jobs: int, work: Sequence[Callable[[Scratch], Outcome]], modules: str
) -> Iterator[Outcome]:
    """Do all of `work` in as many copies as jobs; yields the outcomes in that order. `folder` is an empty one.

    modules: what a process that runs tests imports before the first.
    """
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    files = [name for name in listed.split("\0") if name and (root / name).is_file()]
    copies = [Scratch(root, files, folder / str(job), modules) for job in range(jobs)]
    free: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def do(one: Callable[[Scratch], Outcome]) -> Outcome:
        copy = free.get()
        try:
            return one(copy)
        finally:
            free.put(copy)

    threads = ThreadPoolExecutor(jobs)
    try:
        yield from threads.map(do, work)
    finally:
        threads.shutdown(cancel_futures=True)
        for copy in copies:
            copy.close()


def _end(child: int) -> None:
    """Kill a run and what it started, which is a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
