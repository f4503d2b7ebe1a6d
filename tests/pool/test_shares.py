"""A run inside the workers as its parent sees it: which batch group does what, and when a step is done."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from host.hosted_runs import make_run, with_options
from host.tiny_hosted import call
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.pool.calls import (
    TRACE_BYTES,
    RunResult,
    Steps,
    WorkerLoopResult,
    inputs_of,
    refuse_unfit_loop,
    results_of,
    shape_of,
    split_rows,
    traces_of,
    whole_trace,
    work_of_groups,
    writers,
)
from parallel_runtime.stock_caches import StockCache
from parallel_runtime.wire.replies import Progress
from parallel_runtime.wire.requests import GroupWork

LAZY = StockCache(easy=False, threshold=0.2, calls="")


def share(start: int, stop: int, *conds: int, shares_cfg: bool = False) -> GroupWork:
    return GroupWork(start=start, stop=stop, conds=conds, shares_cfg=shares_cfg)


def test_each_side_goes_to_a_batch_group_of_its_own_and_images_to_the_replicas() -> None:
    four = ParallelPlan(data=2, cfg=2)
    assert work_of_groups(four, images=3, num_conds=2) == (
        share(0, 2, 0, shares_cfg=True),
        share(0, 2, 1, shares_cfg=True),
        share(2, 3, 0, shares_cfg=True),
        share(2, 3, 1, shares_cfg=True),
    )
    one_image = work_of_groups(four, images=1, num_conds=2)
    assert one_image[2:] == (share(1, 1), share(1, 1)), "a replica without an image does nothing"
    assert work_of_groups(four, images=3, num_conds=1) == (share(0, 1, 0), share(1, 2, 0), share(2, 3, 0), share(3, 3))
    assert work_of_groups(ParallelPlan(data=2), images=2, num_conds=2) == (share(0, 1, 0, 1), share(1, 2, 0, 1))


def test_a_step_is_told_once_every_writer_has_done_it_in_order() -> None:
    granted, told = [], []
    steps = Steps(
        writers=[0, 2],
        preview=lambda slot: torch.tensor(slot),
        grant=granted.append,
        on_step=lambda step, preview: told.append((step, int(preview))),
    )
    (ahead,) = granted
    assert ahead == 2, "as many steps as there are previews"
    one, two, three, four = (Progress(done=count, total=4) for count in range(1, 5))
    steps.take({0: one})
    steps.take({0: four, 1: four})
    assert told == [], "rank 2 writes too"
    steps.take({0: two, 2: one})
    assert told == [(0, 0)]
    steps.take({0: three, 2: three})
    assert told == [(0, 0), (1, 1), (2, 0)]
    assert granted == [2, 3, 4, 5]


def test_the_ranks_that_write_are_those_of_the_last_stage_of_groups_that_have_work() -> None:
    def of(plan: ParallelPlan, batch: int, texts: tuple[int, ...]) -> list[int]:
        return writers(plan, make_run(batch=batch, texts=texts))

    assert of(ParallelPlan(ulysses=2), 1, (7,)) == [0, 1]
    assert of(ParallelPlan(cfg=2, ulysses=2), 1, (7, 7)) == [0, 1, 2, 3]
    assert of(ParallelPlan(cfg=2, ulysses=2), 1, (7,)) == [0, 1], "one image of one side"
    assert of(ParallelPlan(pipefusion=2, ulysses=2), 1, (7,)) == [2, 3]
    assert of(ParallelPlan(data=2, pipefusion=2, ring=2), 2, (7, 7)) == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("plan", "texts", "step_cache", "cache", "why"),
    [
        ("cfg=3", (7, 7), 0.1, None, "and a step cache decides on all of them; use cfg=2"),
        ("cfg=3,weights=sharded", (7, 7), 0.0, LAZY, "and a step cache decides on all of them; use cfg=2"),
        ("cfg=3,pipefusion=2", (7, 9), 0.0, None, "and a pipeline goes on with all of them; use cfg=2"),
        ("cfg=3", (7, 7), 0.0, None, ""),
        ("cfg=2,pipefusion=2", (7, 9), 0.0, None, ""),
        ("cfg=2", (7, 7), 0.1, LAZY, ""),
        ("cfg=3", (7,), 0.1, None, ""),
        ("pipefusion=2", (7,), 0.0, LAZY, "a step cache decides between the steps of a pipeline"),
        ("pipefusion=2", (7,), 0.0, None, ""),
    ],
)
def test_a_pipeline_and_a_group_without_a_prompt_decide_nothing_between_steps(
    plan: str, texts: tuple[int, ...], step_cache: float, cache: StockCache | None, why: str
) -> None:
    conds = with_options(make_run(texts=texts), step_cache=step_cache).conds
    with pytest.raises(ValueError, match=f"{why}$") if why else nullcontext():
        refuse_unfit_loop(ParallelPlan.parse(plan), conds, cache)


def test_a_request_has_its_tensors_results_and_traces_by_name() -> None:
    calls = [call(options={"trace": trace}) for trace in (False, True)]
    assert list(inputs_of(calls))[:1] == ["0.t0"] and list(inputs_of(calls))[-1].startswith("1.t")
    assert [(name, each.dtype, each.shape[0]) for name, each in results_of(calls).items()] == [
        ("0.out", torch.float32, 1),
        ("1.out", torch.float32, 1),
    ]
    assert traces_of(calls[:1], num_ranks=2) == {}
    rooms = traces_of(calls, num_ranks=2)
    assert {name: (each.dtype, each.shape) for name, each in rooms.items()} == {
        f"trace.{rank}": (torch.uint8, (TRACE_BYTES,)) for rank in range(2)
    }
    assert whole_trace(torch.arange(5, dtype=torch.uint8), 3) == b"\0\1\2"
    assert shape_of(calls[:1]) == shape_of([call(seed=1)]) != shape_of([call(text=8)])
    with pytest.raises(ValueError, match="no calls to run; give at least one"):
        split_rows([], ParallelPlan())
    assert split_rows(calls, ParallelPlan()) == ((BatchSlice(0, 0, 1), BatchSlice(1, 0, 1)),)
    assert split_rows(calls, ParallelPlan(cfg=2)) == ((BatchSlice(0, 0, 1),), (BatchSlice(1, 0, 1),))


def test_a_result_says_what_the_slowest_rank_took_and_the_first_reason() -> None:
    def ran(**said: object) -> SimpleNamespace:
        return SimpleNamespace(ran=SimpleNamespace(**said))

    asleep = SimpleNamespace(ran=None)
    graphs = [
        ran(compiled=None),
        ran(compiled=SimpleNamespace(compile_s=2.0)),
        ran(compiled=SimpleNamespace(compile_s=1.0)),
    ]
    result = RunResult([], [*graphs, asleep], 1.0, {})  # type: ignore[list-item]
    assert (len(result.ran), result.compile_s, RunResult([], [], 1.0, {}).compile_s) == (3, 2.0, 0.0)
    ranks = [ran(drained=None, skipped_calls=None), asleep, ran(drained="why", skipped_calls=3)]
    run = WorkerLoopResult(torch.empty(0), ranks, 1.0)  # type: ignore[arg-type]
    assert (len(run.ran), run.drained, run.skipped_calls) == (2, "why", 3)
    without_ranks = WorkerLoopResult(torch.empty(0), [], 1.0)
    assert (without_ranks.drained, without_ranks.skipped_calls) == (None, 0)
