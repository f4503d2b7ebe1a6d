"""Ranks that wait for others are silent and well; who is to blame is the one that they wait for."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from host.hosted_runs import make_run, with_options
from host.tiny_hosted import spec_of, write_tiny
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

PATIENCE_S, DEADLINE_S = 60.0, 3.0  # fresh ranks are slow the first time
BLOCKS = 8  # a stage of two has four: together longer than the deadline, each far shorter
SLOWLY = ["sleep", 1.0, 4]
STAGES, GROUPS = ParallelPlan.parse("pipefusion=2,warmup_steps=3"), ParallelPlan(cfg=3)
APART = ParallelPlan(
    data=2
)  # batch groups that never exchange: one waits for leave to start a step, which is the others' to earn


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("waiting") / "many_blocks.safetensors"
    return spec_of(write_tiny(path, num_heads=2, dim=48, num_layers=BLOCKS))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(
        parse_devices("cpu:3").devices,
        threads_per_rank=1,
        engine="waiting_engine:Unhurried",
        python_path=(str(Path(__file__).parent),),
    ) as three_ranks:
        yield three_ranks


def sample(pool: Pool, spec: ModelSpec, plan: ParallelPlan, **between_blocks: list) -> torch.Tensor:
    """A whole run in which rank 0 or 1 does that between its blocks."""
    pool.deadline_s = DEADLINE_S if between_blocks else PATIENCE_S
    asked = {name.removeprefix("rank"): asked for name, asked in between_blocks.items()}
    run = with_options(make_run(texts=(5, 7), batch=2), between_blocks=asked)
    return pool.sample(spec, plan, run, check_cancelled=not_for_ever()).out


def not_for_ever() -> Callable[[], None]:
    """A check that lets a caller go whom nothing else does."""
    until = time.monotonic() + 2 * PATIENCE_S

    def check() -> None:
        if time.monotonic() > until:
            raise TimeoutError("nobody has ended this run")

    return check


def test_a_stage_and_an_idle_batch_group_may_wait_longer_than_the_deadline(pool: Pool, spec: ModelSpec) -> None:
    """Stage 1 has nothing to do while stage 0 computes, nor has the third batch group, which has no conditioning."""
    for plan in (STAGES, GROUPS):
        right, generation = sample(pool, spec, plan), pool.generation
        assert torch.equal(sample(pool, spec, plan, rank0=SLOWLY), right)
        assert pool.generation == generation


@pytest.mark.parametrize(("plan", "fault"), [(STAGES, "hang"), (APART, "stop")])
def test_the_rank_that_the_others_wait_for_is_named(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, fault: str
) -> None:
    """Those that wait have been silent for longer."""
    sample(pool, spec, plan)
    with pytest.raises(PoolError, match=r"^rank 1: no answer to SAMPLE and no heartbeat for \d") as caught:
        sample(pool, spec, plan, rank1=[fault, 0.06, 6])
    assert ("held by a signal" in str(caught.value)) == (fault == "stop")
