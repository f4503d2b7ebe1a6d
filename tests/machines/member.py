"""Joined machines for tests: the real client in a process of its own, and a launcher that does what a test asks.

`python -m machines.member '{...}'` joins as `join` does, without asking torch for devices first, and says each line
of its log. Its launcher is this file too: `StartGeneration.engine` says what it does.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from parallel_runtime import VERSION
from parallel_runtime.machines import joined
from parallel_runtime.machines.connection import read_token, split_address
from parallel_runtime.machines.messages import Introduction, Launch, StartGeneration, Versions
from parallel_runtime.process import lifeline
from parallel_runtime.wire.records import from_body, to_body

ROOT = Path(__file__).resolve().parents[2]
OURS = Versions(pack=VERSION, torch="2.9.0+cpu", comfyui="0.24.0")
ENDS_S = 5.0
MARK = f"parallel-dit-machines-{os.environ.setdefault('MACHINES_TEST', str(os.getpid()))}"


class Member:
    """A process that joins `address`; a context, which ends it."""

    def __init__(self, address: str, token_file: Path, log: Path, *, name: str = "node", inside=(), **changes) -> None:
        host, port = split_address(address)
        said = {"host": host, "port": port, "token_file": str(token_file), "name": name, **changes}
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-u", "-m", "machines.member", json.dumps(said)],
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            )

    def __enter__(self) -> "Member":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)  # what was measured of it is written
        try:
            self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        """All that it has printed."""
        return self._log.read_text()

    def wait_for_line(self, text: str, *, deadline_s: float = 120) -> None:
        """Until the log holds `text`."""
        until(lambda: text in self.log, f"{text!r} in {self.log!r}", deadline_s=deadline_s)


def until(holds, what: str, *, deadline_s: float = 120) -> None:
    """Wait until something holds."""
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def started(generation: int, what: str) -> StartGeneration:
    """A generation of two ranks whose launcher does `what`."""
    return StartGeneration(
        generation=generation,
        master_addr="127.0.0.1",
        master_port=1,
        world_size=3,
        first_rank=1,
        devices=("cpu:0", "cpu:1"),
        threads=1,
        deadline_s=30.0,
        seen_as="127.0.0.1",
        engine=what,
    )


def marked(generation: int) -> list[int]:
    """Processes that a launcher of the generation has left, and itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}-{generation}".encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _launcher(arguments: dict[str, int]) -> None:
    joined.adopt_orphans()
    lifeline.arm(arguments["lifeline"], arguments["parent"])
    start = from_body(Launch, json.loads(sys.stdin.read()), "Launch").start
    mark = f"{MARK}-{start.generation}"
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    tie = "import sys; from parallel_runtime.process import lifeline; lifeline.arm(*map(int, sys.argv[1:3])); "
    if start.engine == "nccl":  # ranks with a segment as NCCL keeps one
        segment = "f = open(f'/dev/shm/nccl-{os.getpid()}', 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 0)"
        program = f"import mmap, os; {segment}; {program}"
    ours, _ = os.pipe()
    for _ in start.devices:  # in a session of its own and with a lifeline to us, as torchrun starts ranks of ours
        command = [sys.executable, "-c", tie + program, str(ours), str(os.getpid()), mark]
        subprocess.Popen(command, start_new_session=True, pass_fds=(ours,))
    sys.stdout.write("the launcher's words\n")
    if start.engine == "flood":
        sys.stdout.write("x" * 200_000)  # more than a pipe holds and than is kept
    sys.stdout.flush()
    if start.engine in ("orphans", "flood"):  # a third, whose parent is gone at once, once the words are out
        orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}, {mark!r}])"
        subprocess.run([sys.executable, "-c", orphan], check=True)
    if start.engine == "exit":
        os._exit(3)
    if start.engine == "flood":
        while True:
            sys.stdout.write("x" * 10_000)
    signal.pause()


def _main(said: dict) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in what a shell started beside itself
    joined.adopt_orphans()
    joined.LAUNCHER = ("-m", "machines.member", "launcher")
    versions = Versions(**{**to_body(OURS), **said.get("versions", {})})
    joining = joined.Joining(
        host=said["host"],
        port=said["port"],
        token=read_token(said["token_file"]),
        introduction=Introduction(said["name"], ("cpu:0", "cpu:1"), ("CPU", "CPU"), versions, os.getpid()),
        models=tuple(said.get("models", ())),
    )
    told = joined.Told()
    while not select.select([told], [], [], 0.1)[0]:
        try:
            joined.serve(joining, print, told)
        except OSError as error:
            print(f"lost: {error}")  # noqa: T201
    told.end()


if __name__ == "__main__":
    if sys.argv[1] == "launcher":
        _launcher({key.strip("-"): int(value) for key, _, value in (each.partition("=") for each in sys.argv[2:])})
    else:
        _main(json.loads(sys.argv[1]))
