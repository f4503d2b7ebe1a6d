"""One rank's own part of a request, in this process: which calls it makes, what it reads and writes, and its times."""

import itertools
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from host.hosted_runs import heun
from parallel_runtime.choices import choice_for
from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.exchange_formats import EXACT, FP8
from parallel_runtime.model_call import CallPlace
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.sampler_recurrence import CallReading, RecurrenceStep, SamplerRecurrence
from parallel_runtime.stock_caches import LOOKED_AT, StockCache
from parallel_runtime.timing import ClockRegion, LaunchThrottle, RegionTimer
from parallel_runtime.wire.channel import Segment, SegmentTable
from parallel_runtime.wire.protocol import Op
from parallel_runtime.wire.replies import TimeSpent
from parallel_runtime.wire.requests import CheckCopies, GroupWork, Step, Trim
from parallel_runtime.worker import live_times, steady_pipeline, worker_loop
from parallel_runtime.worker.engine import ATTENDED, Engine
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.host_copies import HostCopies
from parallel_runtime.worker.hosted import HostedForward, HostedModel
from parallel_runtime.worker.hosted_pipeline import HostedPipeline, Passes
from parallel_runtime.worker.hosted_sampling import AppliedModel, CallSampling, HostedCalls
from parallel_runtime.worker.latent import LatentRows
from parallel_runtime.worker.parted_latent import PartedLatent
from parallel_runtime.worker.steady_pipeline import SteadyCalls
from parallel_runtime.worker.worker_loop import Calls, Gate, WorkerLoop

from .pretend_device import pretended_cuda

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NONE_OF_OURS = {"plan": ParallelPlan(), "model": 7, "calls": ()}  # a request for a model that the rank has not


def table() -> SegmentTable:
    segment, fd = Segment.create(1 << 16)
    os.close(fd)
    return SegmentTable(segment)


def forward(*, in_order: bool = True, shards: object = None, size: int = 1, index: int = 0) -> HostedForward:
    """Of a model whose blocks lie with `size` ranks; this is rank `index` of those that share tokens."""
    weights = SimpleNamespace(in_order=in_order, shards=shards)
    model: Any = SimpleNamespace(weights=weights, group=SimpleNamespace(size=size), module="module", kept=None)
    sequence = SequenceParallelAttention()
    sequence.index = index
    timer = RegionTimer(CPU, on=False)
    return HostedForward(model, sequence, timer, lambda: None, HeldState(CPU))


FIRST, SECOND, THIRD, OTHER = BatchSlice(0, 0, 1), BatchSlice(0, 1, 2), BatchSlice(1, 0, 2), BatchSlice(1, 2, 3)


@pytest.mark.parametrize(
    ("groups", "sharded", "in_order", "ran"),
    [
        # each piece with whether it is written, and whether scales are shared with the replica's other batch group
        (((OTHER,), (FIRST, THIRD), (SECOND, OTHER)), False, True, [(FIRST, True, True), (THIRD, True, True)]),
        (((), (FIRST,), (THIRD,)), False, True, [(FIRST, True, False)]),
        (((), (FIRST, THIRD), (SECOND,)), False, True, [(FIRST, True, True), (THIRD, True, False)]),
        (((), (), (SECOND,)), False, True, []),
        (((FIRST,), (), (SECOND,)), True, True, [(SECOND, False, False)]),
        (((FIRST,), (FIRST,), (SECOND,)), True, False, [(FIRST, True, False), (SECOND, False, False)]),
        (((FIRST,), (FIRST,), (SECOND,)), True, True, [(FIRST, True, True)]),
        (((FIRST,), (FIRST,), (SECOND,)), False, False, [(FIRST, True, True)]),
    ],
)
def test_a_rank_runs_its_groups_pieces_and_those_for_which_others_need_its_weights(
    groups: Any, sharded: bool, in_order: bool, ran: list[tuple[BatchSlice, bool, bool]]
) -> None:
    """Batch group 1, whose replica has 2 beside it; 0 is of another."""
    found: list[tuple[BatchSlice, bool, bool]] = []
    rank = forward(in_order=in_order, shards="shards" if sharded else None, size=2)
    mesh: Any = SimpleNamespace(replica_groups=range(1, 3), batch_group=1, plan=SimpleNamespace(parts=1))
    mesh.axes = {"cfg": "cfg axis"}

    def run(piece: BatchSlice, whole: Any, options: Any, *, write: bool, over: object) -> None:
        assert (whole, options) == ({"t0": piece.call}, {"call": piece.call})
        found.append((piece, write, over == "cfg axis"))

    rank.run = run  # type: ignore[method-assign]
    rank.run_batch_groups(groups, mesh, {"0.t0": 0, "1.t0": 1}, [{"call": 0}, {"call": 1}])  # type: ignore[dict-item]
    assert found == ran


def test_outputs_are_written_side_by_side_into_their_rows_by_the_first_of_the_ranks_that_have_them() -> None:
    room, outs = torch.zeros(3, 5), [torch.ones(2, 3), torch.full((2, 1, 2), 2.0)]
    forward(index=1).write(BatchSlice(0, 1, 3), room, outs)
    assert not room.any()
    rank, before = forward(), list[list[float]]()
    rank.drain = lambda: before.append(room.flatten().tolist())  # else a rank is silent until the last block is done
    rank.write(BatchSlice(0, 1, 3), room, outs)
    assert before == [[0.0] * 15]
    assert room.tolist() == [[0.0] * 5, *[[1.0, 1.0, 1.0, 2.0, 2.0]] * 2]
    said = r"str made outputs \[\(2, 3\)\], 3 numbers an image where 5 were expected; report the model and the node"
    with pytest.raises(ValueError, match=said):
        forward().write(BatchSlice(0, 1, 3), room, outs[0])


