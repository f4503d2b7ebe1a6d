"""What a pool says of its devices: measured by every rank, with the real engine."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parallel_runtime.devices import parse_devices
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.pool.pool import Pool
from parallel_runtime.worker import measure, probe

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

pytestmark = pytest.mark.slow


def test_every_rank_measures_its_device() -> None:
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        measured = pool.measure_devices()
    assert len(measured) == 2
    for device in measured:
        assert "cores" in device.name
        assert 0 < device.free_bytes < psutil.virtual_memory().total
        assert 0.1 < device.gflops < 1e5, "a CPU does something in between"


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_a_gpu_is_measured_in_what_models_compute_in(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert measure.computing_dtype(GPU) is dtype
    assert measure.computing_dtype(CPU) is torch.float32


def test_a_gpu_has_its_drivers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card of {device}")
    assert measure._name(GPU) == "card of cuda:0"


def test_devices_are_measured_with_values_that_differ() -> None:
    values = measure.operand(64, 64, device=CPU)
    assert 0.9 < float(values.std()) < 1.1
    assert values.unique().numel() > 4000


def test_memory_that_torch_only_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 << 30)
    assert measure.free_bytes(GPU) == 7 << 30


@pytest.mark.parametrize(
    ("kind", "matmul", "attention", "narrow", "memory", "sent", "elementwise"),
    [
        ("cpu", (2**28, 2**31), (2**27, 2**31), (2**25, 2**29), 2**25, (2**14, 2**21), 13 * 2**21),
        (
            *("meta", (77309411328, 347892350976), (16307453952, 260919263232)),
            *((2038431744, 32614907904), 2**31, (2**18, 2**25), 13 * 4608 * 3072 * 2),
        ),
    ],
)
def test_a_probe_says_what_it_computed_and_sent_at_two_sizes(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    matmul: tuple[int, int],
    attention: tuple[int, int],
    narrow: tuple[int, int],
    memory: int,
    sent: tuple[int, int],
    elementwise: int,
) -> None:
    """Nothing is computed; a GPU's sizes are those of tensors without memory."""
    waits_for_none = list[bool]()

    def seconds(run: Callable[[], object], device: torch.device, *, alone: bool = True) -> float:
        waits_for_none.append(alone)
        return 1.0

    monkeypatch.setattr(probe, "_seconds", seconds)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setitem(probe.SIZES, "meta", probe.SIZES["cuda"])
    alone, shared = (probe.probe(Axis("ulysses", size), torch.device(kind)) for size in (1, 3))
    assert alone.all_to_all == ()
    assert {name: [work for work, _ in rows] for name, rows in vars(shared).items()} == {
        **{"matmul": list(matmul), "attention": list(attention), "narrow_attention": list(narrow)},
        **{"memory": [memory], "elementwise": [elementwise], "operations": [200.0]},
        **{"all_to_all": [2 * (num_bytes // 2) for num_bytes in sent]},
    }
    assert waits_for_none == [True] * 9 + [True] * 5 + [False] * 2 + [True] * 4


@pytest.mark.parametrize(
    ("device", "alone", "threads", "taken_s"),
    [(CPU, True, 1, 50), (CPU, True, 2, 5), (CPU, False, 1, 1), (GPU, True, 1, 5), (GPU, False, 1, 5)],
)
def test_a_run_counts_by_the_median_and_a_cpus_exchange_by_the_quickest_after_one_that_warms_up(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, alone: bool, threads: int, taken_s: float
) -> None:
    now_s, waits, runs = [0.0], list[torch.device](), iter([0, 1, 9, 3, 7, 5, 2, 8, 4, 6])
    clocks = {"perf_counter": lambda: now_s[0], "thread_time": lambda: 10 * now_s[0]}
    monkeypatch.setattr(probe, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)

    def run() -> None:
        now_s[0] += next(runs)

    assert probe._seconds(run, device, alone=alone) == taken_s
    assert waits == ([GPU] * 10 if device is GPU else []) and not list(runs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_probe_computes_and_sends_what_it_says(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    made, flops, sent = list[object](), list[int](), list[object]()

    def seconds(run: Callable[[], object], device: torch.device, *, alone: bool = True) -> float:
        with FlopCounterMode(display=False) as counter:
            made.append(run())
        flops.append(counter.get_total_flops())
        return 1.0

    def all_to_all(send: torch.Tensor, **lengths: tuple[int, ...]) -> str:
        sent.append((send.numel(), lengths))
        return "exchanged"

    monkeypatch.setattr(probe, "_seconds", seconds)
    monkeypatch.setitem(probe.SIZES, "cpu", probe._Sizes(64, 4, (8, 16), (32, 48), (12, 24), 40))
    axis: Any = SimpleNamespace(size=size, all_to_all=all_to_all)
    said = probe.probe(axis, CPU)
    assert flops[:2] == [work for work, _ in said.matmul] == [2 * rows * 64 * 256 for rows in (8, 16)]
    shapes = [tuple(each.shape) for each in made if isinstance(each, torch.Tensor)]
    narrow = [(1, tokens, 4, probe.NARROW) for tokens in (32, 48)]
    assert shapes == [(8, 256), (16, 256), (1, 32, 4, 16), (1, 48, 4, 16), (40,), *narrow, (16, 64), (64, 64)]
    exchanges, parts = ["exchanged"] * 2, [num_bytes // max(1, size - 1) for num_bytes in (12, 24)]
    assert [each for each in made if isinstance(each, str)] == (exchanges if size > 1 else [])
    lengths = [dict.fromkeys(("send_lengths", "receive_lengths"), (part,) * size) for part in parts]
    each = [(part * size, told) for part, told in zip(parts, lengths, strict=True)]
    assert sent == (each if size > 1 else [])
