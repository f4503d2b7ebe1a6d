"""Loading a file of 2 GiB over two ranks: each grows by its part and the buffers, whatever is converted."""

from pathlib import Path

import pytest
import torch
from noted import FOLDER, Notes

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool
from runtime.watched_memory import peak_growth

pytestmark = pytest.mark.slow

HERE = str(Path(__file__).parent)
ALLOWANCE = 64 * 2**20  # one piece of the file (32 MiB), and what a process takes for itself


@pytest.mark.parametrize(
    ("dtype", "offloaded"),
    [
        pytest.param("float16", False, marks=pytest.mark.full),
        ("default", False),
        pytest.param("default", True, marks=pytest.mark.full),
    ],
)
def test_a_rank_grows_by_its_part_and_the_buffers(large: Path, dtype: str, offloaded: bool) -> None:
    with (
        Notes() as notes,
        Pool(
            parse_devices("cpu:2").devices,
            threads_per_rank=1,
            engine="shard_engine:ShardEngine",
            python_path=(HERE, FOLDER),
        ) as pool,
    ):
        spec, plan = ModelSpec.of(large), ParallelPlan(ulysses=2)
        pool.load(spec)
        with peak_growth(pool.status()["pids"]) as growth:
            options = {"check": "load", "path": str(large), "dtype": dtype, "offloaded": offloaded, **notes.option}
            call = ModelCall(tensors={}, out_shape=(1,), out_dtype=torch.float32, options=options)
            pool.run(spec, plan, [call])
        noted = notes.read()
    for grown, found in zip(growth, noted, strict=True):
        assert abs(found["shard"] - found["whole"] / 2) < 2**20
        assert found["buffers"] < 2**28
        assert found["shard"] * 0.99 < grown < found["shard"] + found["buffers"] + ALLOWANCE, (grown, found)