def test_a_module_gets_copies_of_its_rows_and_the_residuals_themselves() -> None:
    given = {"t0": torch.arange(6.0), "t1": torch.arange(3.0), "t2": torch.arange(3.0), "out": torch.zeros(3, 1)}
    options = {"tensors": 3, "batched": (0, 2), "residuals": (2,)}  # two frames an image
    frames, shared, residual = forward()._inputs(BatchSlice(0, 1, 3), given, options)
    assert (frames.tolist(), shared.tolist(), residual.tolist()) == ([2.0, 3.0, 4.0, 5.0], [0.0, 1.0, 2.0], [1.0, 2.0])
    for each in (frames, shared, residual):
        each.zero_()
    assert (given["t0"].tolist(), given["t1"].tolist()) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 1.0, 2.0])
    assert given["t2"].tolist() == [0.0, 0.0, 0.0]


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copies inside write to a device other than the CPU."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) and out.device.type != "cpu":
            self.num_bytes += out.nbytes
        return out


def test_an_input_is_copied_once_on_its_way_to_a_device_and_once_more_where_it_stays_there() -> None:
    given = {"t0": torch.arange(6.0), "t1": torch.arange(3.0), "t2": torch.arange(3.0), "out": torch.zeros(3, 1)}
    options = {"tensors": 3, "batched": (0, 2), "residuals": (2,)}
    rank, step = forward(), Step(model=1, plan=ParallelPlan(), calls=(), batch_groups=(), repeated={"t1": 5})
    rank.held = HeldState(torch.device("meta"))
    new, kept, residual = 4 * 4, 3 * 4, 2 * 4

    def copied() -> int:
        with CopiedBytes() as seen:
            rank._inputs(BatchSlice(0, 1, 3), given, options)
        return seen.num_bytes

    assert copied() == new + kept + residual, "none of them is kept"
    rank.held.begin(step, given)
    assert copied() == new + 2 * kept + residual, "one is kept, and the module gets a copy of it"
    assert copied() == new + kept + residual, "the kept one is there"


def test_what_a_module_keeps_is_told_of_calls_of_a_run_alone() -> None:
    said = list[tuple[object, ...]]()
    rank = forward()
    rank.begin_run("run", ranks=2)
    assert rank.take_kept() is None, "a class that keeps nothing"
    counted = {"calls": 3, "found": 2, "rows": 9, "kept_bytes": 8}
    kept = {"begin": lambda run, ranks: said.append((run, ranks)), "end": lambda: said.append(("end",))}
    rank.model.kept = SimpleNamespace(**kept, take_counted=lambda: SimpleNamespace(**counted))  # type: ignore[assignment]
    rank.begin_run("run", ranks=2)
    assert vars(rank.take_kept()) == counted
    rank.begin_run(None, ranks=2)
    assert (rank.take_kept(), said) == (None, [("run", 2), ("end",)])


def test_a_step_has_the_form_of_those_that_take_as_much_and_some_keep_no_blocks() -> None:
    told, rank = list[tuple[object, bool]](), forward()
    rank.model.whole_blocks = None
    rank.begin_step(SimpleNamespace(), {})  # type: ignore[arg-type]
    rank.end_step()
    assert not told, "weights that are whole"
    begin = lambda form, wanted: told.append((form, wanted))  # noqa: E731
    rank.model.whole_blocks = SimpleNamespace(begin=begin, end=lambda: told.append(("end", False)))  # type: ignore[assignment]

    def form(*, rows: int = 2, plan: str = "ulysses=2", pieces: object = (), **options: object) -> tuple[object, bool]:
        request: Any = SimpleNamespace(op="STEP", plan=ParallelPlan.parse(plan), batch_groups=pieces, calls=(options,))
        rank.begin_step(request, {"0.t0": torch.empty(rows, 3)})
        return told[-1]

    usual = form(attention="sage", call="a tree", step=(1, 9))
    assert usual == form(attention="sage", call="another tree", step=(7, 9)) and usual[1]
    others = (
        form(),
        form(attention="flash3"),
        form(rows=3),
        form(plan="ring=2"),
        form(pieces=((), ())),
        form(whole=True),
    )
    assert len({usual[0], *(each for each, _ in others)}) == 7 and all(wanted for _, wanted in others)
    for lean in (form(lean=True), form(plan="pipefusion=2")):
        assert not lean[1]
    rank.model.kept = "something"  # type: ignore[assignment]
    assert not form()[1], "a class that keeps something looks at what is free"
    rank.end_step()
    assert told[-1] == ("end", False)


def test_the_first_steps_of_a_run_in_a_rank_settle_which_blocks_stay_and_later_ones_do_not_ask() -> None:
    said, calls = list[str](), HostedCalls.__new__(HostedCalls)
    calls._asked, calls._rows = ("request", {}), SimpleNamespace(finish=lambda: said.append("finish"))  # type: ignore[assignment]
    calls._forward = SimpleNamespace(  # type: ignore[assignment]
        begin_step=lambda request, tensors: said.append("begin"), end_step=lambda: said.append("end")
    )
    for step in range(6):
        calls.enter_step(step)
        said.append(str(step))
    calls.finish()
    first, *more = (
        ["begin", "0"],
        *(["end", "begin", str(step)] for step in (1, 2, 3)),
        ["end", "4", "5", "end", "finish"],
    )
    assert said == [each for part in (first, *more) for each in part]


@pytest.mark.parametrize("rounded", [True, False])
def test_what_is_counted_of_a_request_and_an_exchange_is_told_where_it_rounded(rounded: bool) -> None:
    rank, mesh, model = forward(), *[SimpleNamespace(traffic=SimpleNamespace(calls=n, num_bytes=2 * n)) for n in (3, 5)]
    mesh.batch_group, rank.sequence.exchange, rank.sequence.rounded = 1, "fp8", rounded
    rank.cached, rank.by_graphs = "cached", SimpleNamespace(report=lambda: "graphs")  # type: ignore[assignment]
    engine: Any = Engine(rank=1, device=CPU, segments=table())
    assert engine._counts(SimpleNamespace(group=model), mesh, rank) == {
        **{"batch_group": 1, "collectives": 3, "sent_bytes": 6, "weight_collectives": 5, "weight_bytes": 10},
        **{"compiled": "graphs", "cached": "cached", "kept": None, "attention": tuple(sorted(ATTENDED))},
        "exchange": "fp8" if rounded else "",
    }


