"""What verify and bench run on, and what doctor says where nothing can be written."""

import math
import tempfile
from dataclasses import replace

import pytest
import torch

from parallel_runtime.cli.machine_checks import _check_temporary
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.trials.workload import Workload, choose_devices, worst


@pytest.mark.parametrize("there", [8, 2])
def test_a_plan_takes_no_more_gpus_than_it_has_ranks(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    chosen = choose_devices(None, ParallelPlan(ulysses=2))
    assert [str(device) for device in chosen.devices] == ["cuda:0", "cuda:1"]
    assert chosen.warnings == ()


def test_without_enough_gpus_a_plan_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [device.kind for device in choose_devices(None, ParallelPlan(ring=2)).devices] == ["cpu", "cpu"]
    assert len(choose_devices("cpu:2", ParallelPlan(ring=2)).devices) == 2
    with pytest.raises(
        ValueError, match="ring=2 needs 2 ranks, --devices cpu:1 gives 1; use for example --devices cpu:2"
    ):
        choose_devices("cpu:1", ParallelPlan(ring=2))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *(("width", 16, 16384), ("height", 16, 16384), ("text_tokens", 1, 8192), ("batch", 1, 64), ("frames", 1, 4096)),
        ("seed", 0, 2**62),
    ],
)
def test_a_size_is_taken_from_its_least_to_its_most(name: str, low: int, high: int) -> None:
    usual = {"width": 64, "height": 64, "text_tokens": 3}
    for value in (low, high):
        assert getattr(Workload(**usual | {name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}={value} is outside {low} to {high}; use a"):
            Workload(**usual | {name: value})


def test_a_workload_is_one_row_of_the_first_seed_and_its_other_texts_are_two_thirds_as_long() -> None:
    work = Workload(width=64, height=64, text_tokens=19)
    assert (work.batch, work.seed, work.frames, work.shorter_text) == (1, 0, None, 12)
    assert [replace(work, text_tokens=count).shorter_text for count in (1, 3)] == [1, 2]


def test_an_error_that_is_no_number_is_the_worst() -> None:
    assert worst([0.1, 0.3, 0.2]) == 0.3 and math.isnan(worst([0.1, math.nan, 0.2]))


def test_doctor_names_the_remedy_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    check = _check_temporary()
    assert not check.ok
    assert "/proc/nowhere" in check.seen
    assert "TMPDIR" in check.remedy
