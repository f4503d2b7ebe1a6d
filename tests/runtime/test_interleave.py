"""Cases run in turn: who goes first, what is timed, and what the driver says of the devices meanwhile."""

import sys

import pytest
import torch

from parallel_runtime.devices import Device
from parallel_runtime.report.environment import SAMPLE_S, utilisation
from parallel_runtime.report.interleave import BenchmarkCase, CaseRun, interleave

HERE = torch.cuda.is_available()


def in_turn(count: int, *, warmup: int, runs: int) -> list[str]:
    """The names of `count` cases in the order that they ran in."""
    ran: list[str] = []

    def case(name: str) -> BenchmarkCase:
        def run() -> CaseRun:
            ran.append(name)
            return CaseRun(result=torch.zeros(1))

        return BenchmarkCase(name=name, kind="one_process", engine="diffusers", run=run)

    interleave([case(name) for name in "abc"[:count]], warmup=warmup, runs=runs)
    return ran


def test_each_round_begins_with_the_next_case() -> None:
    assert "".join(in_turn(3, warmup=1, runs=3)) == "abc bca cab abc".replace(" ", "")
    assert "".join(in_turn(2, warmup=0, runs=3)) == "ab ba ab".replace(" ", "")


def test_a_driver_that_does_not_tell_leaves_utilisation_out() -> None:
    """Without a driver nvidia-ml-py raises an error of its own, which is no RuntimeError."""
    found = utilisation([Device("cpu", 0), Device("cuda", 0)], over_s=SAMPLE_S)
    assert set(found) <= ({1} if HERE else set())
    assert all(0 <= share <= 1 for share in found.values())


def test_without_nvidia_ml_py_utilisation_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as where it is not installed
    assert utilisation([Device("cuda", 0)], over_s=9.0) == {}
