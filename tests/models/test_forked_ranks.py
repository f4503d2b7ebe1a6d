"""Models that are made to fool the proof of a found plan: none has a plan that is right for the proof's calls alone.

`python -m models.test_forked_ranks COMFYUI` is a process that finds their plans, as worker/finding.py is for a file: it
has imported ComfyUI, and forks the ranks. It prints a line of JSON.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from host.fetch import comfyui_path
from parallel_runtime.models.specs import SPECS

from .ranks import start_comfyui
from .test_found_plans import WIDTH, Block, Odd
from .tiny import fill, noise

TESTS = Path(__file__).resolve().parents[1]
# Of pictures of 320 x 192 and of 192 x 256 pixels; and so few that a rank of three has one, two or four.
LOOKED_AT, PROVEN, FEW = 240, 192, 7


def by_runs(x: Tensor, count: int) -> Tensor:
    """The mean of each run of so many tokens, the first one's first."""
    return torch.cat([run.mean(1, keepdim=True).expand_as(run) for run in x.split(count, 1)], 1)


class Inherits(Block):
    """Has its forward from its base."""


class MixesRuns(Odd):
    """Between blocks, tokens in runs of eight."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x = x + by_runs(x, 8)
        return self.head(x)


class MixesValues(Block):
    """Attends to values of runs of four tokens."""

    def forward(self, x: Tensor) -> Tensor:
        import comfy.ldm.modules.attention as attention

        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.tanh(self.mlp(x + self.out(attention.optimized_attention(q, k, by_runs(v, 4), 6))))


class CountsOnce(Block):
    """Keeps how many tokens its first call had."""

    tokens = 0

    def forward(self, x: Tensor) -> Tensor:
        self.tokens = self.tokens or x.shape[1]
        return super().forward(x * math.log(self.tokens) / 4)


class CountsRowsOnce(Block):
    """Keeps how many rows its first call had, as many on each rank."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = self.rows or x.shape[0]
        return super().forward(x * self.rows)


class KeepsMean(Block):
    """Keeps the mean of its first call's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.kept.setdefault("mean", x.mean((0, 1))))


class KeepsNumbers(Block):
    """The same, and writes them into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.mean.any():
            self.mean.copy_(x.mean((0, 1)))
        return super().forward(x + self.mean)


class Spreads(Block):
    """Takes the spread of the tokens behind the third, which is no number for fewer than two of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.0 * x[:, 3:].std(1, keepdim=True))


SECOND = {"no number in the second call": FEW}  # tokens of the proof's second call, where it has others
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (Odd, "cut once"),
    "blocks that inherit their forward": (lambda: Odd(Inherits), "cut once"),
    "runs of tokens between blocks": (MixesRuns, "cut in each block"),
    "runs of tokens in a block": (lambda: Odd(MixesValues), ""),
    "tokens of the first call": (lambda: Odd(CountsOnce), ""),
    "rows of the first call": (lambda: Odd(CountsRowsOnce), "cut once"),
    "a mean of the first call": (lambda: Odd(KeepsMean), ""),
    "numbers of the first call": (lambda: Odd(KeepsNumbers), ""),
    "no number in the second call": (lambda: Odd(Spreads), ""),
}


def found_of(case: str) -> dict[str, Any]:
    """What is found of one of them."""
    from parallel_runtime.worker import finding

    model, numbers = CASES[case][0](), torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        fill(name, weight.data, numbers, parameter=True)
    model = model.eval().requires_grad_(False)

    def calls(rows: int, *tokens: int) -> list[Callable[[], Tensor]]:
        return [lambda count=count: model(noise(rows, count, 16)) for count in tokens]

    finder = finding.Finding()
    finder.kind = ""
    made = model, calls(1, LOOKED_AT), calls(2, PROVEN, SECOND.get(case, PROVEN)), "whole"
    with (
        mock.patch.object(finder, "_calls", lambda: made),
        mock.patch.object(finding, "kinds_of", lambda whole, size: []),
    ):
        return finder.find("a file")


def errors_where(call: Callable[[], Tensor]) -> list[float]:
    """Of a call that two ranks make, by no plan, which is to be of ones."""
    from parallel_runtime.worker import forked_ranks

    with mock.patch.object(forked_ranks, "SharedModel", lambda *_: SimpleNamespace()):
        errors, _ = forked_ranks.errors_of(
            nn.Identity(), SPECS["comfy.ldm.flux.model.Flux"], [call], [torch.ones(2)], 2
        )
    return errors


def with_files() -> list[float]:
    """Where the call adds the files that are in the temporary folder meanwhile."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        return errors_where(lambda: torch.ones(2) + len(os.listdir(folder)))


