"""One plan as `bench` times it: as it works in the middle of a run, with nothing of other plans in the ranks.

Plans whose weights lie otherwise do not share the ranks' memory: before such a plan's run the weights of the last one
are freed, its own are loaded, and one run goes by to warm up. A pipeline is timed after the warm-up steps of a
sampling run of its own, which lead to the timed step as Euler steps do: with keys a step old, as it works, and not as
it begins. One with a step cache is timed after a step that is computed whole. Owns what comes before a timed run. Does
not own the clock.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..checkpoint import ModelSpec
from ..plan import ParallelPlan
from ..pool.models import LoadResult
from ..pool.pool import Pool
from ..wire.replies import StepReply
from .trial import Inputs, tensors_of
from .verify import PlanRunner
from .workload import steps_before

Calls: TypeAlias = Sequence[Inputs]
Kind: TypeAlias = tuple[int, bool, int, int]


@dataclass(frozen=True)
class WeightLayouts:
    """How a file's weights lie in the ranks under each of some plans, of which one is there at a time."""

    pool: Pool
    spec: ModelSpec
    homes: Mapping[Kind, ParallelPlan]  # of each kind of layout the plan with the most ranks, which serves the others

    @classmethod
    def of(cls, pool: Pool, spec: ModelSpec, plans: Iterable[ParallelPlan]) -> "WeightLayouts":
        """For these plans."""
        return cls(pool, spec, {plan.layout.kind: plan for plan in sorted(plans, key=lambda plan: plan.ranks)})

    def load(self, plan: ParallelPlan) -> LoadResult:
        """Have the weights in the ranks as this plan needs them, and in no other way. Raises PoolError."""
        home = self.homes[plan.layout.kind]
        if not self.pool.holds(self.spec, home):
            self.pool.unload(self.spec)
        return self.pool.load(self.spec, home)

    def holds(self, plan: ParallelPlan) -> bool:
        """Whether the weights lie as this plan needs them."""
        return self.pool.holds(self.spec, self.homes[plan.layout.kind])

    @property
    def warnings(self) -> list[str]:
        """What the user should know of plans that take turns in the ranks' memory."""
        if len(self.homes) == 1:
            return []
        names = ", ".join(plan.layout.name for plan in self.homes.values())
        return [f"the weights lie in {len(self.homes)} ways ({names}) and were loaded anew at each change, untimed"]


class SteadyPlan:
    """A plan's run of `calls`, after `prepare` as often as one likes."""

    def __init__(
        self, places: WeightLayouts, plan: ParallelPlan, calls: Calls, *, options: Mapping[str, object]
    ) -> None:
        self._places, self._plan, self._calls = places, plan, calls
        self._runner = PlanRunner(places.pool, places.spec, plan, options=options)
        self._before: Sequence[Calls] | None = [calls] if options.get("step_cache") else None
        self.compile_s = 0.0  # that the slowest rank took for graphs, of all runs

    @property
    def replies(self) -> list[StepReply]:
        """What the plan's ranks said of the last run."""
        return self._runner.replies

    @property
    def traces(self) -> dict[int, bytes]:
        """The ranks' traces of the last run, where they were asked for."""
        return self._runner.traces

    @property
    def graphs(self) -> int:
        """How many graphs the rank with the most has made."""
        return max(rank.compiled.graphs for rank in self._runner.ranks if rank.compiled is not None)

    def prepare(self) -> None:
        """Have the ranks ready for a run. Raises PoolError."""
        if not self._places.holds(self._plan):
            self._places.load(self._plan)
            self._warm_up()
            self.run()  # the first run of weights just loaded is slower than any other
        self._warm_up()

    def run(self) -> list[torch.Tensor]:
        """The calls' outputs, of a pipeline those of the step after its warm-up. Raises PoolError."""
        return self._ask(self._calls)

    def _ask(self, calls: Calls) -> list[torch.Tensor]:
        outs = self._runner.run(calls)
        self.compile_s += max((rank.compiled.compile_s for rank in self._runner.ranks if rank.compiled), default=0.0)
        return outs

    def _warm_up(self) -> None:
        """The steps before, of a fresh sampling run; nothing where there is no pipeline and no step cache."""
        if self._plan.pipefusion == 1 and self._before is None:
            return
        if self._before is None:
            exact = self._ask(self._calls)  # of no sampling run, so with keys of its own
            self._before = steps_before(tensors_of(self._calls), exact, self._plan.warmup_steps)
        self._runner.sampling_run = uuid.uuid4().hex
        for calls in self._before:
            self._ask(calls)
