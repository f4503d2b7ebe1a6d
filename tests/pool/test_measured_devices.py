"""What a pool says of its devices: measured by every rank, with the real engine."""

from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool


def test_every_rank_measures_its_device() -> None:
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        measured = pool.measure_devices()
    assert [device["device"] for device in measured] == ["cpu:0", "cpu:1"]
    for device in measured:
        assert set(device) == {"device", "name", "free_bytes", "total_bytes", "gflops"}
        assert 0 < device["free_bytes"] < device["total_bytes"]
        assert 0.1 < device["gflops"] < 1e5, "a CPU does something in between"