def no_memory() -> Tensor:
    raise MemoryError("full")


def no_link(*_: object, **__: object) -> None:
    raise RuntimeError("unable to find an address for lo")


def odd_shapes() -> Tensor:
    return torch.ones(2) @ torch.ones(3)


TROUBLES: dict[str, Callable[[], object]] = {
    "memory of Python": lambda: errors_where(no_memory),
    "memory of torch": lambda: errors_where(lambda: torch.ones(1 << 60)),
    "link": lambda: mock.patch("torch.distributed.init_process_group", no_link)(errors_where)(odd_shapes),
    "shapes": lambda: errors_where(odd_shapes),
}


def raised_by(trouble: Callable[[], object]) -> str:
    """The error that the process that waits for ranks raises where they have this trouble."""
    try:
        trouble()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Of each case what was found, by a process of its own."""
    command = [sys.executable, "-m", f"{__package__}.{Path(__file__).stem}", str(comfyui_path())]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_is_right_for_the_proofs_calls_alone_is_not_found(told: dict[str, Any], case: str) -> None:
    said, cuts = told[case], CASES[case][1]
    assert said.get("cuts", "") == cuts
    assert bool(cuts) or said["refused"].startswith("no plan was equal to one process"), said["refused"]


@pytest.mark.slow
def test_ranks_have_no_file_that_would_stay_when_they_are_killed(told: dict[str, Any]) -> None:
    assert told["files"] == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("memory of Python", "RanksLostError: rank . of 2 computed nothing: MemoryError: full"),
        ("memory of torch", "RanksLostError: rank . of 2 computed nothing: RuntimeError: .*allocate"),
        ("link", "RanksLostError: rank . of 2 computed nothing: RuntimeError: unable to find an address for lo"),
        ("shapes", "RanksDisagreeError: RuntimeError: "),
    ],
)
def test_what_a_rank_lacks_of_the_machine_says_nothing_of_a_plan(told: dict[str, Any], trouble: str, says: str) -> None:
    assert re.match(says, told["troubles"][trouble]), told["troubles"][trouble]


def test_a_forked_rank_ends_there_whatever_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a copy of the process that waits: here it is this very one."""
    from parallel_runtime.worker import forked_ranks

    class GoneError(BaseException):
        pass

    def gone(code: int) -> None:
        raise GoneError(code)

    def raises(*_: object) -> None:
        raise ValueError("of the rank")

    for name, function in (("fork", lambda: 0), ("_exit", gone)):
        monkeypatch.setattr(forked_ranks.os, name, function)
    monkeypatch.setattr(forked_ranks, "_rank", raises)
    with pytest.raises(GoneError):
        forked_ranks.errors_of(nn.Identity(), SPECS["comfy.ldm.flux.model.Flux"], [], [], 2)


@pytest.mark.parametrize(
    ("at_first", "error", "says"),
    [
        (None, RuntimeError("odd shapes"), "raised"),
        (None, MemoryError("full"), "lost"),
        (None, RuntimeError("[cpu] can't allocate memory: 8 bytes"), "lost"),
        (RuntimeError("no link"), None, "lost"),
    ],
)
def test_a_rank_says_whether_the_plan_or_the_machine_stopped_it(
    monkeypatch: pytest.MonkeyPatch, at_first: Exception | None, error: Exception | None, says: str
) -> None:
    from parallel_runtime.worker import forked_ranks

    joined, shared = mock.Mock(side_effect=at_first), mock.Mock(side_effect=error)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the rank sets it
    monkeypatch.setattr(forked_ranks.dist, "init_process_group", joined)
    monkeypatch.setattr(forked_ranks.dist, "FileStore", mock.Mock())
    monkeypatch.setattr(forked_ranks, "SharedModel", shared)
    mine, its = os.pipe()
    forked_ranks._rank(its, 0, 2, 0, nn.Identity(), SPECS["comfy.ldm.flux.model.Flux"], [], [])
    with os.fdopen(mine, encoding="utf-8") as pipe:
        said = json.load(pipe)
    assert list(said) == [says] and str(at_first or error) in said[says]


if __name__ == "__main__":
    start_comfyui(sys.argv[1])
    more = {"files": with_files(), "troubles": {name: raised_by(trouble) for name, trouble in TROUBLES.items()}}
    print(json.dumps({case: found_of(case) for case in CASES} | more))  # noqa: T201
