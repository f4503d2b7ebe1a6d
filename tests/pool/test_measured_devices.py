"""What a pool says of its devices: measured by every rank, with the real engine."""

import pytest
import torch

from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool
from parallel_runtime.worker import measure

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

pytestmark = pytest.mark.slow


def test_every_rank_measures_its_device() -> None:
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        measured = pool.measure_devices()
    assert len(measured) == 2
    for device in measured:
        assert "cores" in device.name
        assert 0 < device.free_bytes < device.total_bytes
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


def test_devices_are_measured_with_values_that_differ() -> None:
    values = measure.operand(64, 64, device=CPU)
    assert 0.9 < float(values.std()) < 1.1
    assert values.unique().numel() > 4000


def test_memory_that_torch_only_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 << 30)
    assert measure.free_bytes(GPU) == 7 << 30
