"""Loading a file of 2 GiB: no rank ever holds more than its weights and a little; the host holds nothing."""

from pathlib import Path

import pytest

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool
from runtime.shard_sizes import weight_bytes
from runtime.watched_memory import peak_growth

pytestmark = pytest.mark.slow

ALLOWANCE = 256 * 2**20


@pytest.mark.parametrize("dtype", ["default", pytest.param("float16", marks=pytest.mark.full)])
def test_loading_grows_a_rank_by_its_weights_and_a_little(large: Path, dtype: str) -> None:
    pool = Pool(parse_devices("cpu:2").devices, threads_per_rank=1)
    try:
        pool.start()
        seen: list[tuple[int, int]] = []
        with peak_growth(pool.status()["pids"]) as growth:
            loaded = pool.load(ModelSpec.of(large, dtype), progress=lambda done, total: seen.append((done, total)))
    finally:
        pool.close()
    whole = sum(weight_bytes(str(large)).values())
    assert loaded.parameter_bytes == [whole, whole]
    assert max(growth) < whole + ALLOWANCE, growth
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
        grown = [anonymous_bytes(pid) - old for pid, old in zip(pids, before, strict=True)]
        assert max(grown) < ALLOWANCE, grown
    finally:
        pool.close()


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel names no anonymous memory")
