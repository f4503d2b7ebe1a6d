"""Ranks over gloo that have imported torch and ComfyUI once, live for the session, and run functions by their names.

A test of this folder hands them one with `in_ranks`, or `Ranks.run`: each of N ranks finds the function in its file,
calls it with the group of all ranks, and answers with what it returned or with its traceback. A process of its own
imports ComfyUI and forks each N from there. After a failure that N is forked anew, since its ranks may wait in an
exchange. What travels between processes is JSON: names, numbers, texts.

Does not own: cases (cases_*.py), what a rank's group does (gloo_group.py).
"""

import importlib
import inspect
import itertools
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from host import outcomes

ROOT = Path(__file__).resolve().parents[2]
GROUP = "group"  # the argument of a function that runs in ranks, which each rank makes
SAID_BY_TESTS = (outcomes.StockFailsError, outcomes.RefusedError)


def start_comfyui(path: str) -> None:
    """Import ComfyUI from a folder as a worker does."""
    from parallel_runtime.checkpoint import ComfyUI
    from parallel_runtime.models.hosted.comfyui import import_comfyui

    import_comfyui(ComfyUI(path, ("--use-pytorch-cross-attention",)), torch.device("cpu"))


class RanksFailedError(AssertionError):
    """A function failed in a rank; the text is the traceback of the rank that said so first."""


class Ranks:
    """The process that has imported ComfyUI, and the ranks that it forked."""

    def __init__(self, comfyui: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
        self._said = tempfile.TemporaryFile("w+")  # what it prints
        self._process = subprocess.Popen(
            [sys.executable, "-m", "models.ranks", str(comfyui)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
        """What the function returned on each rank. Raises RanksFailedError, or what a test says of stock ComfyUI."""
        assert self._process.stdin and self._process.stdout
        module: Any = sys.modules[function.__module__]  # of a program that `python -m` runs, another name than its own
        name = getattr(function, "named", f"{module.__spec__.name}:{function.__qualname__}")
        asked = {"ranks": ranks, "function": name, "arguments": arguments}
        self._process.stdin.write(json.dumps(asked, default=str) + "\n")  # of paths the texts
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RanksFailedError(f"the process that has ComfyUI ended: {self._said.read()[-4000:]}")
        answer = json.loads(line)
        for kind in SAID_BY_TESTS:
            if answer.get("kind") == kind.__name__:
                raise kind(answer["text"])
        if "failed" in answer:
            raise RanksFailedError(answer["failed"])
        found: list[Any] = answer["returned"]
        return found

    def close(self) -> None:
        """End all of them."""
        self._process.communicate(timeout=900)
        self._said.close()


def in_ranks(ranks: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test's body run on each of so many ranks, or as many as its parameter `ranks` says.

    Its first argument is the group of all ranks (`GlooGroup`), the others are its parameters.
    """

    def of_ranks(function: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in inspect.signature(function).parameters if name != GROUP]

        def test(comfyui_ranks: Ranks, **given: Any) -> None:
            number = given.pop("ranks") if ranks is None else ranks
            comfyui_ranks.run(test, *(given[name] for name in names), ranks=number)

        taken = ["comfyui_ranks", *names, *(["ranks"] if ranks is None else [])]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in taken])  # type: ignore[attr-defined]
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        test.body = function  # type: ignore[attr-defined]
        test.named = f"{function.__module__}:{function.__qualname__}"  # type: ignore[attr-defined]
        return pytest.mark.slow(test)

    return of_ranks


def found(name: str) -> Callable[..., Any]:
    """The function of a file by its name, of a test its body."""
    module, _, path = name.partition(":")
    function = getattr(importlib.import_module(module), path)
    return getattr(function, "body", function)


def failed(error: BaseException, where: str) -> dict[str, str]:
    """What is answered for a function that raised."""
    told = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "text": str(error), "failed": f"{where}: {told}"}


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    """Inside, a ValueError with all of these texts is raised."""
    with pytest.raises(ValueError, match=re.escape(texts[0])) as error:
        yield
    missing = [text for text in texts if text not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


class RankSet:
    """Ranks that meet in `store`, a file that was not there before."""

    def __init__(self, number: int, store: Path) -> None:
        self.number, self._children, self._sockets = number, list[int](), list[socket.socket]()
        for rank in range(number):
            mine, its = socket.socketpair()
            child = os.fork()
            if child == 0:
                for each in (mine, *self._sockets):
                    each.close()
                os._exit(_rank(its, rank, number, store))
            its.close()
            self._children.append(child)
            self._sockets.append(mine)

    def run(self, line: str) -> dict[str, Any]:
        """Hand all ranks the line; their answers, or that of the first that failed."""
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, each in enumerate(self._sockets):
                each.sendall(line.encode())
                waiting.register(each.makefile("r", encoding="utf-8"), selectors.EVENT_READ, rank)
            while len(answers) < self.number:
                for key, _ in waiting.select():
                    said = key.fileobj.readline()  # type: ignore[union-attr]
                    answer = json.loads(said) if said else {"failed": f"rank {key.data} of {self.number} ended"}
                    if "failed" in answer:
                        return answer
                    answers[key.data] = answer["returned"]
                    waiting.unregister(key.fileobj)
        return {"returned": [answers[rank] for rank in range(self.number)]}

    def end(self, *, kill: bool = False) -> None:
        """All of its processes, of which some may wait for another."""
        for child, each in zip(self._children, self._sockets, strict=True):
            if kill:
                os.kill(child, signal.SIGKILL)
            each.shutdown(socket.SHUT_RDWR)  # of which ranks that were forked later have copies
            each.close()
        for child in self._children:
            os.waitpid(child, 0)


def _rank(its: socket.socket, rank: int, ranks: int, store: Path) -> int:
    """One rank, until nobody hands it functions. Returns its exit code."""
    from .gloo_group import GlooGroup

    if (measuring := sys.modules.get("measured_process")) is not None:
        measuring.follow()  # of `make coverage`
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    with its.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            asked = json.loads(line)
            torch.manual_seed(0)  # alike on all ranks, whatever ran before
            try:
                with torch.inference_mode():
                    returned = found(asked["function"])(GlooGroup(), *asked["arguments"])
                answer = {"returned": returned}
            except BaseException as error:  # noqa: BLE001  said by the test
                answer = failed(error, f"rank {rank} of {ranks}")
            its.sendall((json.dumps(answer) + "\n").encode())
    dist.destroy_process_group()
    sys.stderr.flush()
    return 0


def main(comfyui: str) -> None:
    """Import ComfyUI, then run what is asked for, a line each, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ComfyUI prints
    torch.set_num_threads(1)
    start_comfyui(comfyui)
    sets: dict[int, RankSet] = {}
    with tempfile.TemporaryDirectory() as folder:
        stores = (Path(folder) / f"{number}" for number in itertools.count())
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                found(asked["function"])  # whose imports all ranks that are forked from now on have
                number = asked["ranks"]
                if number not in sets:
                    sets[number] = RankSet(number, next(stores))
                answer = sets[number].run(line)
            except Exception as error:  # noqa: BLE001  said by the test
                answer = failed(error, "before any rank ran")
            if "failed" in answer and (ranks := sets.pop(asked["ranks"], None)):
                ranks.end(kill=True)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        for ranks in sets.values():
            ranks.end()


if __name__ == "__main__":
    main(sys.argv[1])
