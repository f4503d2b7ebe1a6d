"""What the planner is told of a machine's devices, by what torch and the cache of calibrations say of them."""

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from parallel_runtime import nvlink
from parallel_runtime.choices import choice_for
from parallel_runtime.devices import Device, parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner import machine
from parallel_runtime.planner.automatic import usual_work
from parallel_runtime.planner.choose import choose_plan
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.hardware import GIB
from parallel_runtime.planner.known import known_calibration, known_link
from parallel_runtime.planner.store import CalibrationStore
from parallel_runtime.trials.calibrate import calibrate
from parallel_runtime.wire.replies import ProbeReply

FLUX = usual_counted().model
L40 = (Device("cuda", 0), Device("cuda", 1))
BOTH = (*L40, Device("cuda", 0, "shelf"))
CPU = parse_devices("cpu:2").devices
TORCH = f"torch {torch.__version__}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CalibrationStore:
    """Of a machine of three GPUs, the last of another name; torch is asked for nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L40" if index < 2 else "NVIDIA L20")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (11 - index, 99))
    found = {index: SimpleNamespace(uuid=f"u{index}", total_memory=21 - index) for index in range(3)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    return CalibrationStore.of_user()


def test_devices_are_kept_by_what_they_are_and_how_many(
    store: CalibrationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.device_set(L40) == f"2 x NVIDIA L40, {TORCH}"
    assert machine.device_set((*L40, Device("cuda", 2))) == f"3 x NVIDIA L20 + NVIDIA L40, {TORCH}"
    further = (*BOTH, Device("cuda", 0, "attic"))
    assert machine.device_set(further) == f"4 x NVIDIA L40 with attic and shelf, {TORCH}"
    assert machine.device_set(CPU) == f"2 x cpu of {os.cpu_count()}, {TORCH}"
    assert [machine.identity(device) for device in (*BOTH[1:], *CPU)] == [
        *("cuda:1 u1", str(BOTH[2]), *map(str, CPU)),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert machine.identity(L40[1]) == "cuda:1", "a torch that does not tell the UUID"


def test_memory_is_each_devices_the_hosts_is_shared_and_further_machines_have_the_least(
    store: CalibrationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.free_bytes(BOTH) == [11, 10, 10] and machine.whole_bytes(BOTH) == [21, 20, 20]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=31, total=41))
    assert machine.free_bytes(CPU) == [15, 15] and machine.whole_bytes(CPU) == [20, 20]
    assert machine.look(L40) == (machine.constants(L40), [11, 10])


def test_constants_are_the_tables_until_they_are_measured(store: CalibrationStore) -> None:
    most = choice_for((8, 9)).most_chunks
    table = known_calibration("NVIDIA L40", devices=8)
    table = replace(table, rates=replace(table.rates, most_chunks=most))
    assert machine.measured(L40) is None and machine.calibration_identity() is None
    assert machine.constants(L40[:1]) == table == machine.constants(L40)
    assert machine.constants(L40, link="pcie3").link == known_link("pcie3")
    assert machine.constants(CPU[:1]) == known_calibration("cpu") == machine.constants(CPU)
    assert machine.overlap(L40[:1], ParallelPlan()) is None
    own = replace(known_calibration("A100"), source="of four")
    store.save(f"4 x NVIDIA L40, {TORCH}", own)
    path, *first = machine.calibration_identity()
    assert path == str(store.path) and first == [
        *(store.path.stat().st_ino, store.path.stat().st_mtime_ns, store.path.stat().st_size)
    ]
    offered = "measured on 4 of these devices by doctor, 2 are offered"
    assert machine.measured(L40) == replace(own, source=offered)
    assert machine.constants(L40).rates == replace(own.rates, most_chunks=most)
    told = machine.constants(L40, link="pcie3")
    assert (told.link, told.source) == (known_link("pcie3"), f"{offered}; the link is the table's pcie3, as told")
    store.save(f"4 x cpu of {os.cpu_count()}, {TORCH}", own)
    assert machine.measured(CPU) is None, "more ranks have fewer cores each"
    store.save(machine.device_set(CPU), own)
    assert machine.measured(CPU) == own == machine.constants(CPU)


def test_several_machines_are_measured_together_or_their_link_is_taken_for_a_slow_one(store: CalibrationStore) -> None:
    assert machine.measured(BOTH) is None
    here = machine.constants(L40)
    source = f"{here.source}; the link between machines is taken for ethernet1, as it was not measured"
    assert machine.constants(BOTH) == replace(here, between=known_link("ethernet1"), machines=(2, 1), source=source)
    own = replace(known_calibration("A100"), between=known_link("ethernet10"))
    store.save(machine.device_set(BOTH), own)
    assert machine.measured(BOTH) == replace(own, machines=(2, 1))
    assert machine.constants(BOTH).between == known_link("ethernet10")


class Probed:
    """A pool of an RTX 4090 and an RTX 3060, of which every rank answers with what its device takes."""

    devices = L40

    def probe(self, _: ParallelPlan) -> list[ProbeReply]:
        """Amounts and seconds, the second device's of six times as many."""
        return [
            ProbeReply(
                matmul=((1e12, factor * 1e-2), (2e12, factor * 2e-2)),
                attention=((1e12, factor * 1e-2), (2e12, factor * 2e-2)),
                memory=((1e9, factor * 1e-3), (2e9, factor * 2e-3)),
                elementwise=((1e9, factor * 1e-3), (2e9, factor * 2e-3)),
                all_to_all=((1e6, 1e-3), (1e7, 2e-3)),
                operations=((10.0, 1e-4), (20.0, 2e-4)),
            )
            for factor in (1.0, 6.0)
        ]


