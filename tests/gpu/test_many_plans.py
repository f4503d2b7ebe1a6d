"""A user who changes plans often: groups that no plan and no weights use any more are freed, and results stay right."""

from collections.abc import Iterator

import pytest
from noted import Notes

from gpu.test_nccl_plans import nccl_pool
from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.memory import bytes_of, communicators, kept_bytes
from parallel_runtime.pool.pool import Pool

RANKS = 4
TOLERANCE = 1e-5  # fp32 sums in another order
PLANS = tuple(
    ParallelPlan.parse(text)
    for text in (
        *("ulysses=2,ring=2", "cfg=2,ulysses=2", "pipefusion=4", "pipefusion=2,ulysses=2", "ulysses=3", "pipefusion=3"),
        *("ulysses=2,ring=2,weights=sharded", "pipefusion=2,ring=2", "data=2,ulysses=2,weights=sharded", "cfg=3"),
    )
)
ENGINES = {"gloo": "counting_engine:CountingEngine", "NCCL": "nccl_engine:NcclEngine"}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with nccl_pool(RANKS, request.param) as pool:
        yield pool


def test_the_groups_of_many_plans_in_turn_stay_within_what_the_planner_counts(
    pool: Pool, tiny_hosted: ModelSpec
) -> None:
    """Two rounds, so that groups are freed and made again, and weights that are held outlive their plan's mesh."""
    (expected,) = pool.run(tiny_hosted, ParallelPlan(), [call()]).outs
    threads: list[int] = []
    for plan in PLANS * 2:
        with Notes() as found:
            (out,) = pool.run(tiny_hosted, plan, [call(options=found.option)]).outs
            assert relative_error(out, expected) <= TOLERANCE, plan.describe()
            noted = found.read()
        assert len(noted) == RANKS
        budget = bytes_of(communicators(plan, RANKS)) + kept_bytes(RANKS)
        for rank in noted:
            assert bytes_of(rank["groups"]) <= budget, (plan.describe(), rank["groups"])
        threads.append(max(rank.get("threads", 0) for rank in noted))
    assert max(threads[len(PLANS) :]) <= max(threads[: len(PLANS)]) + 2, threads
    assert pool.generation == 1


@pytest.mark.full
def test_ranks_that_free_groups_in_other_orders_wait_in_a_circle() -> None:
    found = pytest.raises(PoolError, match=r"deadlock for 1.5 s: .*ending the communicator of ranks \(\d, \d\)")
    with nccl_pool(RANKS, "nccl_undone:FreesInOtherOrders") as pool, found:
        for plan in PLANS:
            pool.exchange_pattern(plan)
