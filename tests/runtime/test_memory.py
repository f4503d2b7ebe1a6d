"""Loading a file of 2 GiB: no rank ever holds more than its weights and a little; the host holds nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from host.tiny_models import write_large_flux
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool

ALLOWANCE = 256 * 2**20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = write_large_flux(tmp_path_factory.mktemp("large") / "large.safetensors", gib=2.0, hidden=1024, single=1)
    assert path.stat().st_size >= 2 * 2**30
    yield path
    path.unlink()


def private_bytes(pid: int) -> int:
    return psutil.Process(pid).memory_full_info().uss


@contextmanager
def peak_growth(pids: list[int]) -> Iterator[list[int]]:
    """The most private memory each process had in the block, less what it had before; filled when it ends."""
    before = [private_bytes(pid) for pid in pids]
    peak = list(before)
    growth: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[:] = [max(old, private_bytes(pid)) for old, pid in zip(peak, pids, strict=True)]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()
    growth.extend(new - old for new, old in zip(peak, before, strict=True))


@pytest.mark.parametrize("dtype", ["default", "float16"])
def test_loading_grows_a_rank_by_its_weights_and_a_little(large: Path, dtype: str) -> None:
    pool = Pool(parse_devices("cpu:2").devices, threads_per_rank=1)
    try:
        pool.start()
        seen: list[tuple[int, int]] = []
        with peak_growth(pool.status()["pids"]) as growth:
            loaded = pool.load(ModelSpec.of(large, dtype), progress=lambda done, total: seen.append((done, total)))
    finally:
        pool.close()
    for grown, shard in zip(growth, loaded.parameter_bytes, strict=True):
        assert shard >= 2 * 2**30 * 0.99
        assert grown < shard + ALLOWANCE
    assert len(seen) > 5, "loading shows its progress"
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


def test_weights_in_the_files_own_dtype_are_shared_pages_not_copies(large: Path) -> None:
    pool = Pool(parse_devices("cpu:2").devices, threads_per_rank=1)
    try:
        pool.start()
        pids = pool.status()["pids"]
        before = [anonymous_bytes(pid) for pid in pids]
        pool.load(ModelSpec.of(large))
        assert all(anonymous_bytes(pid) - old < ALLOWANCE for pid, old in zip(pids, before, strict=True))
    finally:
        pool.close()


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel names no anonymous memory")
