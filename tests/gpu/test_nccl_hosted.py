"""Pipelines of ComfyUI's own modules on ranks whose process group keeps NCCL's rules: nothing waits for ever, and the
values are those of ranks over gloo, which tests/models holds to one process."""

import zlib
from collections.abc import Iterator

import pytest
import torch

from gpu.test_nccl_plans import nccl_pool
from models.pooled import STEPS, run_steps, write_wan
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

TOLERANCE = 1e-5  # fp32 sums in another order
PLANS = (
    *("pipefusion=2,patches=4", "pipefusion=3,patches=4", "pipefusion=2,patches=4,ulysses=2"),
    *("pipefusion=2,patches=4,ring=2", "pipefusion=2,patches=4,cfg=2,weights=sharded"),
)
RULES = ({"lazy": True, "launches_wait": True}, {"lazy": False, "launches_wait": True}, {"lazy": True})


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The model's file."""
    return write_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def over_gloo(wan: ModelSpec) -> list[torch.Tensor]:
    """What two stages compute without the rules."""
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        return run_steps(pool, wan, ParallelPlan(pipefusion=2, patches=4), run="gloo")


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Pool]:
    """Ranks that keep the rules."""
    with nccl_pool(4) as pool:
        yield pool


@pytest.mark.parametrize("name", PLANS)
def test_a_pipeline_neither_hangs_nor_differs(
    four_ranks: Pool, wan: ModelSpec, over_gloo: list[torch.Tensor], name: str
) -> None:
    for number, rules in enumerate(RULES):
        told = {"nccl": {**rules, "seed": zlib.crc32(f"{name} {number}".encode())}}
        got = run_steps(four_ranks, wan, ParallelPlan.parse(name), run=f"{name} {number}", options=told)
        assert len(got) == STEPS
        assert all(relative_error(*pair) <= TOLERANCE for pair in zip(got, over_gloo, strict=True))
