"""A further machine that is this one again: what a joined machine does, without the network between.

Owns the launcher's process of each generation. The control connection has tests of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from host.fetch import comfyui_path
from host.workers import command
from parallel_runtime import VERSION
from parallel_runtime.machines.files import find
from parallel_runtime.machines.machine import Lost
from parallel_runtime.machines.messages import (
    FileIdentity,
    FoundFile,
    GenerationEnded,
    Launch,
    StartGeneration,
    Versions,
)
from parallel_runtime.wire.records import to_body

FORKS = "host.forked_ranks"  # what stands beside a launcher and forks its ranks
ROOT = Path(__file__).resolve().parents[2]
HERE = "127.0.0.1"


class LoopbackMachine:
    """As `machines.machine.Machine`; `folders` are where it looks for files."""

    def __init__(
        self, name: str, devices: tuple[str, ...], folders: tuple[str, ...], *, comfyui: str | None = None
    ) -> None:
        self.name, self.devices, self.here, self.address = name, devices, HERE, f"{HERE}:7"
        self.lost: Lost | None = None
        self._folders, self._comfyui = folders, str(comfyui_path()) if comfyui is None else comfyui
        self.versions = Versions(pack=VERSION, torch="", comfyui="any" if self._comfyui else "")
        self._running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
        self._ended: dict[int, GenerationEnded] = {}

    def __str__(self) -> str:
        return f"machine {self.name} ({self.address})"

    def pids(self) -> list[int]:
        """Of its ranks."""
        launchers = [psutil.Process(process.pid) for process, _ in self._running.values()]
        commands = {child.pid: command(child) for each in launchers for child in each.children()}
        return [pid for pid, words in commands.items() if words and FORKS not in words]

    @property
    def ends(self) -> list[GenerationEnded]:
        """Of its generations, in order."""
        return list(self._ended.values())

    def kill_ranks(self) -> None:
        """Returns once their launchers have ended."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        for process, _ in self._running.values():
            process.wait(120)

    def written_bytes(self) -> int:
        """What its launchers have written so far, above all to sockets."""
        return sum(psutil.Process(process.pid).io_counters().write_chars for process, _ in self._running.values())

    def start(self, start: StartGeneration) -> None:
        launch = Launch(start, self.name, HERE, self._comfyui)
        lifeline, ours = os.pipe2(os.O_CLOEXEC)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "parallel_runtime.machines.launch"),
                f"--lifeline={lifeline}",
                f"--parent={os.getpid()}",
            ],
            stdin=subprocess.PIPE,
            pass_fds=(lifeline,),
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(lifeline)
        assert process.stdin is not None
        process.stdin.write(json.dumps(to_body(launch)).encode())
        process.stdin.close()
        self._running[start.generation] = process, ours

    def kill(self, generation: int) -> None:
        if generation not in self._running:
            return
        process, ours = self._running.pop(generation)
        ranks = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        code = process.wait()
        os.close(ours)
        _, alive = psutil.wait_procs(ranks, timeout=120)
        assert not alive, f"ranks {alive} outlive their launcher"
        self._ended[generation] = GenerationEnded(generation, code, "")

    def ended(self, generation: int) -> GenerationEnded | None:
        process, _ = self._running.get(generation, (None, 0))
        if process is not None and process.poll() is not None:
            self.kill(generation)
        return self._ended.get(generation)

    def wait_ended(self, generation: int, deadline_s: float) -> bool:
        until = time.monotonic() + deadline_s
        while self.ended(generation) is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.ended(generation) is not None

    def find_file(self, identity: FileIdentity, content: Callable[[], str]) -> FoundFile:
        found = find(1, identity, self._folders)
        assert found.problem or found.content_sha256 == content()
        if found.problem:
            raise ValueError(f"{self}: {found.problem}")
        return found