class FirstStage:
    """Of so many, without a model. `said`: a pass (-), and which part of the latents was posted (p0) or taken (t0)."""

    def __init__(self, *, stages: int, parts: int, conds: int, calls: int) -> None:
        """A run of so many calls, the first of which goes through whole."""
        self.said, self._posted = list[str](), itertools.count()
        self.calls: Any = SteadyCalls.__new__(SteadyCalls)
        self.calls._share = SimpleNamespace(conds=[*range(conds)])
        self.calls._recurrence = SimpleNamespace(num_calls=calls, step_ends=[*range(calls)])
        self.calls._passes = SimpleNamespace(last=False, first=True, stage=0, end=list)
        self.calls._passes.next = SimpleNamespace(drain=list)
        self.calls._passes.previous = SimpleNamespace(post=self._post)
        self.calls._mesh = SimpleNamespace(plan=SimpleNamespace(pipefusion=stages))
        self.calls._passed = lambda cond, call, patch, **how: self.said.append("-") or []
        self.calls._patches, self.calls._warmup_steps, self.calls._ran = max(parts, stages), 1, 0
        self.calls._places = list(torch.arange(2 * parts).split(2))
        self.calls._x, self.calls._gets = torch.zeros(1, 1, 2 * parts), True
        self.calls._landings = [torch.full((1, 1, 2), -1.0) for _ in range(parts)]
        self.calls._expected, self.calls._posted = deque([range(parts)]), deque()  # as `prepare` leaves them

    def _post(self, landing: torch.Tensor) -> SimpleNamespace:
        number = next(self._posted)
        assert landing is self.calls._landings[number % len(self.calls._landings)], "memory asked for in the run"
        self.said.append(f"p{number}")
        return SimpleNamespace(wait=lambda: self.said.append(f"t{number}") or landing.fill_(float(number)))

    def ran(self, *calls: int) -> str:
        """What it did in these calls."""
        self.said.clear()
        for call in calls:
            self.calls.run(call)
        return " ".join(self.said)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("calls", "taken"), [(0, 1), (1, 2), (2, 3), (3, 3)])
def test_a_stage_that_stops_early_takes_the_latent_of_the_call_that_it_does_not_make(
    calls: int, taken: int, parts: int
) -> None:
    stage = FirstStage(stages=2, parts=parts, conds=1, calls=3)
    for call in range(calls):
        stage.calls.run(call)
    stage.calls.close()
    took = [each for each in stage.said if "t" in each]
    assert took == [f"t{number}" for number in range(taken * parts)]
    assert sum("p" in each for each in stage.said) == len(took), "what is posted and not sent would wait for ever"


@pytest.mark.parametrize(
    ("stages", "conds", "first", "second", "third"),
    [
        (2, 1, "-", "t3 - t4 - p6 t5 - p7", "t6 - p8 t7 - t8 -"),
        (3, 1, "-", "t3 - t4 - t5 - p6", "t6 - p7 t7 - p8 t8 -"),
        (2, 2, "- -", "t3 - - t4 - p6 - t5 - p7 -", "t6 - p8 - t7 - - t8 - -"),
    ],
)
def test_the_first_stage_posts_a_part_as_many_passes_after_its_own_as_there_are_stages_behind(
    stages: int, conds: int, first: str, second: str, third: str
) -> None:
    """Where the last stage may have sent it, and waits at a launch. A whole call's latent is posted at once; the third
    call is the last one."""
    stage = FirstStage(stages=stages, parts=3, conds=conds, calls=3)
    assert stage.ran(0) == f"p0 p1 p2 t0 t1 t2 {first}"
    assert stage.ran(1) == f"p3 p4 p5 {second}"
    assert stage.ran(2) == third


def test_a_stage_that_waits_for_its_permit_posts_all_that_will_be_sent() -> None:
    stage = FirstStage(stages=3, parts=3, conds=1, calls=3)
    assert stage.ran(0, 1).endswith("p6")
    stage.said.clear()
    stage.calls.while_waiting()
    assert stage.said == ["p7", "p8"]
    assert stage.ran(2) == "t6 - t7 - t8 -"


def test_a_stage_between_others_posts_nothing_while_it_waits_for_its_permit() -> None:
    """The whole latent comes to it once the stage before may start."""
    stage = FirstStage(stages=3, parts=1, conds=1, calls=3)
    stage.calls._passes.first = False
    stage.calls._pass_on = lambda came: None
    stage.calls.while_waiting()
    assert stage.said == []
    assert stage.ran(0).startswith("p0 t0")


def test_what_a_stage_sends_is_laid_out_before_the_first_of_it_is_sent() -> None:
    passes, laid_out = Passes.__new__(Passes), list[bool]()
    passes._warm = False
    rows = torch.zeros(2, 3)
    rows.contiguous = lambda: laid_out.append(True) or rows  # type: ignore[method-assign]
    passes.next = SimpleNamespace(send=lambda tensor: laid_out.append(False))  # type: ignore[assignment]
    passes.send([rows, rows])
    assert laid_out == [True, True, False, False]


def test_the_parts_of_the_latent_are_found_by_the_first_call_which_every_run_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    stage: Any = SteadyCalls.__new__(SteadyCalls)
    stage._mesh = SimpleNamespace(plan=ParallelPlan(pipefusion=2, patches=3))
    stage._forward = SimpleNamespace(model=SimpleNamespace(staged="blocks"))
    stage._model = SimpleNamespace(outputs=lambda *given, **how: asked.append((*given, *how.values())))
    stage._x = torch.zeros(1, 1, 4)

    def find_owners(outputs: Callable[..., Any], *given: Any, **numbers: int) -> Any:
        outputs("latent", "alone", "new call")
        return (*given, numbers)

    monkeypatch.setattr(steady_pipeline, "find_owners", find_owners)
    staged, latent, numbers = stage._owners_of(5)
    assert asked == [(5, 0, "latent", "alone", "new call")]
    assert (staged, latent.tolist(), numbers) == ("blocks", [[[1.0] * 4]], {"patches": 3, "parts": 1})


