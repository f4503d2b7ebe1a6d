"""Regions and the ends of steps: what they measure, and where each rank looks at the clock.

What timing costs is not tested: `make targets TARGETS_FLAGS=timing` times steps with and without it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from noted import FOLDER, Notes

from host.hosted_runs import make_run, with_options
from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.exchange_groups import WEIGHTS, ExchangeGroup
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.timing import RegionTimer
from parallel_runtime.worker import loading, measure, probe, timeline, trace
from parallel_runtime.worker.mesh import Groups
from parallel_runtime.worker.worker_loop import StepPermit, step_begins
from runtime.pretend_device import RATE, Stream, pretended_cuda

CUDA = torch.device("cuda")
DEVICES = ["cpu", "pretended cuda"] + ["cuda"] * torch.cuda.is_available()


@dataclass(frozen=True)
class Place:
    """Where a test's work runs: `work()` does some, or queues it; `finish()` returns when all is done."""

    device: torch.device
    work: Callable[[], object]
    finish: Callable[[], object]


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The CPU, the device that stands in for a GPU, and a GPU where there is one."""
    if request.param == "pretended cuda":
        with pretended_cuda() as stream:
            yield Place(torch.device("cuda"), lambda: stream.run(0.004), stream.synchronize)
        return
    device = torch.device(request.param)
    matrix = torch.randn(1024, 1024, device=device)
    torch.mm(matrix, matrix)  # what the first call prepares is not what is measured
    finish = torch.cuda.synchronize if device.type == "cuda" else int
    finish()
    yield Place(device, lambda: torch.mm(matrix, matrix), finish)


def test_a_region_has_the_seconds_of_what_ran_inside_it_and_no_more(place: Place) -> None:
    timer = RegionTimer(place.device)
    began = time.perf_counter()
    with timer.region("whole"):
        for _ in range(3):
            with timer.region("part"):
                place.work()
            place.work()
    place.finish()
    elapsed_s = time.perf_counter() - began
    seconds = timer.seconds()
    assert set(seconds) == {"whole_s", "part_s"}
    assert 0 < seconds["part_s"] < seconds["whole_s"] <= RATE * elapsed_s


def test_a_region_of_a_device_is_what_its_work_took_and_not_the_hosts_time_to_queue_it() -> None:
    with pretended_cuda() as stream:
        timer = RegionTimer(torch.device("cuda"))
        stream.run(0.02)  # what was queued before: the host is ahead of the device
        for seconds in (0.003, 0.005):
            with timer.region("part"):
                stream.run(seconds)
        assert stream.waits == 0, "measuring waited for the device"
        assert timer.seconds() == {"part_s": pytest.approx(0.008 * RATE, rel=1e-5)}


def test_laps_have_the_seconds_of_their_own_work() -> None:
    with pretended_cuda() as stream:
        timer = RegionTimer(torch.device("cuda"))
        for seconds in (0.002, 0.006):
            with timer.region("blocks"):
                stream.run(seconds)
            timer.lap()
        assert [lap["blocks_s"] for lap in timer.laps()] == pytest.approx([0.002 * RATE, 0.006 * RATE], rel=1e-3)


def test_a_timer_that_is_off_measures_nothing() -> None:
    timer = RegionTimer(torch.device("cpu"), on=False)
    with timer.region("whole"), timer.region("part"), timer.region("whole"):
        pass
    assert (timer.seconds(), timer.regions) == ({}, {})


@pytest.mark.parametrize("on", [True, False])
def test_a_mark_is_the_moment_at_which_the_device_is_done(place: Place, on: bool) -> None:
    timer = RegionTimer(place.device, on=on)
    asked = [time.perf_counter()]
    timer.mark()
    for _ in range(3):
        for _ in range(4):
            place.work()
        timer.mark()
        place.finish()
        asked.append(time.perf_counter())
    found = timer.moments()
    assert found == sorted(found)
    assert len(found) == 4
    assert all(moment <= known + 1e-3 for moment, known in zip(found[1:], asked[1:], strict=True)), "after it was done"
    assert all(moment >= began for moment, began in zip(found[1:], asked, strict=False)), "before its work began"


def test_marks_on_a_device_are_on_the_hosts_clock_however_its_own_runs() -> None:
    """The device's clock gains a hundredth; over this run, three milliseconds."""
    with pretended_cuda() as stream:
        timer = RegionTimer(torch.device("cuda"))
        stream.run(0.02)
        timer.mark()
        done = [stream.done_s]
        assert stream.waits == 1, "the first mark looks at both clocks at once"
        for seconds in (0.1, 0.15, 0.05):
            stream.run(seconds)
            timer.mark()
            done.append(stream.done_s)
        assert stream.waits == 1, "another mark waited"
        assert timer.moments() == pytest.approx(done, rel=0, abs=2e-5)