def test_each_kind_of_gpu_is_measured_and_planned_for_at_its_speed(
    store: CalibrationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    found = calibrate(Probed())
    assert [name for name, _ in found.kinds] == names and found.rates == found.kinds[0][1]
    store.save(machine.device_set(L40), found)
    told = machine.constants(L40)
    assert told.speeds == pytest.approx((1.0, 1 / 6)) and told.rates.matmul_flops == pytest.approx(1e14)
    assert "cuda:1 (NVIDIA GeForce RTX 3060) at 0.17 of the speed of cuda:0" in told.source
    choice = choose_plan(FLUX, usual_work(), [80 * GIB] * 2, told)
    assert choice.plan == ParallelPlan(), "with the slow card it would take longer"
    turned = machine.constants(L40[::-1])
    assert turned.speeds == pytest.approx((1.0, 6.0)) and turned.rates.matmul_flops == pytest.approx(1e14 / 6)
    assert turned.source.endswith("name the quickest device first, so that it is weighed alone")
    store.save(machine.device_set(L40), replace(found, kinds=(), rates=found.kinds[1][1]))  # as older versions kept it
    older = machine.constants(L40)
    assert older.speeds == pytest.approx((5.6, 1.0), abs=0.02), "the slowest card's rates, and the table's speeds"
    assert "cuda:1 (NVIDIA GeForce RTX 3060) at 0.18 of the speed of cuda:0" in older.source
    assert "quickest" not in older.source
    assert choose_plan(FLUX, usual_work(), [80 * GIB] * 2, older).plan == ParallelPlan()
    names[1] = "Some GPU"
    store.save(machine.device_set(L40), replace(found, kinds=()))
    assert machine.constants(L40).speeds == (1.0, 1.0)
    names[1] = names[0]
    store.save(machine.device_set(L40), calibrate(Probed()))
    assert machine.constants(L40).speeds == () and machine.measured(L40).kinds == ()


class Nvml:
    """The driver's library, of a machine with NVLink between some pairs of its GPUs."""

    class NVMLError(Exception):
        """As NVML's own."""

    def __init__(self, linked: set[tuple[str, str]], *, known: bool = True) -> None:
        self.linked, self.known = linked, known

    def nvmlInit(self) -> None:  # noqa: N802
        """Nothing to start."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        """The UUID stands for its device."""
        if not self.known or not uuid.startswith("GPU-"):
            raise self.NVMLError
        return uuid.removeprefix("GPU-")

    def nvmlDeviceGetP2PStatus(self, first: str, second: str, what: int) -> int:  # noqa: N802
        """0 where they are linked, as nvmlGpuP2PStatus_t has it."""
        if (first, second) == ("u0", "u9"):
            raise self.NVMLError
        return 0 if what == nvlink.P2P_NVLINK and (first, second) in self.linked else 5


def asked_of(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    """Lets `nvlink.py` find this library, None for a machine without it."""

    def found(name: str) -> Nvml:
        if name != "pynvml" or nvml is None:
            raise ImportError(name)
        return nvml

    nvlink.all_linked.cache_clear()
    monkeypatch.setattr(nvlink.importlib, "import_module", found)


def test_nvlink_is_between_gpus_where_the_driver_says_so_of_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {(f"u{a}", f"u{b}") for a in range(6) for b in range(a + 1, 6)}
    for linked, expected in ((pairs, True), (pairs - {("u0", "u5")}, False), (set(), False)):
        asked_of(monkeypatch, Nvml(linked))
        assert nvlink.all_linked(tuple(f"u{index}" for index in range(6))) is expected
    asked_of(monkeypatch, Nvml(pairs))
    assert nvlink.all_linked(("u0", "u9")) is None, "NVML does not support the question"
    older = Nvml(pairs)
    older.nvmlDeviceGetHandleByUUID = lambda uuid: ctypes.c_char_p(uuid)  # as pynvml 11.0 has it: a TypeError
    for nvml in (None, Nvml(pairs, known=False), older):
        asked_of(monkeypatch, nvml)
        assert nvlink.all_linked(("u0", "u1")) is None


def test_a_bridge_between_two_cards_is_seen_where_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    names, asked = ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"], list[tuple[str, ...]]()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index % 2])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "measured", lambda _: None)
    monkeypatch.setattr(machine, "_with_choices", lambda found, _: found)
    monkeypatch.setattr(machine, "gpu_uuid", lambda index: f"u{index}")
    for linked, link in ((True, "nvlink-bridge"), (False, "pcie3"), (None, "pcie3")):
        monkeypatch.setattr(machine, "all_linked", lambda uuids, linked=linked: asked.append(uuids) or linked)
        found = machine.constants(L40)
        assert found.link == known_link(link) and f"(RTX 3090, {link}, eager)" in found.source
    assert asked == [("u0", "u1")] * 3
    monkeypatch.setattr(machine, "all_linked", lambda _: True)
    assert machine.constants(L40, link="pcie4").link == known_link("pcie4"), "the user knows better"
    assert machine.constants(L40[:1]).link == known_link("pcie3")
    four = tuple(Device("cuda", index) for index in range(4))
    assert machine.constants(four).link == known_link("pcie3"), "a bridge joins two"
    assert 1.9 < known_link("nvlink-bridge").bandwidth / known_link("pcie3").bandwidth < 2.3
    names[1] = "NVIDIA GeForce RTX 4090"
    assert machine.constants(L40).link == known_link("pcie3")
    names[:] = ["NVIDIA GeForce RTX 4090"] * 2
    assert machine.constants(L40).link == known_link("pcie4"), "a 4090 has no bridge"


@pytest.mark.parametrize(
    ("name", "count", "linked", "shared"),
    [
        ("NVIDIA L4", 8, None, False),  # in the table, which says what a ring gains
        ("NVIDIA H100 80GB HBM3", 8, None, False),
        ("NVIDIA A10", 6, None, True),  # unknown, and nobody says how they are connected
        ("NVIDIA A10", 4, None, False),
        ("NVIDIA A10", 6, False, True),
        ("NVIDIA Next", 8, True, False),
        ("Tesla V100-SXM2-16GB", 8, None, False),
        ("Tesla V100-SXM2-16GB", 8, False, True),  # pairs without NVLink
        ("AMD Instinct MI300X", 8, None, False),
        ("AMD Radeon PRO W7900", 8, None, False),
    ],
)
def test_many_cards_without_nvlink_share_the_way_between_host_bridges(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, linked: bool | None, shared: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(machine, "gpu_uuid", lambda index: f"u{index}")
    monkeypatch.setattr(torch.version, "hip", "6.4" if "AMD" in name else None)
    monkeypatch.setattr(machine, "all_linked", lambda uuids: linked if len(uuids) == count else None)
    devices = tuple(Device("cuda", index) for index in range(count))
    assert machine.share_a_bridge(devices) is shared
    assert machine.share_a_bridge((*devices[:4], *(Device("cuda", 0, "shelf") for _ in range(4)))) is False
    assert machine.share_a_bridge(parse_devices("cpu:8").devices) is False
