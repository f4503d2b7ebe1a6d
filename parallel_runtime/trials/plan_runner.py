"""Runs a model's calls by a plan, in ranks that are there.

Owns what a request says beside the calls, and keeps what the ranks reply. Starts no ranks, and compares nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..checkpoint import ModelSpec
from ..model_call import CallPlace, ModelCall
from ..plan import ParallelPlan
from ..pool.pool import Pool
from ..weight_delta import PRISTINE
from ..wire.replies import RankStep, StepReply
from .trial import Results


class PlanRunner:
    """One plan of one model as a function from calls to their outputs."""

    def __init__(
        self,
        pool: Pool,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        options: Mapping[str, object],
        first_row: bool = False,
    ) -> None:
        """`first_row`: every row of every call is computed as the first one, which is wrong on purpose."""
        self.pool, self.spec, self.plan, self.options, self._first_row = pool, spec, plan, options, first_row
        self.deltas = PRISTINE
        self.replies: list[StepReply] = []  # of the plan's ranks, to the last request
        self.sampling_run: str | None = None  # of which calls are; a pipeline uses keys of the step before within one

    def __call__(self, call: ModelCall) -> torch.Tensor:
        return self.run([call])[0]

    def run(self, given: Sequence[ModelCall]) -> Results:
        """Several calls in one request, shared out over the plan's batch groups."""
        if self._first_row:
            given = [given[0].of_first_row()] * len(given)
        calls = [
            replace(call, place=self._place_of(number), options={**call.options, **self.options})
            for number, call in enumerate(given)
        ]
        result = self.pool.run(self.spec, self.plan, calls, deltas=self.deltas)
        self.replies = result.ranks[: self.plan.ranks]
        return result.outs

    @property
    def ranks(self) -> list[RankStep]:
        """What each of the plan's ranks ran and sent in the last request."""
        return [reply.ran for reply in self.replies if reply.ran is not None]

    def beside(self, plan: ParallelPlan, options: Mapping[str, object], *, sampling_run: str) -> "PlanRunner":
        """One of the same model in the same workers, whose calls are of a sampling run."""
        other = PlanRunner(self.pool, self.spec, plan, options=options)
        other.sampling_run = sampling_run
        return other

    def _place_of(self, call: int) -> CallPlace | None:
        return None if self.sampling_run is None else CallPlace(self.sampling_run, f"call {call}")
