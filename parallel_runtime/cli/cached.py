"""What `verify` finds of a first-block cache: a plan with it compared with one rank with it.

Owns what both skipped and how far they are apart. Does not own the calls (trials/trial.py), nor how a plan runs
them (trials/plan_runner.py).
"""

from collections.abc import Mapping, Sequence

from ..model_call import ModelCall
from ..plan import ParallelPlan
from ..proof import relative_error
from ..report.build import cached_calls
from ..trials.plan_runner import PlanRunner
from ..trials.trial import Results, Trial
from ..trials.workload import worst
from ..wire.replies import CachedCalls
from .terminal import PhaseLine


class Cached:
    """The calls once more as one sampling run with a cache: by the plan of `runner`, and by one rank."""

    def __init__(self, runner: PlanRunner, trial: Trial, threshold: float) -> None:
        """Raises PoolError when a rank fails."""
        self._trial, self._threshold = trial, threshold
        self._mine, self._seen = self._run(runner, runner.plan, runner.options)
        if runner.plan.layout.kind != ParallelPlan().layout.kind:
            runner.pool.unload(runner.spec)
        self._one_rank, self._seen_alone = self._run(runner, ParallelPlan(), {})

    @classmethod
    def of(cls, runner: PlanRunner, trial: Trial, threshold: float | None, progress: PhaseLine) -> "Cached | None":
        """None without a threshold. Raises PoolError when a rank fails."""
        if threshold is None:
            return None
        progress.phase(f"computing {runner.plan.name} and one rank with a step cache")
        return cls(runner, trial, threshold)

    def _run(
        self, runner: PlanRunner, plan: ParallelPlan, options: Mapping[str, object]
    ) -> tuple[Results, list[CachedCalls]]:
        """The results of a plan, and by step how many calls it skipped."""
        options = {**options, "step_cache": self._threshold}
        cached, seen = (
            runner.beside(plan, options, sampling_run=f"step cache of {plan.describe()}"),
            list[CachedCalls](),
        )

        def run(inputs: Sequence[ModelCall]) -> Results:
            outs = cached.run(inputs)
            seen.append(cached_calls(cached.replies))
            return outs

        return self._trial.results(run), seen

    @property
    def _error(self) -> float:
        return worst([relative_error(*pair) for pair in zip(self._mine, self._one_rank, strict=True)])

    @staticmethod
    def _share(seen: Sequence[CachedCalls]) -> list[float]:
        """By step, which share of the calls was skipped: batch groups that have a part of one count it each."""
        return [each.skipped / max(1, each.calls) for each in seen]

    def agrees(self, tolerance: float) -> bool:
        """Whether the plan skips what one rank skips, and says the same."""
        return self._error <= tolerance and self._share(self._seen) == self._share(self._seen_alone)

    def report(self, references: Results) -> dict:
        """What was skipped, by the plan and by one rank, and how far they are from each other and from `references`."""
        mine, one = (
            [sum(getattr(each, name) for each in seen) for name in ("skipped", "calls")]
            for seen in (self._seen, self._seen_alone)
        )
        return {
            "threshold": self._threshold,
            "skipped": mine[0],
            "of": mine[1],
            "one_rank_skipped": one[0],
            "one_rank_of": one[1],
            "one_rank_rel_err": self._error,
            "difference": worst([relative_error(*pair) for pair in zip(self._mine, references, strict=True)]),
        }


def describe_cached(told: Mapping) -> str:
    """What `Cached.report` says, for people."""
    return (
        f"with a step cache at {told['threshold']:g}: {told['skipped']} of {told['of']} calls skipped (one rank: "
        f"{told['one_rank_skipped']} of {told['one_rank_of']}), {told['one_rank_rel_err']:.2e} from one rank with it, "
        f"{told['difference']:.2e} from the exact result"
    )
