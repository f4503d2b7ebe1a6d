"""Cases run in turn: who goes first, what is timed, and what the driver says of the devices meanwhile."""

import platform
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from made_replies import step_reply

from parallel_runtime import VERSION
from parallel_runtime.devices import Device, parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.report import environment
from parallel_runtime.report.build import Span
from parallel_runtime.report.environment import SAMPLE_S, describe_devices, utilisation, versions
from parallel_runtime.report.interleave import BenchmarkCase, CaseRun, Timed, interleave, table


def noting(ran: list[str], name: str, error: Exception | None = None, *, at: int = 1) -> BenchmarkCase:
    """A case that writes its name into `ran` as it runs, and raises `error` in its run number `at`."""

    def run() -> CaseRun:
        ran.append(name)
        if error is not None and ran.count(name) == at:
            raise error
        return CaseRun(result=torch.zeros(1))

    return BenchmarkCase(name=name, kind="one_rank" if name == "a" else "plan", engine="parallel-dit", run=run)


@pytest.mark.parametrize(("names", "warmup", "order"), [("abc", 1, "abc bca cab abc"), ("ab", 0, "ab ba ab")])
def test_each_round_begins_with_the_next_case(names: str, warmup: int, order: str) -> None:
    ran: list[str] = []
    interleave([noting(ran, name) for name in names], warmup=warmup, runs=3)
    assert "".join(ran) == order.replace(" ", "")


def test_a_case_is_told_of_before_each_run() -> None:
    heard: list[tuple[str, int, int]] = []
    case = noting([], "a")
    (timed,) = interleave([case], warmup=1, runs=1, told=lambda *each: heard.append(each))
    assert heard == [("a", 1, 2), ("a", 2, 2)]
    assert len(timed.run_s) == 1 and timed.busy_s == []
    for warmup, runs in ((0, 0), (-1, 1)):
        with pytest.raises(ValueError, match=f"runs={runs}, warmup={warmup}; use at least 1 run"):
            interleave([case], warmup=warmup, runs=runs)
    with pytest.raises(ValueError, match="a has no run that counts"):
        table([Timed(case)], error=lambda *_: 0.0)


def test_a_case_that_fails_is_left_out_and_the_others_go_on() -> None:
    ran: list[str] = []
    too_large = ValueError("no room; use two\nand a traceback")
    cases = [noting(ran, "a", too_large), noting(ran, "b"), noting(ran, "c", ValueError(""), at=3)]
    timed = interleave(cases, warmup=1, runs=2, left_out=(ValueError,))
    assert "".join(ran) == "abc bc cb".replace(" ", "")
    rows, warnings = table(timed, error=lambda *_: 0.0)
    assert [row["name"] for row in rows] == ["b"] and "error" not in rows[0]
    assert warnings == ["a failed and is left out: no room; use two", "c failed and is left out: ValueError"]
    assert too_large.__traceback__ is None
    for error, left_out in ((KeyError("other"), (ValueError,)), (too_large, ())):
        with pytest.raises(type(error)):
            interleave([noting(ran, "d", error), noting(ran, "e")], warmup=0, runs=1, left_out=left_out)
        ran.clear()
    cases = [noting(ran, "f", too_large), noting(ran, "g", ValueError("later"))]
    with pytest.raises(ValueError, match="no room"):
        interleave(cases, warmup=0, runs=1, left_out=(ValueError,))


def test_rows_have_their_error_beside_one_rank_and_the_times_of_their_ranks() -> None:
    def timed(name: str, value: float, *, plan: ParallelPlan | None = None, kind: str = "plan") -> Timed:
        made = BenchmarkCase(
            **{"name": name, "kind": kind, "engine": "parallel-dit", "plan": plan, "threads": 2},
            **{"devices": parse_devices("cpu:2").devices, "run": lambda: None},
        )
        found = Timed(made)
        for step_s in (1.0, 3.0):
            ranks = [step_reply(step_s=part * step_s) for part in (0.5, 1.0)]
            spans = [Span(wall_s=step_s, requests=[ranks])]
            run = CaseRun(result=torch.tensor(value), spans=spans, loop={"kind": "host"})
            found.add(step_s, run, busy={1: 0.5})
        return found

    cases = [
        timed("one", 1.0, kind="one_rank"),
        timed("uly2", 1.25, plan=ParallelPlan(ulysses=2)),
        timed("pipe2", 1.5, plan=ParallelPlan(pipefusion=2)),
        timed("nan", float("nan"), plan=ParallelPlan(ring=2)),
    ]
    rows, warnings = table(cases, error=lambda found, reference: float(found - reference))
    assert [(row.get("error"), row.get("stale_difference")) for row in rows] == [
        *((None, None), (0.25, None), (None, 0.5), (None, None))
    ]
    assert warnings == ["nan: the result or one rank's holds NaN or infinity"]
    one, uly2, *_ = rows
    assert one.items() >= {"run_s": [1.0, 3.0], "slowest_rank_s": 2.0, "threads": 2}.items()
    assert (uly2["plan"]["name"], uly2["loop"], uly2["speedup"]) == ("uly2", {"kind": "host"}, 1)
    assert "plan" not in one and uly2["ranks"][1].items() >= {"busy_s": [3.0], "utilisation": 0.5}.items()


def test_what_the_driver_says_is_told_of_ranks_on_gpus_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def says(index: int) -> int:
        if index == 2:
            raise RuntimeError("a slice does not tell")
        return 57 + index

    monkeypatch.setattr(torch.cuda, "utilization", says)
    devices = [Device("cpu", 0), *(Device("cuda", index) for index in range(3)), Device("cuda", 0, "shelf")]
    assert utilisation(devices, over_s=SAMPLE_S) == {1: 0.57, 2: 0.58}
    assert utilisation(devices, over_s=0.9 * SAMPLE_S) == {}
    told = SimpleNamespace(name="A", total_memory=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
    cpu, gpu, *_, further = describe_devices(devices)
    assert gpu == {"name": "cuda:0", "kind": "cuda", "model": "A", "memory_bytes": 7}
    assert further == {"name": str(devices[-1]), "kind": "cuda"}
    assert (cpu["name"], cpu["kind"], cpu["memory_bytes"]) == ("cpu:0", "cpu", psutil.virtual_memory().total)
    driver = tmp_path / "version"
    monkeypatch.setattr(environment, "DRIVER_FILE", driver)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    assert versions(comfyui="1") == {
        **{"pack": VERSION, "python": platform.python_version(), "torch": torch.__version__, "cuda": "12.4"},
        "comfyui": "1",
    }
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert set(versions()) == {"pack", "python", "torch", "driver"} and versions()["driver"] == "580.65.06"
    driver.write_text("nothing known")
    assert "driver" not in versions()


class AmdSmiError(Exception):
    """As AMD's library has one of its own, which is no RuntimeError."""


@pytest.mark.parametrize(
    "says",
    [
        mock.Mock(side_effect=ModuleNotFoundError("amdsmi does not seem to be installed or it can't be imported.")),
        mock.Mock(side_effect=AmdSmiError("AMDSMI_STATUS_NOT_SUPPORTED")),
        mock.Mock(return_value="N/A"),
    ],
    ids=["not installed", "an error of its own", "no number"],
)
def test_whatever_a_vendors_library_says_in_the_place_of_a_number_no_run_ends_by_it(
    monkeypatch: pytest.MonkeyPatch, says: mock.Mock
) -> None:
    monkeypatch.setattr(torch.cuda, "utilization", says)
    assert utilisation([Device("cuda", 0)], over_s=9.0) == {}
    assert says.called