@pytest.mark.parametrize(
    ("group", "sharded", "runs", "writes"), [(2, True, 2, True), (3, True, 2, False), (3, False, 3, True)]
)
def test_a_stage_without_work_runs_that_of_a_group_that_gathers_with_it_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, group: int, sharded: bool, runs: int, writes: bool
) -> None:
    """Of two replicas of two batch groups, in the second one. A group without work has nothing to write."""
    work = [GroupWork(start=each, stop=each + 1, conds=(0,) if each < 3 else ()) for each in range(4)]
    told = list[tuple[GroupWork, bool]]()
    latent = lambda request, share, tensors, *, first, **_: told.append((share, first))  # noqa: E731
    monkeypatch.setattr(steady_pipeline, "PartedLatent", latent)
    monkeypatch.setattr(steady_pipeline, "Passes", lambda *_, **__: None)
    request: Any = SimpleNamespace(batch_groups=work, calls=(), recurrence=heun(), timeline=False)
    mesh: Any = SimpleNamespace(replica_groups=range(2, 4), batch_group=group, axes={"cfg": None})
    mesh.plan = ParallelPlan.parse("pipefusion=2,cfg=2,data=2")
    rank = forward(shards="shards" if sharded else None, size=2)
    calls: Any = SteadyCalls(rank, request, {}, mesh=mesh, copies=HostCopies(CPU))
    assert told == [(work[runs], writes)] and calls._share is calls._model._share is work[runs]


class Slept(Calls):
    """Calls of a tenth of a second on the device, the second of two tenths and so on."""

    def __init__(self, run: Callable[[float], None]) -> None:
        self._sleep, self.ended = run, list[str]()

    def prepare(self) -> None:
        self._sleep(0.05)

    def run(self, call: int) -> None:
        self._sleep(0.1 * (call + 1))

    def finish(self) -> None:
        self._sleep(0.02)

    def while_waiting(self) -> None:
        self.ended.append("waited")

    def close(self) -> None:
        self.ended.append("closed")


@pytest.mark.parametrize("on", [True, False])
def test_a_run_reports_the_time_of_each_step_on_the_device_and_tells_of_each_in_order(on: bool) -> None:
    segments, told, waits = table(), list[tuple[int, bool]](), list[bool]()
    segments.credit = 3
    with pretended_cuda() as stream:
        timer, calls = RegionTimer(CUDA, on=on, every=10), Slept(stream.run)
        pace = LaunchThrottle(CPU, lambda: None)
        loop = WorkerLoop(heun(), calls, timer, pace=pace, copies=HostCopies(CPU))
        gate = Gate(segments, cancelled=lambda: False, show_waiting=waits.append)
        stream.synchronize()
        loop.run(gate, step_done=lambda step, spent: told.append((step, spent is not None)))
        work = {"batch_group": 0, "pieces": (), "collectives": 0, "sent_bytes": 0}
        report = loop.report(**work, weight_collectives=0, weight_bytes=0)
    assert report.step_s == pytest.approx((0.3, 0.7, 0.5), abs=1e-3)
    assert (report.prepare_s, report.finish_s) == pytest.approx((0.05, 0.02), abs=1e-3)
    assert report.began_s[1] - report.began_s[0] == pytest.approx(0.3, abs=1e-3)
    assert told == [(0, on), (1, on), (2, on)]
    assert (report.timed_steps, report.regions, report.prepare_regions) == (
        ((1,), {}, {}) if on else (None, None, None)
    )
    assert (report.skipped_calls, report.drained, report.timeline, calls.ended) == (None, None, None, ["closed"])
    assert waits == [True, False] * 3


def test_a_call_after_the_last_step_is_of_no_step_that_was_timed() -> None:
    """As heun's second one of a last step that leaves noise."""
    segments = table()
    segments.credit = 9
    recurrence = SamplerRecurrence(states=heun().states, step_ends=(1, 3))
    pace = LaunchThrottle(CPU, lambda: None)
    loop = WorkerLoop(recurrence, Slept(lambda _: None), RegionTimer(CPU), pace=pace, copies=HostCopies(CPU))
    loop.run(Gate(segments, cancelled=lambda: False, show_waiting=lambda _: None), step_done=lambda step, _: None)
    work = {"batch_group": 0, "pieces": (), "collectives": 0, "sent_bytes": 0}
    report = loop.report(**work, weight_collectives=0, weight_bytes=0)
    assert (len(report.step_s), report.timed_steps) == (2, (0, 1))


def test_a_run_that_is_cancelled_leaves_nothing_in_flight_and_makes_no_result() -> None:
    segments, calls = table(), Slept(lambda _: None)
    segments.credit = 1
    pace, copies = LaunchThrottle(CPU, lambda: None), HostCopies(CPU)
    loop = WorkerLoop(heun(), calls, RegionTimer(CPU, on=False), pace=pace, copies=copies)
    cancelled, done = iter((False, True)).__next__, list[int]()
    gate = Gate(segments, cancelled=cancelled, show_waiting=lambda _: None)
    with pytest.raises(RequestCancelledError, match="before step 1"):
        loop.run(gate, step_done=lambda step, _: done.append(step))
    assert (done, calls.ended) == ([0], ["waited", "closed"])


def test_the_calls_with_which_steps_start_and_the_seconds_of_each_by_region() -> None:
    assert worker_loop.step_starts(heun()) == {0: 0, 2: 1, 4: 2, 5: 3}
    steps = [{"b_s": 0.1234567}, {"a_s": 2.0, "b_s": 1.0}]
    assert worker_loop._by_name(steps) == {"a_s": (0.0, 2.0), "b_s": (0.123457, 1.0)}


