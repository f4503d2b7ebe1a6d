"""Graphs of blocks on CPU ranks, as tapes: each chapter of graph_chapters.py that takes no GPU's rules.

`make pretend-cuda` has chapters under NCCL's rules, and the mistakes that they must find (pretend_cuda/mistakes.py).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.graph_chapters import CHAPTERS, compared, several
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def pool(told: Path) -> Iterator[Pool]:
    path = (str(Path(__file__).parent), str(told))
    with Pool(
        parse_devices("cpu:2").devices, threads_per_rank=1, engine="tape_engine:TapeEngine", python_path=path
    ) as made:
        yield made


# "replays" is what the others begin with.
@pytest.mark.parametrize("chapter", sorted(CHAPTERS.keys() - {"groups_end", "one_cannot", "replays"}))
def test_blocks_by_graphs_compute_what_they_do_without_whatever_changes_between_calls(chapter: str, pool: Pool) -> None:
    assert CHAPTERS[chapter](pool, ParallelPlan(ulysses=2)) == ""


def test_a_rank_killed_in_a_replay_ends_the_run_as_any_lost_rank_and_the_next_one_has_other_graphs(
    pool: Pool, told: Path
) -> None:
    plan = ParallelPlan(ulysses=2)
    assert CHAPTERS["replays"](pool, plan) == ""
    generation = pool.generation
    (told / "dies_in_replay").write_text("1")
    with pytest.raises(PoolError) as said:
        compared(pool, plan, step=9)
    assert str(said.value).splitlines()[0] == "rank 1: killed by SIGKILL; the next prompt starts fresh workers"
    assert several(pool, plan) == "" and pool.generation == generation + 1, "its blocks are seen and recorded again"
