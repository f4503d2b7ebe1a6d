"""A whole sampling run on one rank: the sampler's recurrence over this rank's tokens, without the host in between.

Letters: `B` images of this rank's batch group, `S` this rank's rows of the latent, `C` channels of a token, `E` calls.

Owns the loop over calls and steps, when a step may start, and how long steps took. Does not own the recurrence
(sampler_recurrence.py), the latent's rows (latent.py) nor one call of the model (hosted_sampling.py).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import RequestCancelledError
from ..sampler_recurrence import SamplerRecurrence
from ..stock_caches import SkipDecision
from ..timing import LaunchThrottle, RegionTimer
from ..wire.channel import SegmentTable
from ..wire.replies import RankRun, StageTimeline, TimeSpent
from .host_copies import HostCopies
from .live_times import RankTimes

CREDIT_WAIT_S = 0.0001
MOST_TIMED_STEPS = 400


@dataclass(frozen=True, kw_only=True)
class StepPermit:
    """To start a step: when it was given, on the machine's clock, and how long the rank had waited for it."""

    at_s: float
    waited_s: float


class Gate:
    """Where a rank waits until it may start a step; what keeps all ranks' last step the same when one cancels.

    The parent raises the credit and stops raising it to cancel, so ranks that wait all wait at the same step.
    """

    def __init__(
        self, segments: SegmentTable, *, cancelled: Callable[[], bool], show_waiting: Callable[[bool], None]
    ) -> None:
        self._segments, self._cancelled, self._show_waiting = segments, cancelled, show_waiting

    def open(self, step: int) -> bool:
        """Whether `step` may start. Once it may, every rank will start it."""
        return self._segments.credit > step

    def wait(self, step: int, *, meanwhile: Callable[[], None]) -> float:
        """Return, with the seconds waited, when `step` may start. Raises `RequestCancelledError`.

        `meanwhile` is called again and again: the parent may wait for this rank's preview before it raises the credit.
        """
        began = time.perf_counter()
        self._show_waiting(True)  # for the ranks behind; their hearts beat
        try:
            while not self.open(step):
                # Looked at again: the permit may have come after the first look, and then other ranks go on.
                if self._cancelled() and not self.open(step):
                    raise RequestCancelledError(f"sampling was cancelled before step {step}")
                meanwhile()
                time.sleep(CREDIT_WAIT_S)
        finally:
            self._show_waiting(False)
        return time.perf_counter() - began


class Calls:
    """How the calls of a run are made on this rank. `skipping`: which of them a cache of ComfyUI's stands for.

    `drained`: why a pipeline is empty between steps; None where it is not, or there is none.
    """

    skipping: SkipDecision | None = None
    drained: str | None = None

    def prepare(self) -> None:
        """Compute all that can be known before the first call."""
        raise NotImplementedError

    def enter_step(self, step: int) -> None:
        """A step may start."""

    def run(self, call: int) -> None:
        """Make a call, whose step may start; begins to write the preview of a step that it ends."""
        raise NotImplementedError

    def while_waiting(self) -> None:
        """Called again and again while the rank waits until a step may start."""

    def finish(self) -> None:
        """Write the result."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing in flight, after the last call that every rank makes."""

    def timeline(self) -> StageTimeline | None:
        """When which chunk came and went, where that was asked for and there are stages."""
        return None


