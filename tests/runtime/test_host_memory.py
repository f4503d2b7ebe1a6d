"""Memory of the host, and its time: a container's limit counts. Weights that cannot be pinned are used all the same."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.process import control_groups, rank_process
from parallel_runtime.weights import host_memory


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({}, (600, 1000)),
        ({"max": "max", "current": "1"}, (600, 1000)),
        ({"max": "400", "current": "300", "stat": "anon 7\ninactive_file 50\nslab 3\n"}, (150, 400)),
        ({"max": "400", "current": "390", "stat": "active_file 60\nanon 7\ninactive_file 50\n"}, (120, 400)),
        ({"max": "400", "current": "300", "stat": "anon 7\n"}, (100, 400)),
        ({"max": "2000", "current": "300", "stat": "inactive_file 50\n"}, (600, 1000)),
        ({"max": "400", "current": "300"}, (600, 1000)),
    ],
)
def test_a_containers_limit_counts_where_it_is_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], memory: tuple[int, int]
) -> None:
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(control_groups, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=600, total=1000))
    assert host_memory.host_memory() == memory


@pytest.mark.parametrize(("limit", "memory"), [("400", (150, 400)), ("9223372036854771712", (600, 1000))])
def test_a_limit_in_the_first_version_of_cgroups_counts_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, memory: tuple[int, int]
) -> None:
    """There a group without a limit has the largest number of pages, and pages of groups below count by totals."""
    (tmp_path / "memory").mkdir()
    files = {"limit_in_bytes": limit, "usage_in_bytes": "300", "stat": "inactive_file 5\ntotal_inactive_file 50\n"}
    for name, text in files.items():
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    monkeypatch.setattr(control_groups, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=600, total=1000))
    assert host_memory.host_memory() == memory


# A systemd unit, a Slurm job, and a container that is told the machine's path of its group.
UNIT, JOB = "system.slice/comfyui.service", "slurm/uid_1000/job_7/step_0"


@pytest.mark.parametrize(
    ("own", "limits", "memory"),
    [
        (f"0::/{UNIT}\n", {UNIT: (400, 300)}, (100, 400)),
        (f"0::/{UNIT}\n", {UNIT: ("max", 300), "system.slice": (500, 450)}, (50, 500)),
        (f"0::/{UNIT}\n", {UNIT: (400, 50), "system.slice": (500, 450), "": (800, 500)}, (50, 400)),
        (f"0::/{UNIT}\n", {"system.slice/other.service": (400, 300)}, (600, 1000)),
        ("0::/docker/1234\n", {"": (400, 300)}, (100, 400)),
        ("0::/../../elsewhere\n", {"": (400, 300), "../../elsewhere": (300, 299)}, (100, 400)),
        ("0::/\n", {"": (400, 300)}, (100, 400)),
        ("", {"": (400, 300), UNIT: (300, 299)}, (100, 400)),
        (f"4:memory:/{JOB}\n0::/\n", {f"memory/{JOB}": (400, 300)}, (100, 400)),
        (f"9:cpu,cpuacct:/{UNIT}\n4:hugetlb,memory:/{JOB}\n", {"memory/slurm/uid_1000": (400, 300)}, (100, 400)),
        (f"9:memory_of_others:/{JOB}\n", {f"memory/{JOB}": (400, 300)}, (600, 1000)),
    ],
)
def test_the_least_limit_of_a_processs_group_and_those_around_it_counts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: str,
    limits: dict[str, tuple[int, int]],
    memory: tuple[int, int],
) -> None:
    groups = tmp_path / "sys" / "fs" / "cgroup"
    for path, (limit, used) in limits.items():
        limit_file, used_file, _ = host_memory.VERSIONS[1 if path.startswith("memory") else 2]
        (groups / path).mkdir(parents=True, exist_ok=True)
        for name, text in ((limit_file, limit), (used_file, used), ("memory.stat", "anon 7\n")):
            (groups / path / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(control_groups, "CONTROL_GROUPS", groups)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=600, total=1000))
    assert host_memory.host_memory() == memory


@pytest.mark.parametrize("says", ["zeros", "cuda.synchronize"])  # what is the next to say CUDA's error
def test_what_cannot_be_pinned_is_used_all_the_same_and_said_once(
    says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises_what_it_was_told(*_: object, **__: object) -> None:
        asked.append("error")
        raise RuntimeError("CUDA error: out of memory")

    asked: list[str] = []
    codes = [2, 2, 0]
    register = lambda pointer, num_bytes, flags: codes.pop(0)  # noqa: E731
    unregister = lambda pointer: asked.append("unpinned")  # noqa: E731
    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: SimpleNamespace(add_=lambda _: None))
    monkeypatch.setattr(f"torch.{says}", raises_what_it_was_told)
    host_memory._tell_unpinned.cache_clear()
    monkeypatch.setattr(host_memory, "host_memory", lambda: (available, 1000))
    available = 64
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            held = host_memory.host_bytes(64, device=torch.device("cuda"))
            assert held.fill_(7).sum() == 64 * 7
            del held
    assert asked == ["error", "error", "unpinned"], "CUDA's error is taken back before anybody else asks"
    available, codes[:] = 63, [2]
    with pytest.raises(RuntimeError, match="64 bytes of host memory cannot be pinned .*; free host memory, or use"):
        host_memory.host_bytes(64, device=torch.device("cuda"))
    assert caplog.messages == [
        "weights in host memory cannot be pinned (CUDA error 2): their copies to the GPU are slower"
    ]


@pytest.mark.parametrize(
    ("own", "quotas", "most"),
    [
        (f"0::/{UNIT}\n", {f"{UNIT}/cpu.max": "250000 100000", "system.slice/cpu.max": "max 100000"}, 2.5),
        (f"0::/{UNIT}\n", {f"{UNIT}/cpu.max": "max 100000", "system.slice/cpu.max": "50000 100000"}, 0.5),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4.0),
        (f"3:cpu,cpuacct:/{JOB}\n", {f"cpu/{JOB}/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_quota_us": "300000"}, 3.0),
        ("0::/\n", {}, float("inf")),
    ],
)
def test_a_quota_of_time_leaves_so_many_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, quotas: dict[str, str], most: float
) -> None:
    monkeypatch.setattr(control_groups, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for name, text in quotas.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
        (tmp_path / name).with_name("cpu.cfs_period_us").write_text("100000\n")
    assert control_groups.most_cpus() == most
    monkeypatch.setattr(rank_process.os, "sched_getaffinity", lambda _: set(range(64)))
    assert rank_process.available_cpus() == min(64, max(1, math.ceil(min(64, most))))
