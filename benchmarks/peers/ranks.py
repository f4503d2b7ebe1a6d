"""The driver's side of a peer: its processes, one a rank, asked for one run at a time.

Owns starting, asking and ending them. What a process does is `process.py`'s.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
READY_S = 300


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What is started: a module of this package and how the sequence is shared."""

    module: str
    ulysses: int = 1
    ring: int = 1

    @property
    def ranks(self) -> int:
        """How many processes it is."""
        return self.ulysses * self.ring


class PeerError(RuntimeError):
    """A process of a peer ended; the text is the last of what it said."""


class PeerRanks:
    """One peer, started. Use it as a context; `run` may be called any number of times, `output` once, after them."""

    def __init__(self, peer: Peer, *, python: str, kind: str, dtype: str, model: str, inputs: str) -> None:
        self.peer = peer
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="peer-")))
        self._answers: list[TextIO] = []
        self._processes = [
            self._start(rank, [python, "-m", f"benchmarks.peers.{peer.module}", "--model", model, "--inputs", inputs]
                        + ["--device", f"cuda:{rank}" if kind == "cuda" else "cpu", "--dtype", dtype])
            for rank in range(peer.ranks)
        ]  # fmt: skip

    def _start(self, rank: int, command: list[str]) -> subprocess.Popen[str]:
        ours, theirs = os.pipe()
        self._answers.append(self._stack.enter_context(os.fdopen(ours)))
        numbers = {"rank": rank, "ulysses": self.peer.ulysses, "ring": self.peer.ring, "answers": theirs}
        files = {"output": self._folder / "out.safetensors", "rendezvous": self._folder / "rendezvous"}
        options = [f"--{name}={value}" for name, value in {**numbers, **files}.items()]
        log = self._stack.enter_context((self._folder / f"{rank}.log").open("w"))
        # A session of its own, as our ranks have: Linux shares a busy CPU between sessions before it does within one.
        process = subprocess.Popen(  # noqa: S603  our own module
            [*command, *options],
            cwd=ROOT,
            pass_fds=(theirs,),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        os.close(theirs)
        return process

    def wait_ready(self) -> None:
        """Return when every process holds its model."""
        for rank in range(self.peer.ranks):
            self._answer(rank)

    def run(self, threads: int) -> float:
        """Seconds of one run with `threads` a process, as rank 0 measures it. Raises `PeerError`."""
        for process in self._processes:
            print(threads, file=process.stdin, flush=True)
        return [float(self._answer(rank)) for rank in range(self.peer.ranks)][0]

    def output(self) -> torch.Tensor:
        """The last run's output; no run may follow."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for rank, process in enumerate(self._processes):
            if process.wait(timeout=READY_S):
                raise PeerError(self._last_words(rank))
        return load_file(self._folder / "out.safetensors")["out"]

    def _answer(self, rank: int) -> str:
        line = self._answers[rank].readline()
        if not line:
            raise PeerError(self._last_words(rank))
        return line.strip()

    def _last_words(self, rank: int) -> str:
        said = (self._folder / f"{rank}.log").read_text(encoding="utf-8")[-2000:]
        return f"rank {rank} of {self.peer} ended:\n{said}"

    def __enter__(self) -> PeerRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._stack.close()
