"""How long the stages of a full pipeline wait, counted: the loop of each stage as it is, with links that take no time.

A stage is a thread with a clock of its own, which goes on by the operations of each patch, as benchmarks/pipefusion.py
counts them, and to the moment when what the stage waits for was sent.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.pipefusion import CASES
from benchmarks.pipeline_schedule import Cost, Span, bubble, counted_cost, orders_of, schedule, steady
from parallel_runtime.models.hosted.pass_call import PassEndsError
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import WorkerLoopRun
from parallel_runtime.timing import RegionTimer
from parallel_runtime.worker import timeline
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.host_copies import HostCopies
from parallel_runtime.worker.hosted import HostedForward
from parallel_runtime.worker.steady_pipeline import SteadyCalls

CPU = torch.device("cpu")
BLOCKS, STEPS = 12, 6  # of the benchmark's models, and of its runs
# By stages and patches: what benchmarks/pipefusion.md counts is below the first, and above the second where each step
# begins and ends with an empty pipeline.
LIMITS = {(2, 2): (0.095, 0.3), (4, 8): (0.075, 0.25)}
STOPPED_S = 60.0


class Clocks:
    """A clock for each thread."""

    def __init__(self) -> None:
        self._own = threading.local()

    def monotonic(self) -> float:
        """What this thread's clock shows."""
        return getattr(self._own, "at", 0.0)

    def set(self, at: float) -> None:
        """Have this thread's clock show that."""
        self._own.at = at


@dataclass
class Link:
    """From one stage to the next: a message is there once it is sent."""

    clocks: Clocks
    sent: Queue[tuple[torch.Tensor, float]] = field(default_factory=Queue)

    def send(self, tensor: torch.Tensor) -> None:
        """As `P2PChannel.send`."""
        self.sent.put((tensor.clone(), self.clocks.monotonic()))

    def post(self, landing: torch.Tensor) -> Any:
        """As `P2PChannel.post`."""
        return SimpleNamespace(wait=partial(self._wait, landing))

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, device: torch.device) -> torch.Tensor:
        """As `P2PChannel.receive`."""
        return self._wait(torch.empty(tuple(shape), dtype=dtype, device=device))

    def drain(self) -> None:
        """All is sent."""

    def _wait(self, landing: torch.Tensor) -> torch.Tensor:
        tensor, at = self.sent.get(timeout=STOPPED_S)
        assert (tensor.shape, tensor.dtype) == (landing.shape, landing.dtype)
        self.clocks.set(max(self.clocks.monotonic(), at))
        return landing.copy_(tensor)


def forward() -> HostedForward:
    """Of a model without blocks."""
    staged = SimpleNamespace(neighbours=None, before=(), begin=lambda later: None)
    weights = SimpleNamespace(shards=None, device=CPU)
    model: Any = SimpleNamespace(weights=weights, staged=staged, shared=None, between=None, without_blocks=nullcontext)
    return HostedForward(model, SequenceParallelAttention(), RegionTimer(CPU), lambda: None, HeldState(CPU))


def ran_stage(
    run: WorkerLoopRun, plan: ParallelPlan, links: Sequence[Link], cost: Cost, owners: torch.Tensor, stage: int
) -> list[Span]:
    """What a stage computed when, of a run whose latent's numbers are of these `owners`."""
    mesh: Any = SimpleNamespace(plan=plan, batch_group=0, replica_groups=range(1))
    mesh.axes = {"cfg": None, "pipefusion": SimpleNamespace(index=stage)}
    mesh.previous_stage, mesh.next_stage, clocks = links[stage - 1], links[stage], links[stage].clocks
    clocks.set(0.0)
    tensors = {name: each.float() for name, each in run.tensors().items()}
    tensors |= {name: torch.zeros_like(each, device="cpu") for name, each in run.results().items()}
    calls: Any = SteadyCalls(forward(), run.request(plan, model=0), tensors, mesh=mesh, copies=HostCopies(CPU))

    def outputs(cond: int, call: int, x: torch.Tensor, *, new_call: partial, **how: object) -> list[torch.Tensor]:
        if stage:
            calls._passes.receive([x])
        patch = new_call.keywords["patch"]
        patches = range(plan.num_patches) if patch is None else [patch]
        clocks.set(clocks.monotonic() + sum(cost(stage, each) for each in patches))
        if calls._passes.last:
            return [x]
        calls._passes.send([x])
        raise PassEndsError

    calls._model, calls._owners = SimpleNamespace(take_in=lambda: None, outputs=outputs), lambda: owners
    calls.prepare()
    for call in range(run.recurrence.num_calls):
        calls.run(call)
    calls.close()
    return list(calls.timeline().spans)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[list[Span]], Cost]]:
    """Runs all stages of a plan; `full`: no two patches share numbers of the latent."""
    clocks = Clocks()
    monkeypatch.setattr(timeline, "time", clocks)

    def counted(name: str, plan: ParallelPlan, *, full: bool) -> tuple[list[list[Span]], Cost]:
        stages, patches, run = plan.pipefusion, plan.num_patches, CASES[name].run(STEPS)
        cost = counted_cost([BLOCKS // stages] * stages, CASES[name].tokens(patches))
        numbers = torch.arange(run.shape[-1], dtype=torch.int32)
        owners = numbers * patches // len(numbers) if full else torch.full_like(numbers, -1)
        links = [Link(clocks) for _ in range(stages)]
        with ThreadPoolExecutor(stages) as threads:
            spans = threads.map(partial(ran_stage, run, plan, links, cost, owners), range(stages))
            found = [steady(each, plan.warmup_steps) for each in spans]
        assert all(link.sent.empty() for link in links)
        return found, cost

    return counted


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stages", "patches"), LIMITS)
def test_stages_of_a_full_pipeline_wait_as_little_as_the_page_says(
    count: Callable[..., tuple[list[list[Span]], Cost]], name: str, stages: int, patches: int
) -> None:
    """And no less than the order of their patches makes them."""
    plan = ParallelPlan(pipefusion=stages, patches=patches)
    (most, emptied), (spans, cost) = LIMITS[stages, patches], count(name, plan, full=True)
    assert bubble(spans) == pytest.approx(bubble(schedule(orders_of(spans), cost)), abs=1e-6)
    assert bubble(spans) <= most
    assert bubble(count(name, plan, full=False)[0]) > emptied, "a pipeline that is empty between steps would pass"