@pytest.mark.parametrize(
    ("permit", "began_s", "why"),
    [
        (StepPermit(at_s=10.5, waited_s=0.5), 10.5, "the device was done when the host began to wait"),
        (StepPermit(at_s=10.0, waited_s=0.9), 10.0, "the permit came while the device was at the step before"),
        (StepPermit(at_s=9.0, waited_s=0.9), 10.0, "the permit was there long before"),
        (StepPermit(at_s=10.25, waited_s=0.9), 10.25, "the device waited for a part of what the host did"),
        (StepPermit(at_s=10.75, waited_s=0.25), 10.25, "the host was late without waiting: that is the step's own"),
    ],
)
def test_a_step_begins_where_its_device_could_go_on(permit: StepPermit, began_s: float, why: str) -> None:
    first = StepPermit(at_s=8.0, waited_s=0.0)
    assert step_begins(8.0, [10.0, 12.0], [first, permit]) == [8.0, began_s], why


class Matrix:
    """An operand on the device: the first product of it takes two seconds, the median of the next five half a one."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._next_s = stream, iter((2.0, 0.1, 0.9, 0.5, 0.1, 0.9))

    def __matmul__(self, other: "Matrix") -> None:
        self._stream.run(next(self._next_s))


def of_a_product(stream: Stream, patched: pytest.MonkeyPatch) -> float:
    patched.setattr(measure, "operand", lambda *shape, device: Matrix(stream))
    return 2 * measure.ROWS["cuda"] ** 3 / 1e9 / measure._gflops(CUDA)


def of_a_probe(stream: Stream, patched: pytest.MonkeyPatch) -> float:
    return probe._seconds(lambda: stream.run(0.5), CUDA)


def of_a_load(stream: Stream, patched: pytest.MonkeyPatch) -> float:
    weights = SimpleNamespace(load=lambda **told: stream.run(0.5), parameter_bytes=1, dtype=torch.float32)
    weights.needed_bytes, weights.spec = 0, SimpleNamespace(flags={})
    patched.setattr(loading, "open_model", lambda *given, **told: SimpleNamespace(weights=weights))
    patched.setattr(loading, "keep_from_collections", int)
    request = SimpleNamespace(first_rank=0, layout=ParallelPlan().layout, spec=weights.spec, model=1)
    request.eviction_order, request.budget_bytes = (), None
    models = loading.LoadedModels(rank=0, device=CUDA, memory=lambda: None)
    return models.load(request, group=None, progress=None, cancelled=None, beat=None).load_s


def of_a_chunk(stream: Stream, patched: pytest.MonkeyPatch) -> float:
    patched.setattr(timeline, "time", SimpleNamespace(monotonic=stream.look))
    of_stage = timeline.Timeline(CUDA, on=True)
    began_s = of_stage.now()
    stream.run(0.5)
    return of_stage.now() - began_s


def of_a_trace(stream: Stream, patched: pytest.MonkeyPatch) -> float:
    patched.setattr(trace, "profile", lambda activities: nullcontext(SimpleNamespace(events=list)))
    began_s = time.perf_counter()
    trace.Trace(0, CUDA).of(lambda: stream.run(0.5))
    return time.perf_counter() - began_s


def until_groups_are_freed(stream: Stream, patched: pytest.MonkeyPatch) -> float:
    freed_s, groups, key = [], Groups(), ExchangeGroup(purpose=WEIGHTS, ranks=(0,))
    groups._made[key] = None
    patched.setattr(dist, "get_rank", lambda: 0)
    patched.setattr(dist, "destroy_process_group", lambda group: freed_s.append(time.perf_counter()))
    began_s = time.perf_counter()
    stream.run(0.5)
    groups.free([key], CUDA)
    return freed_s[0] - began_s


@pytest.mark.parametrize(
    "seconds", [of_a_product, of_a_probe, of_a_load, of_a_chunk, of_a_trace, until_groups_are_freed]
)
def test_what_is_timed_or_begun_anew_waits_for_what_a_device_was_asked(
    seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended_cuda() as stream:
        assert seconds(stream, monkeypatch) == pytest.approx(0.5, abs=1e-4)


@pytest.fixture(scope="module")
def noting_ranks() -> Iterator[Pool]:
    """Four ranks that note what their timers are asked."""
    here = str(Path(__file__).parent)
    devices = parse_devices("cpu:4").devices
    with Pool(devices, threads_per_rank=1, engine="marking_engine:MarkingEngine", python_path=(here, FOLDER)) as pool:
        yield pool


# How often each rank writes: three previews and the result, of ranks that have the same latent the first.
WRITES = {"ulysses=2": [4, 0], "cfg=2": [4, 0], "cfg=3": [4, 0, 0]}
TAKEN_IN = 3 + 1  # before the first step: mask, noise and latent of a noise mask, and once the conditionings


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on"), [("ulysses=2", True), ("cfg=2", True), ("cfg=3", False)])
def test_every_rank_of_a_run_looks_at_the_clock_after_preparing_and_where_each_step_ends(
    noting_ranks: Pool, tiny_hosted: ModelSpec, name: str, on: bool
) -> None:
    plan, run = ParallelPlan.parse(name), make_run(texts=(7, 7), mask=True)
    with Notes() as found:
        told = with_options(run, timed=on, **found.option)
        ranks = [reply.ran for reply in noting_ranks.sample(tiny_hosted, plan, told).ranks[: plan.ranks]]
        noted = found.read()
    for rank, notes, written in zip(ranks, noted, WRITES[name], strict=True):
        begun, prepared, *steps, finished, read = (part.split() for part in " ".join(notes).split("mark"))
        assert begun == [], "nothing is done before the first look"
        assert prepared.count("hand_over") == TAKEN_IN
        assert all(part[0] == "lap" and "lap" not in part[1:] for part in [*steps, finished])
        assert len(steps) == len(rank.step_s) == 3
        assert read == ["read"], "marks are read when all is done"
        assert notes.count("read") == 1, "and are not waited for before"
        assert min(*rank.step_s, rank.prepare_s, rank.finish_s) > 0
        assert notes.count("gather") == written


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on"), [("ulysses=2", True), ("cfg=3", False), ("cfg=2,pipefusion=2", True)])
def test_every_rank_of_a_request_looks_at_the_clock_after_all_its_work(
    noting_ranks: Pool, tiny_hosted: ModelSpec, name: str, on: bool
) -> None:
    with Notes() as found:
        calls = [call(text=text, options={"timed": on, **found.option}) for text in (7, 12)]
        result = noting_ranks.run(tiny_hosted, ParallelPlan.parse(name), calls)
        noted = found.read()
    for rank, notes in zip(result.ran, noted, strict=True):
        assert notes[-2:] == ["mark", "read"]
        assert notes.count("mark") == 1
        assert rank.step_s > 0


@pytest.mark.slow
def test_regions_come_back_only_when_they_are_timed(noting_ranks: Pool, tiny_hosted: ModelSpec) -> None:
    plan = ParallelPlan(ring=2)
    assert all(rank.regions is None for rank in noting_ranks.run(tiny_hosted, plan, [call()]).ran)
    for rank in noting_ranks.run(tiny_hosted, plan, [call(options={"timed": True})]).ran:
        assert set(rank.regions) >= {"hand_over_s", "communication_s"}
        assert 0 < rank.regions["hand_over_s"] + rank.regions["communication_s"] < rank.step_s