def test_time_is_shared_out_as_in_the_last_step_whose_regions_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(live_times, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    times = live_times.RankTimes(CPU)
    now_s[0] = 200.0
    times.begin()
    waits = {"communication": 0.25, "weights": 0.25, "hand_over": 9.0}
    regions = {name: ClockRegion() for name in waits}
    for name, region in regions.items():
        region.total_s = waits[name]

    def after(at_s: float, **step: float) -> TimeSpent:
        times.step({} if "untimed" in step else regions, permit_s=step["permit_s"], waited_s=step["waited_s"])
        now_s[0] = at_s
        return times.spent()

    def spent(compute_s: float, communication_s: float, idle_s: float) -> TimeSpent:
        return TimeSpent(compute_s=compute_s, communication_s=communication_s, idle_s=idle_s)

    assert after(202.25, permit_s=200.25, waited_s=5.0) == spent(1.5, 0.5, 0.25)  # the device was at it for most
    assert after(206.25, permit_s=300.0, waited_s=2.0, untimed=1) == spent(3.0, 1.0, 2.25)
    assert times.spent() == spent(3.0, 1.0, 2.25)
    assert after(206.5, permit_s=206.0, waited_s=1.0) == spent(3.0, 1.25, 2.25), "no more than the step took"
    assert after(206.5, permit_s=206.0, waited_s=0.0) == spent(3.0, 1.25, 2.25)


def test_what_an_engine_cannot_do_is_refused_by_name() -> None:
    engine: Any = Engine(rank=2, device=CPU, segments=table())
    assert [engine.new_timer(on=on).on for on in (True, False)] == [True, False]
    beat: Any = object()
    engine.meshes["plan"] = SimpleNamespace(wrong_bytes=lambda *given: 3 if given == (CPU, beat) else 0)
    asked: Any = CheckCopies(plan="plan")  # type: ignore[arg-type]
    assert engine.handle(asked, (), progress=print, cancelled=bool, beat=beat).wrong_bytes == 3
    with pytest.raises(ValueError, match="rank 2 is on cpu, and graphs of blocks are CUDA's; set tries to off"):
        engine.new_recorder()
    with pytest.raises(ValueError, match="a rank cannot do HELLO; wire/requests.py has what it can be asked"):
        engine._of_ranks(SimpleNamespace(op=Op.HELLO), beat)


def test_a_run_in_the_workers_has_the_memory_of_what_steps_before_it_kept() -> None:
    engine: Any = Engine(rank=2, device=CPU, segments=table())
    engine.held_state.slots[0, FIRST] = torch.ones(3)
    engine.meshes[ParallelPlan()] = SimpleNamespace(member=False)
    assert engine._sample(SimpleNamespace(**NONE_OF_OURS), (), gate=None, progress=None, beat=None).ran is None
    assert engine.held_state.slots == {}


def test_a_step_tells_the_model_its_run_and_reports_what_this_rank_did() -> None:
    engine, plan, said = Engine(rank=2, device=CPU, segments=table()), ParallelPlan(cfg=2), list[object]()
    timer, whole = RegionTimer(CPU, on=False), SimpleNamespace(most_keys=44)
    computed: Any = SimpleNamespace(timer=timer, sequence=whole, begin_run=lambda run, ranks: said.append((run, ranks)))
    computed.begin_step, computed.end_step = lambda *_: said.append("begins"), lambda: said.append("has ended")
    computed.run_batch_groups = lambda *given: said.append(given)
    engine._forward = lambda *_, **__: computed  # type: ignore[method-assign]
    counted = {
        "batch_group": 1,
        **dict.fromkeys(("collectives", "sent_bytes", "weight_collectives", "weight_bytes"), 3),
    }
    engine._counts = lambda *_: counted  # type: ignore[method-assign]
    mesh: Any = SimpleNamespace(member=True, batch_group=1, plan=plan, graphs_left=False)
    engine.models[7] = engine.meshes[plan] = mesh
    groups, options = ((), (FIRST, SECOND)), ({},)
    asked = Step(model=7, plan=plan, calls=options, batch_groups=groups, repeated={}, places=(CallPlace("run", "a"),))
    ran = engine._step(asked, (), progress=lambda _: None, beat=lambda: None).ran
    ran_all = (groups, mesh, {}, options)
    assert said == [(engine.held_state.run, 2), "begins", ran_all, "has ended"] and engine.held_state.run is not None
    assert ran is not None and (ran.pieces, ran.regions, ran.trace_bytes, ran.tokens) == (groups[1], None, None, 44)
    assert computed.drain.__func__ is LaunchThrottle.drain


def test_graphs_of_an_earlier_plan_go_on_all_its_ranks_also_on_those_that_the_next_leaves_out() -> None:
    engine: Any = Engine(rank=2, device=CPU, segments=table())
    dropped: list[str] = []
    model: Any = HostedModel.__new__(HostedModel)
    model.graphs = SimpleNamespace(drop=lambda: dropped.append("drop"), forgot=False)
    model.graphs_under, model.graphs_left = None, False
    engine.models[7] = model
    wide, narrow = ParallelPlan(ulysses=4), ParallelPlan(ulysses=2)
    engine.meshes = dict.fromkeys((wide, narrow), SimpleNamespace(member=False))
    drops = []
    for plan, graphs in ((wide, True), (wide, True), (narrow, False), (wide, True), (narrow, True), (wide, True)):
        asked: Any = SimpleNamespace(model=7, plan=plan, calls=({}, {"graphs": graphs}))
        assert engine._step(asked, (), progress=None, beat=None).ran is None
        drops.append(len(dropped))
    assert drops == [1, 1, 1, 1, 2, 3]
    asked = SimpleNamespace(model=7, plan=narrow, calls=({"graphs": True},))
    assert engine._sample(asked, (), gate=None, progress=None, beat=None).ran is None and len(dropped) == 4
    engine._step(SimpleNamespace(model=8, plan=wide, calls=({"graphs": True},)), (), progress=None, beat=None)
    assert len(dropped) == 4
    for left, model_of, graphs, drops in (
        (True, 7, True, 0), (True, 7, False, 1), (True, 8, True, 1), (False, 7, False, 1),
    ):  # fmt: skip
        before = len(dropped)
        engine._trim(Trim(ranks=(), graphs=left))
        for _ in range(2):  # once: the next request of the run finds it done
            asked = SimpleNamespace(model=model_of, plan=narrow, calls=({"graphs": graphs},))
            engine._step(asked, (), progress=None, beat=None)
        assert len(dropped) - before == drops, (left, model_of, graphs)
    model.graphs.forgot = True
    engine._step(SimpleNamespace(model=7, plan=narrow, calls=({"graphs": True},)), (), progress=None, beat=None)
    assert len(dropped) == 8, "what graphs that went needed goes with all that there are"


def test_ranks_of_cards_with_other_choices_time_the_same_steps_of_a_run_by_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step whose parts are timed runs without graphs, and ranks exchange otherwise in one that they record in."""
    usual, by_card = choice_for(None).timed_every, (1, 5)
    monkeypatch.setattr(
        "parallel_runtime.worker.engine.card_choice",
        lambda device: replace(choice_for(None), timed_every=by_card[device.index]),
    )
    traffic = SimpleNamespace(reset=lambda timer: None)
    mesh: Any = SimpleNamespace(traffic=traffic, attention=SequenceParallelAttention(), plan=ParallelPlan())
    weights = SimpleNamespace(viewed_file=None, spec=SimpleNamespace(flags=None))
    model: Any = SimpleNamespace(weights=weights, group=SimpleNamespace(traffic=traffic), by_graphs=lambda *_: None)

    def timed(card: int, **options: bool) -> list[int]:
        engine: Any = Engine(rank=card, device=torch.device("cuda", card), segments=table())
        engine.models.switch_to = lambda _: None
        asked = SimpleNamespace(calls=({"timed": True, **options},))
        timer = engine._forward(model, mesh, asked, progress=None, alive=None, beat=None).timer
        return [step for step in range(30) if timer.enter_step(step, of=30)]

    assert len(timed(0)) == 30 and len(timed(1)) == 6 and not timed(1, timed=False)
    assert timed(0, graphs=True) == timed(1, graphs=True) == list(range(1, 30, usual))


def test_a_model_has_torchs_switches_as_its_file_was_loaded_with_whatever_ran_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: Any = Engine(rank=0, device=CPU, segments=table())
    was = list[dict]()
    monkeypatch.setattr("parallel_runtime.worker.loading.set_flags", was.append)
    traffic = SimpleNamespace(reset=lambda timer: None)
    mesh = SimpleNamespace(traffic=traffic, attention=SequenceParallelAttention(), plan=ParallelPlan())
    models = [
        SimpleNamespace(
            weights=SimpleNamespace(viewed_file=None, spec=SimpleNamespace(flags={"a": each})),
            group=SimpleNamespace(traffic=traffic),
        )
        for each in (1, 2)
    ]
    for number in (0, 0, 1, 1, 0):
        engine._forward(models[number], mesh, SimpleNamespace(calls=({},)), progress=None, alive=None, beat=None)
    assert was == [{"a": 1}, {"a": 2}, {"a": 1}]


def test_what_was_sent_is_counted_anew_for_each_request_of_weights_too() -> None:
    engine: Any = Engine(rank=0, device=CPU, segments=table())
    reset = list[tuple[str, bool]]()

    def traffic(name: str) -> Any:
        return SimpleNamespace(reset=lambda timer: reset.append((name, timer.asked)))

    weights, group = (
        SimpleNamespace(viewed_file=None, spec=SimpleNamespace(flags={})),
        SimpleNamespace(traffic=traffic("weights")),
    )
    mesh = SimpleNamespace(traffic=traffic("tokens"), attention=SequenceParallelAttention(), plan=ParallelPlan())
    for timed in (False, True):
        request, model = SimpleNamespace(calls=({"timed": timed},)), SimpleNamespace(weights=weights, group=group)
        ATTENDED.add("an earlier kernel")
        made = engine._forward(model, mesh, request, progress=None, alive=None, beat=None)
        assert (made.model, made.sequence, made.by_graphs) == (model, mesh.attention, None) and not ATTENDED
    assert reset == [("tokens", False), ("weights", False), ("tokens", True), ("weights", True)]
    weights.branches, model.blocks = SimpleNamespace(form=None), SimpleNamespace(reason="", entrances=())
    request, told = SimpleNamespace(calls=({"compiled": True},)), list[str]()
    after_blocks, alive = (lambda: told.append("a block is done")), (lambda: told.append("alive"))
    made = engine._forward(model, mesh, request, progress=None, alive=alive, beat=after_blocks)
    made.by_graphs._watch.beat()  # as from the thread of a compilation, which may touch no tensor of the run
    assert told == ["alive"]


def test_ranks_that_gather_weights_with_a_group_of_another_size_run_its_rows_and_keep_none() -> None:
    ran, given = HostedCalls.__new__(HostedCalls), list[Any]()
    ran._shown = GroupWork(start=1, stop=3, conds=(0,), shares_cfg=False)
    ran._share = GroupWork(start=0, stop=0, conds=(), shares_cfg=False)
    ran._residuals, ran._over = {}, None
    ran._rows = SimpleNamespace(finish_call=lambda *outs: given.append(outs))  # type: ignore[assignment]
    ran._model = SimpleNamespace(  # type: ignore[assignment]
        outputs=lambda cond, call, x, **_: given.append((cond, call, x.tolist())) or [x]
    )
    ran._compute(4, torch.ones(1, 3, 2))
    assert given == [(0, 4, [[[0.0] * 2] * 3] * 2), (4, [])]


def test_a_call_has_a_sigma_for_each_image_of_each_side_of_cfg() -> None:
    """Two images, as rows of four numbers; the model answers a side with its number."""
    heard = list[tuple[list[int], list[float], list[float]]]()

    def apply(latent: torch.Tensor, sigma: torch.Tensor, given: Any, **_: object) -> torch.Tensor:
        heard.append((list(latent.shape), sigma.tolist(), given["transformer_options"]["sigmas"].tolist()))
        return torch.arange(len(latent) // 2.0).repeat_interleave(2)[:, None, None].expand_as(latent)

    states = [RecurrenceStep(sigma=sigma) for sigma in (0.5, None)]
    call: Any = {"d": {"kwargs": {"d": {"transformer_options": {"d": {}}}}}}
    options = [{"call": call, "latent": (2, 2), "sides": sides} for sides in ((0,), (1, 0))]
    made: Any = (SimpleNamespace(apply=apply), SimpleNamespace(states=states), None, {}, options)
    model = AppliedModel(*made)
    model._inputs = {0: [], 1: []}
    answers = [[out[:, 0].tolist() for out in model.outputs(cond, cond, torch.ones(2, 1, 4))] for cond in (0, 1)]
    assert heard == [([2, 2, 2], [0.5] * 2, [0.5] * 2), ([4, 2, 2], [0.0] * 4, [0.0] * 2)]
    assert answers == [[[[0.0] * 4] * 2], [[[1.0] * 4] * 2, [[0.0] * 4] * 2]]


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([[list(numbers)]])


@pytest.mark.parametrize(
    ("first", "cfg_index", "shares_cfg", "conds", "writes"),
    [
        (True, 0, False, (0, 1), True),
        (False, 0, False, (0, 1), False),
        (True, 1, True, (0, 1), False),
        (True, 1, False, (0, 1), True),
        (True, 0, False, (0,), True),
        (True, 0, False, (), False),
    ],
)
def test_a_latents_rows_go_through_mask_model_cfg_and_mask_and_to_their_images(
    first: bool, cfg_index: int, shares_cfg: bool, conds: tuple[int, ...], writes: bool
) -> None:
    """Image 1 of two. The model sees 2 X and says half of X minus its output; the mask keeps the first number of X."""
    reading = CallReading(scale=2.0, skip=0.5, weight=-1.0, kept_noise=0.25, kept_latent=0.75)
    states = (
        RecurrenceStep(given=True, sigma=1.0, timestep=1.0, prediction=reading),
        RecurrenceStep(inputs=((0, 0.5),), denoised=((0, 0.5),)),
    )
    given = {"given.0": row(1, 2), "inpaint.mask": row(1, 0), "inpaint.noise": row(4, 4), "inpaint.latent": row(8, 8)}
    tensors = {name: torch.cat([torch.full_like(value, 99.0), value]) for name, value in given.items()}
    tensors |= {name: torch.zeros(2, 1, 2) for name in ("out", "preview.0", "preview.1")}
    copies, reserved = HostCopies(CPU), list[object]()
    copies.reserve = reserved.append  # type: ignore[method-assign]
    rows = LatentRows(
        SamplerRecurrence(states=states, step_ends=(0,)),
        GroupWork(start=1, stop=2, conds=conds, shares_cfg=shares_cfg),
        tensors,
        timer=RegionTimer(CPU, on=False),
        copies=copies,
        cfg=3.0,
        cfg_axis=Axis("cfg", 2, cfg_index),
        first=first,
    )
    rows.take_in()
    assert reserved == [(1, 1, 2)] * writes, "memory for previews, before the first call"
    assert rows.enter(0).tolist() == rows.entered.tolist() == [[[2.0, 14.0]]]
    if shares_cfg:  # whose exchange needs the other
        assert rows._writes == writes
        return
    rows.finish_call(0, [row(1, 1), row(3, 5)][: len(conds)])
    denoised, last = [(1.0, None), (-0.5, 0.25), (3.5, 2.25)][len(conds)]
    assert rows.denoised.tolist() == [[[denoised, 8.0 if conds else 7.0]]]
    rows.preview(0)
    rows.finish()
    shown = [tensors[name].tolist() for name in ("preview.0", "preview.1", "out")]
    nothing = [[[0.0, 0.0]]] * 2
    assert shown == (
        [[nothing[0], [[denoised, 8.0]]], nothing, [nothing[0], [[last, 5.0]]]] if writes else [nothing] * 3
    )
    with pytest.raises(RuntimeError, match="a run without a cache skips no call"):
        rows.skip(0)


def test_both_sides_of_cfg_are_exchanged_and_ranks_beyond_them_take_part_with_nothing() -> None:
    """Three batch groups; images 2, rows 3, channels 2."""
    sent, lengths = list[object](), (6, 6, 0)

    def exchange(rows: torch.Tensor, **told: tuple[int, ...]) -> torch.Tensor:
        sent.append((rows.tolist(), told))
        return torch.cat([rows[:6], rows[6:] + 100.0])

    rows: Any = LatentRows.__new__(LatentRows)
    rows._x, rows._cfg_axis = torch.zeros(2, 3, 2), SimpleNamespace(size=3, all_to_all=exchange)
    mine = torch.arange(12.0).reshape(2, 3, 2)
    both = rows._exchanged([mine])
    assert [each.tolist() for each in both] == [mine.tolist(), (mine + 100.0).tolist()]
    assert rows._exchanged([]) == []
    assert sent == [
        (mine.reshape(6, 2).tolist() * 2, {"send_lengths": lengths, "receive_lengths": lengths}),
        ([], {"send_lengths": (0, 0, 0), "receive_lengths": (0, 0, 0)}),
    ]


@pytest.mark.parametrize("easy", [True, False])
def test_a_cache_of_outputs_or_of_the_latent_notes_what_it_compares_and_stands_for_a_call(easy: bool) -> None:
    noted, ended = list[object](), list[object]()
    rows: Any = LatentRows.__new__(LatentRows)
    rows._x, rows._seen, rows.cached = "latent", "scaled", None
    rows._guided = lambda call, outputs, overwritten=False: ("guided", outputs, overwritten)
    rows._end = lambda *given: ended.append(given)
    assert rows.seen == "latent"
    rows.finish_call(3, ["out"])
    compared = "scaled" if easy else "latent"
    cache = StockCache(easy=easy, threshold=0.1, calls="", overwrites=True)
    rows.cached = SimpleNamespace(
        cache=cache, note=lambda *given: noted.append(given), again=lambda seen: [f"again {seen}"]
    )
    rows.finish_call(4, ["out"])
    rows.skip(5)
    assert noted == [(4, compared, ["out"] if easy else [("guided", ["out"], False)])]
    assert ended[:2] == [(3, ("guided", ["out"], False)), (4, ("guided", ["out"], False))]
    assert ended[2:] == [(5, ("guided", ["again scaled"], True) if easy else "again latent")]


@pytest.mark.parametrize(
    ("first", "conds", "shares_cfg", "index", "counts"),
    [
        (True, (0,), False, 0, (True, True)),
        (True, (0,), False, 1, (True, True)),
        (True, (0,), True, 0, (True, True)),
        (True, (0,), True, 1, (True, False)),
        (True, (), False, 0, (True, False)),
        (False, (0,), False, 0, (False, False)),
    ],
)
def test_of_ranks_that_have_the_same_rows_one_counts_what_a_cache_compares(
    first: bool, conds: tuple[int, ...], shares_cfg: bool, index: int, counts: tuple[bool, bool]
) -> None:
    """Of EasyCache, which has rows of its own for each side, and of LazyCache."""
    rows: Any = LatentRows.__new__(LatentRows)
    rows._take, rows._timer, rows._first = (lambda tensor: tensor), RegionTimer(CPU, on=False), first
    rows._tensors = {LOOKED_AT: torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])}
    rows._share, rows._cfg_axis = SimpleNamespace(conds=conds, shares_cfg=shares_cfg), SimpleNamespace(index=index)
    easy, lazy = (rows._cached(StockCache(easy=kind, threshold=0.1, calls=""), (1, 2)) for kind in (True, False))
    assert (easy._norm_counts, lazy._norm_counts) == counts and (easy._sides, lazy._sides) == ((1, 2), (0,))
    assert easy._index.tolist() == lazy._index.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("plan", "changed", "why"),
    [
        ("cfg=2", {}, ""),
        ("cfg=2", {"quantised": True}, "graphs hold exchanges of one group, and cfg2-ring1-uly1 has several"),
        ("ulysses=2", {"quantised": True}, ""),
        ("ring=2", {}, "graphs hold exchanges of one group, and ring2 has several"),
        ("ulysses=2", {"shards": "shards"}, "the weights are sharded or offloaded"),
        ("ulysses=2", {"changed": True}, "the weights are changed, as by LoRAs"),
        ("ulysses=2", {"step_cache": 0.1}, "a step cache skips blocks"),
    ],
)
def test_a_model_runs_by_graphs_unless_something_of_the_request_is_not_in_them(
    plan: str, changed: dict[str, Any], why: str
) -> None:
    model: Any = HostedModel.__new__(HostedModel)
    model.graphs, model.kept = SimpleNamespace(blocks=SimpleNamespace(reason="", entrances=[])), changed.get("kept")
    model.weights = SimpleNamespace(quantised=changed.get("quantised", False), shards=changed.get("shards"))
    model.changes = SimpleNamespace(changed=changed.get("changed", False), version=3)
    run = model.by_graphs(ParallelPlan.parse(plan), changed, "watch", None)
    assert (run._graphs, run._version, run._watch) == (model.graphs, 3, "watch")
    assert run._why_not == (why and f"no graphs of blocks: {why}")


def test_shards_are_gathered_in_calls_whose_blocks_run() -> None:
    said = list[str]()
    model: Any = HostedModel.__new__(HostedModel)
    shards = SimpleNamespace(idle=False, begin=lambda: said.append("begin"), end=lambda: said.append("end"))
    for each in (shards, None):
        model.weights = SimpleNamespace(shards=each)
        with model.without_blocks(), model.calling():
            said.append("idle")
        with model.calling():
            said.append("call")
    assert said == ["idle", "begin", "call", "end", "idle", "call"]
    model.end_run()  # which has kept nothing
    model.graphs = None
    model.drop_graphs()
    model.graphs, model.kept = SimpleNamespace(drop=lambda: said.append("drop")), shards
    model.drop_graphs()
    model.end_run()
    assert said[6:] == ["drop", "end"]
    mesh: Any = SimpleNamespace(batch_group=1, plan=SimpleNamespace(parts=1))
    sharing = forward(shards="shards", size=2)
    assert (sharing.groups_to_run(mesh, [2, 3]), sharing.groups_to_run(mesh, [1, 2])) == ([2], [1])
    assert sharing.groups_to_run(mesh, [2, 3], alike=False) == [2, 3]
    mesh.plan.parts = 2
    assert sharing.groups_to_run(mesh, [2, 3]) == []


def test_what_a_module_keeps_is_looked_at_once_before_any_hook_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = HostedModel.__new__(HostedModel)
    model.weights, asked = SimpleNamespace(module="module"), list[object]()
    monkeypatch.setattr("parallel_runtime.worker.hosted.kept_state", lambda module: asked.append(module) or "kept")
    assert (model.kept, model.kept, asked) == ("kept", "kept", ["module"])


def test_attention_is_by_the_kernel_and_the_exchange_that_a_call_names() -> None:
    hosted: Any = HostedForward.__new__(HostedForward)
    hosted.sequence = SequenceParallelAttention()
    for options, found in (({"attention": "flash", "exchange": FP8}, ("flash", FP8)), ({}, ("", EXACT))):
        assert hosted.sequence_of(options) is hosted.sequence
        assert (hosted.sequence.named, hosted.sequence.exchange) == found
    assert hosted.sequence_of({"whole": True}) is not hosted.sequence


def test_a_latent_in_parts_is_that_of_this_batch_groups_images() -> None:
    request = SimpleNamespace(recurrence=SimpleNamespace(step_ends=(0,)))
    share = GroupWork(start=1, stop=2, conds=(0,), shares_cfg=False)
    given = {"timer": RegionTimer(CPU, on=False), "copies": HostCopies(CPU), "cfg_axis": Axis("cfg"), "first": True}
    latent = PartedLatent(request, share, {"out": torch.zeros(3, 1, 2)}, **given)  # type: ignore[arg-type]
    assert latent.shape == (1, 1, 2)


def test_a_state_that_tells_no_timestep_goes_into_no_call() -> None:
    with pytest.raises(ValueError, match="a state without timestep goes into no call"):
        CallSampling().timestep(torch.ones(2))


def test_what_lies_outside_of_the_blocks_is_computed_in_one_pass_and_written_by_the_last_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[object]()
    monkeypatch.setattr(HostedForward, "run", lambda _, *given, **named: asked.append((given, named)))
    pipeline: Any = HostedPipeline.__new__(HostedPipeline)
    for last, write in ((True, True), (False, True), (True, False)):
        pipeline._passes = SimpleNamespace(last=last)
        pipeline.run("a piece", {}, {"method": "a method"}, write=write, over="the batch")
        given = ("a piece", {}, {"method": "a method"})
        assert asked.pop() == (given, {"write": last and write, "over": "the batch"}) and not asked