class WorkerLoop:
    """One run of `recurrence`, call by call. The calls' blocks go by `pace`, their previews through `copies`."""

    def __init__(
        self,
        recurrence: SamplerRecurrence,
        calls: Calls,
        timer: RegionTimer,
        *,
        pace: LaunchThrottle,
        copies: HostCopies,
    ) -> None:
        self._recurrence, self._calls, self._timer, self._pace, self._copies = recurrence, calls, timer, pace, copies
        self._permits: list[StepPermit] = []  # of each step, and of calls after the last one
        self._timed_steps: list[int] = []
        self._live = RankTimes(timer.device) if timer.asked else None

    def run(self, gate: Gate, *, step_done: Callable[[int, TimeSpent | None], None]) -> None:
        """Run to the end; the result and the previews go to the request's tensors, this rank's rows of them.

        `step_done(step, spent)` is told what the rank did so far, if it is timed. Raises `RequestCancelledError`.
        """
        self._timer.mark()
        self._calls.prepare()
        self._timer.mark()
        self._timer.lap()
        try:
            self._run_calls(gate, step_done)
        except RequestCancelledError:
            self._close()
            raise
        self._close()
        self._calls.finish()
        self._timer.mark()

    def _close(self) -> None:
        self._calls.close()
        self._pace.drain()
        self._copies.drain()

    def _while_waiting(self) -> None:
        self._calls.while_waiting()
        self._pace.collect()
        self._copies.collect()

    def _run_calls(self, gate: Gate, step_done: Callable[[int, TimeSpent | None], None]) -> None:
        def told(step: int) -> None:
            step_done(step, None if self._live is None else self._live.spent())

        if self._live is not None:
            self._live.begin()
        starts, ends = step_starts(self._recurrence), {end: step for step, end in enumerate(self._recurrence.step_ends)}
        for call in range(self._recurrence.num_calls):
            if call in starts:
                waited_s = gate.wait(starts[call], meanwhile=self._while_waiting)
                if self._timer.enter_step(starts[call], of=len(ends)) and starts[call] < len(ends):
                    self._timed_steps.append(starts[call])
                self._permits.append(StepPermit(at_s=time.perf_counter(), waited_s=waited_s))
                self._calls.enter_step(starts[call])
            self._calls.run(call)
            if call in ends:
                # Not waited for: a stage of a pipeline is asked for its next step while the device is at this one.
                self._timer.mark()
                if self._live is not None:
                    permit = self._permits[-1]
                    self._live.step(self._timer.regions, permit_s=permit.at_s, waited_s=permit.waited_s)
                self._timer.lap()
                self._copies.then(partial(told, ends[call]))

    def report(self, **work: Any) -> RankRun:  # noqa: ANN401  the fields of RankWork
        """The run's times, with what it ran and sent. Waits for the device."""
        run_s, prepared_s, *ends_s, finished_s = self._timer.moments()
        began_s = step_begins(prepared_s, ends_s, self._permits[: len(ends_s)])
        step_s = [end - began for began, end in zip(began_s, ends_s, strict=True)]
        prepared, *steps = self._timer.laps()
        fit = len(step_s) <= MOST_TIMED_STEPS
        return RankRun(
            step_s=_brief(step_s),
            prepare_s=prepared_s - run_s,
            finish_s=finished_s - [prepared_s, *ends_s][-1],
            began_s=_brief(began_s) if fit else None,
            regions=_by_name(steps) if fit and self._timer.asked else None,
            timed_steps=tuple(self._timed_steps) if fit and self._timer.asked else None,
            prepare_regions=prepared if self._timer.asked else None,
            timeline=self._calls.timeline(),
            drained=self._calls.drained,
            skipped_calls=None if self._calls.skipping is None else self._calls.skipping.skipped,
            **work,
        )


def step_begins(prepared_s: float, ends_s: Sequence[float], permits: Sequence[StepPermit]) -> list[float]:
    """When each step began on the device, all on the machine's clock: at the end of the one before, or with its permit.

    A device that was still at the step before while the host waited for the permit lost that much less by it.
    """
    before_s = [prepared_s, *ends_s[:-1]]
    return [
        before + min(permit.waited_s, max(0.0, permit.at_s - before))
        for before, permit in zip(before_s, permits, strict=True)
    ]


def step_starts(recurrence: SamplerRecurrence) -> dict[int, int]:
    """The calls with which a step starts, and its number."""
    return {end + 1: step + 1 for step, end in enumerate(recurrence.step_ends)} | {0: 0}


def _by_name(steps: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Seconds of each step by region; 0 in a step that did not enter it."""
    names = sorted({name for step in steps for name in step})
    return {name: _brief([step.get(name, 0.0) for step in steps]) for name in names}


def _brief(seconds: Sequence[float]) -> tuple[float, ...]:
    """To a microsecond, so that a message has room for many."""
    return tuple(round(value, 6) for value in seconds)
