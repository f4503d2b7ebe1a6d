"""Plans on ranks whose process group keeps NCCL's rules: nothing waits for ever, and the values are those without."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from noted import FOLDER, Notes

from gpu.cases import RUNS, Case, Reference, is_plan, pairs
from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.memory import bytes_of, communicators, kept_bytes
from parallel_runtime.pool.pool import Pool

# fp32 sums in another order, four calls of the model after one another
TOLERANCE = 1e-5
CHOICES = {
    "plan": (
        *("ulysses=3", "ring=3", "ulysses=2,ring=2", "cfg=3", "cfg=2,ulysses=2", "data=2,cfg=2", "data=2,ring=2"),
        *("pipefusion=2", "pipefusion=3", "pipefusion=4,patches=5", "pipefusion=2,ulysses=2"),
        *("pipefusion=2,ring=2,patches=3", "pipefusion=2,cfg=2", "data=2,pipefusion=2"),
    ),
    "weights": ("replicated", "sharded", "offloaded"),
    "in_workers": (True, False),
    "run": tuple(RUNS),
    "lazy": (False, True),
    "launches_wait": (False, True),
}
RULES = ("lazy", "launches_wait")
RANKS = 4
MANY = tuple(
    ParallelPlan.parse(text)
    for text in (
        *("ulysses=2,ring=2", "cfg=2,ulysses=2", "pipefusion=4", "pipefusion=2,ulysses=2", "ulysses=3", "pipefusion=3"),
        *("ulysses=2,ring=2,weights=sharded", "pipefusion=2,ring=2", "data=2,ulysses=2,weights=sharded", "cfg=3"),
    )
)


def nccl_pool(ranks: int, engine: str = "nccl_engine:NcclEngine") -> Pool:
    """CPU ranks that exchange by NCCL's rules."""
    folders, devices = (str(Path(__file__).parent), FOLDER), parse_devices(f"cpu:{ranks}").devices
    return Pool(devices, threads_per_rank=1, engine=engine, python_path=folders)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Pool]:
    """One set of workers for every plan of up to four ranks."""
    with nccl_pool(RANKS) as pool:
        yield pool


def _name(row: dict[str, object]) -> str:
    return " ".join(str(value if isinstance(value, str) else f"{name}={value:d}") for name, value in row.items())


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=_name(row), marks=[] if number % 3 == 0 else [pytest.mark.full])
        for number, row in enumerate(pairs(CHOICES, allowed=is_plan))
    ],
)
def test_a_plan_neither_hangs_nor_differs(four_ranks: Pool, reference: Reference, row: dict) -> None:
    case = Case(**{name: value for name, value in row.items() if name not in RULES})
    rules = {name: row[name] for name in RULES} | {"seed": zlib.crc32(_name(row).encode())}
    assert reference.error(four_ranks, case, {"nccl": rules}) <= TOLERANCE


def test_ranks_that_keep_to_their_own_tokens_differ(four_ranks: Pool, reference: Reference) -> None:
    for plan in ("ulysses=2", "pipefusion=2,ring=2"):
        assert reference.error(four_ranks, Case(plan=plan), {"local_attention": True}) > 100 * TOLERANCE


def test_the_byte_pattern_goes_round_stages_whose_hosts_wait_for_a_first_message(four_ranks: Pool) -> None:
    for stages in (2, 3, 4):
        assert four_ranks.exchange_pattern(ParallelPlan(pipefusion=stages)) == [0] * 4
    found = pytest.raises(PoolError, match=r"deadlock for 1.5 s: .*rank 0 waits in connecting to rank 1")
    with nccl_pool(3, "nccl_undone:AllSendFirst") as pool, found:
        pool.exchange_pattern(ParallelPlan(pipefusion=3))


def test_groups_that_no_plan_and_no_weights_use_are_freed(four_ranks: Pool, tiny_hosted: ModelSpec) -> None:
    """Two rounds of many plans, so that groups are made again, and weights that are held outlive their plan's mesh.

    What there is stays within what the planner counts.
    """
    (expected,), generation = four_ranks.run(tiny_hosted, ParallelPlan(), [call()]).outs, four_ranks.generation
    for plan in MANY * 2:
        with Notes() as found:
            (out,) = four_ranks.run(tiny_hosted, plan, [call(options=found.option)]).outs
            noted = found.read()
        assert relative_error(out, expected) <= TOLERANCE, plan.describe()
        assert len(noted) == RANKS
        budget = bytes_of(communicators(plan, RANKS)) + kept_bytes(RANKS)
        for rank in noted:
            assert bytes_of(rank["groups"]) <= budget, (plan.describe(), rank["groups"])
    assert four_ranks.generation == generation


@pytest.mark.full
def test_ranks_that_free_groups_in_other_orders_wait_in_a_circle() -> None:
    found = pytest.raises(PoolError, match=r"deadlock for 1.5 s: .*ending the communicator of ranks \(\d, \d\)")
    with nccl_pool(RANKS, "nccl_undone:FreesInOtherOrders") as pool, found:
        for plan in MANY:
            pool.exchange_pattern(plan)
