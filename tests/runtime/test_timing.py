"""Regions: what they measure, that they wait for nothing, and what they cost, counted and weighed against a step."""

import time
import timeit
from collections.abc import Iterator

import pytest
import torch

from parallel_runtime.adapters.flux_config import FluxConfig
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.sample_model import sample_config, write_sample
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.timing import RegionTimer

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


@pytest.mark.parametrize("device", DEVICES)
def test_a_region_has_the_seconds_of_what_ran_inside_it_and_no_more(device: str) -> None:
    timer = RegionTimer(torch.device(device))
    work = torch.randn(512, 512, device=device)
    torch.mm(work, work)  # what the first call prepares is not what is measured
    began = time.perf_counter()
    with timer.region("whole"):
        for _ in range(3):
            with timer.region("part"):
                torch.mm(work, work)
            torch.mm(work, work)
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - began
    seconds = timer.seconds()
    assert set(seconds) == {"whole_s", "part_s"}
    assert 0 < seconds["part_s"] < seconds["whole_s"] <= elapsed_s
    assert timer.regions["part"].entries == 3


def test_a_timer_that_is_off_measures_nothing() -> None:
    timer = RegionTimer(torch.device("cpu"), on=False)
    with timer.region("whole"), timer.region("part"), timer.region("whole"):
        pass
    assert (timer.seconds(), timer.regions) == ({}, {})


def test_an_error_inside_passes_through_a_region() -> None:
    for on in (True, False):
        with pytest.raises(KeyError), RegionTimer(torch.device("cpu"), on=on).region("whole"):
            raise KeyError("inside")


@pytest.fixture(scope="module")
def launching(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model of as many blocks as Flux has, each with next to nothing to compute: regions cost most, relatively."""
    path = tmp_path_factory.mktemp("launching") / "launching.safetensors"
    write_sample(path, sample_config(heads=4, depth=19, depth_single=38))
    return ModelSpec.of(path)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        yield pool


def seconds_of_a_region(*, on: bool) -> float:
    """The least of many, since whatever else the machine does only adds."""
    timer = RegionTimer(torch.device("cpu"), on=on)

    def enter() -> None:
        with timer.region("double_blocks"):
            pass

    return min(timeit.repeat(enter, number=1000, repeat=50)) / 1000


@pytest.mark.parametrize(("on", "limit"), [(False, 0.005), (True, 0.03)])
def test_measuring_costs_a_small_part_of_a_step(two_ranks: Pool, launching: ModelSpec, on: bool, limit: float) -> None:
    config = FluxConfig.from_header(read_header(launching.path))
    tensors = Workload(width=128, height=128, text_tokens=16).tensors(config)
    runner = PlanRunner(two_ranks, launching, ParallelPlan(ulysses=2), options={"timed": on})
    step_s = []
    for _ in range(5):
        runner(tensors)
        step_s.append(min(rank["step_s"] for rank in runner.ranks))
    blocks = config.depth + config.depth_single
    # a region a block, one for modulation, two for attention; each collective is started and waited for
    entries = 4 + blocks * 4 + 2 * runner.ranks[0]["calls"]
    assert entries > 4 * blocks, "the exchange of this plan is not counted"
    assert entries * seconds_of_a_region(on=on) < limit * min(step_s)


def test_regions_come_back_only_when_they_are_timed(two_ranks: Pool, launching: ModelSpec) -> None:
    tensors = Workload(width=128, height=128, text_tokens=16).tensors(
        FluxConfig.from_header(read_header(launching.path))
    )
    runner = PlanRunner(two_ranks, launching, ParallelPlan(ring=2), options={"timed": False})
    runner(tensors)
    assert all("regions" not in rank for rank in runner.ranks)
    runner.options = {"timed": True}
    outermost = ("hand_over_s", "embed_s", "double_blocks_s", "single_blocks_s", "head_s", "gather_s")
    parts = []  # of the step, in the regions
    for _ in range(5):
        runner(tensors)
        for rank in runner.ranks:
            found = rank["regions"]
            assert set(found) == {*outermost, "modulation_s", "attention_s", "communication_s"}
            parts.append(sum(found[name] for name in outermost) / rank["step_s"])
            assert found["communication_s"] < found["attention_s"] < found["double_blocks_s"] + found["single_blocks_s"]
    # What else the machine does may fall between two regions, but not in every step.
    assert max(parts) > 0.8, f"the regions leave out more than bookkeeping: {parts}"
    assert max(parts) < 1, f"a region is counted twice: {parts}"
