"""What the doctor says of a machine without looking at devices: each verdict changes at the limit that it names."""

import errno
import importlib.metadata
import io
import os
import resource
import shutil
import socket
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from descriptors import open_descriptors

from parallel_runtime import devices
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.cli import doctor, machine_checks
from parallel_runtime.cli.check import Check
from parallel_runtime.cli.parser import make_parser
from parallel_runtime.cli.terminal import PhaseLine
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import OutOfMemoryInRankError, PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.comfyui_process import ComfyUIProcess
from parallel_runtime.wire.channel import Segment

NAMES = ("system", "torch", "packages", "shared memory", "descriptors", "temporary folder", "loopback")
MIB = 2**20


def checked(name: str) -> Check:
    """One check of this machine."""
    (found,) = (check for check in machine_checks.machine_checks() if check.name == name)
    return found


def test_this_machine_has_all_that_ranks_need_and_looking_leaves_nothing_open() -> None:
    before = open_descriptors()
    found = machine_checks.machine_checks()
    assert [(check.name, check.ok, check.needed) for check in found] == [(name, True, True) for name in NAMES]
    assert not open_descriptors() - before
    assert checked("packages").seen == "all there"


@pytest.mark.parametrize(
    ("version", "built_in", "ok"),
    [
        ("2.6.0a0+1f", True, True),
        ("2.5.1", True, False),
        ("3.0.0", True, True),
        ("2.6.0", False, False),
    ],
)
def test_torch_is_2_6_or_newer_with_distributed(
    version: str, built_in: bool, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(dist, "is_available", lambda: built_in)
    said = f"{version}, distributed {'built in' if built_in else 'missing'}"
    assert (checked("torch").ok, checked("torch").seen) == (ok, said)


@pytest.mark.parametrize(
    ("soft", "ok", "seen"),
    [
        (256, True, "256 open files allowed"),
        (255, False, "255 open files allowed"),
        (resource.RLIM_INFINITY, True, "unlimited"),
    ],
)
def test_256_files_may_be_open(soft: int, ok: bool, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 4096))
    assert (checked("descriptors").ok, checked("descriptors").seen) == (ok, seen)


@pytest.mark.parametrize(
    ("free", "writable", "ok"), [(64 * MIB, True, True), (64 * MIB - 1, True, False), (99 * MIB, False, False)]
)
def test_64_mib_can_be_written(free: int, writable: bool, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=99 * MIB))
    monkeypatch.setattr(os, "access", lambda *_: writable)
    assert checked("temporary folder").ok == ok
    assert machine_checks.segment_room_bytes() == (free, 99 * MIB)
    assert doctor._shared_memory_folder() == {"total_bytes": 99 * MIB, "free_bytes": free}


def test_another_system_is_told_that_it_is_no_linux_by_everything_that_starts_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    for name in ("fcntl", "resource", "pwd"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("memfd_create", "pipe2", "getuid"):
        monkeypatch.delattr(os, name)
    asked = make_parser().parse_args(["doctor", "--devices", "cpu:2", "--calibrate"])
    report = doctor.run(asked, PhaseLine(told := io.StringIO()))
    assert "measuring the devices" not in told.getvalue() and "calibration" not in report
    assert [(check["name"], check["ok"]) for check in report["checks"]] == [("system", False)]
    assert not report["can_run"] and "docs/recipes.md says what to try" in report["checks"][0]["remedy"]
    with pytest.raises(ValueError, match=r"^workers need Linux, this is Windows; use ComfyUI's own nodes"):
        ComfyUIProcess(ComfyUI("/comfy"), "cpu")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSYS,
            "workers need Linux 5.4 or newer, and a container that allows pidfd_open (Function not implemented)",
        ),
        (
            errno.EPERM,
            "workers need Linux 5.4 or newer, and a container that allows pidfd_open (Operation not permitted)",
        ),
        (errno.EMFILE, None),
    ],
)
def test_a_kernel_without_descriptors_of_processes_is_told_of_before_any_is_started(
    monkeypatch: pytest.MonkeyPatch, number: int, said: str | None
) -> None:
    monkeypatch.setattr(devices, "pidfd_open", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    devices._missing_call.cache_clear()
    try:
        assert devices.missing_system() == said
        system, *others = machine_checks.machine_checks()
        assert system.ok == bool(others) == (said is None) and (said is None or system.remedy == said)
    finally:
        devices._missing_call.cache_clear()


@pytest.mark.parametrize(
    ("devices", "named"), [("cuda:0,cuda:2", "cuda:0,cuda:2"), ("cpu:3", "cpu:3"), ("cuda:1", "cuda:1")]
)
def test_the_command_that_prints_a_whole_failure_is_one_that_verify_takes(devices: str, named: str) -> None:
    used = parse_devices(devices, num_cuda=3).devices
    check = doctor._failed(PoolError("exited with code 7", rank=1, remedy="try again", detail="Traceback"), used)
    assert (check.seen, check.needed) == ("rank 1: exited with code 7; try again", True)
    command, _, where = check.remedy.partition(", in the pack's folder")
    assert where == ", prints the whole failure"
    asked = make_parser().parse_args(command.removeprefix("python -m parallel_runtime ").split())
    assert (asked.command, asked.model, asked.devices) == ("verify", "FILE", named)
    assert ParallelPlan.parse(asked.plan).ranks == len(used)


def test_devices_that_are_full_say_nothing_of_the_machine() -> None:
    """ComfyUI's workers may hold what the doctor's do not find."""
    full = OutOfMemoryInRankError("CUDA out of memory", rank=1)
    check = doctor._failed(full, parse_devices("cpu:2").devices)
    assert (check.name, check.ok, check.needed, check.seen) == ("workers", False, False, "rank 1: CUDA out of memory")
    assert check.remedy.startswith("press Release")


def test_what_this_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(f"no {address}")

    def nothing(*_: object) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(socket, "socket", Refused)
    monkeypatch.setattr(Segment, "create", nothing)
    monkeypatch.setattr(machine_checks, "PACKAGES", ("torch", "unheard-of"))
    failed = {check.name: check.seen for check in machine_checks.machine_checks() if not check.ok}
    assert failed == {
        "packages": "missing unheard-of",
        "shared memory": "no sealed memfd: Function not implemented",
        "loopback": "no ('127.0.0.1', 0)",
    }
    monkeypatch.setattr(shutil, "disk_usage", nothing)
    assert machine_checks.segment_room_bytes() is None and doctor._shared_memory_folder() == {}
    assert machine_checks.version_of("torch") == importlib.metadata.version("torch")
