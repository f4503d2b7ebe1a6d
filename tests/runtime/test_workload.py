"""What verify and bench run on, and what doctor says where nothing can be written."""

import tempfile

import pytest
import torch

from parallel_runtime.cli.machine_checks import _check_temporary
from parallel_runtime.cli.workload import choose_devices
from parallel_runtime.plan import ParallelPlan


def test_a_plan_takes_no_more_gpus_than_it_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    chosen = choose_devices(None, ParallelPlan(ulysses=2))
    assert [str(device) for device in chosen.devices] == ["cuda:0", "cuda:1"]
    assert chosen.warnings == ()


def test_without_enough_gpus_a_plan_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [device.kind for device in choose_devices(None, ParallelPlan(ring=2)).devices] == ["cpu", "cpu"]


def test_doctor_names_the_remedy_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    check = _check_temporary()
    assert not check.ok
    assert "/proc/nowhere" in check.seen
    assert "TMPDIR" in check.remedy
