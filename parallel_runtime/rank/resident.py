"""A whole sampling run on one rank: the sampler's program over this rank's tokens, without the host in between.

Letters: `B` images of this rank's lane, `S` this rank's rows of the latent, `C` channels of a token, `E` calls.

Owns the loop over calls and steps, when a step may start, and how long steps took. Does not own the program
(program.py), the latent's rows (latent.py), the model's arithmetic (adapters/) nor one call of the model: `WholeCalls`
here for a rank that runs all blocks, pipeline.py for a stage.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..errors import RequestCancelledError
from ..program import Program
from ..timing import RegionTimer
from ..wire.channel import SegmentTable
from .forward import Forward
from .latent import LatentRows, Share, call_tensors
from .prepared import Prepared, prepare

CREDIT_WAIT_S = 0.0001
MOST_TIMED_STEPS = 400


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

    def wait(self, step: int) -> float:
        """Return, with the seconds waited, when `step` may start. Raises `RequestCancelledError`."""
        began = time.perf_counter()
        self._show_waiting(True)  # for the ranks behind; their hearts beat
        try:
            while not self.open(step):
                # Looked at again: leave may have come after the first look, and then other ranks go on.
                if self._cancelled() and not self.open(step):
                    raise RequestCancelledError(f"sampling was cancelled before step {step}")
                time.sleep(CREDIT_WAIT_S)
        finally:
            self._show_waiting(False)
        return time.perf_counter() - began


class Calls(Protocol):
    """How the calls of a run are made on this rank."""

    def prepare(self) -> bool:
        """Compute all that can be known before the first call; whether all modulations are among it."""
        ...

    def run(self, call: int) -> None:
        """Make a call, its step having leave to start; writes the preview of a step that it ends."""
        ...

    def finish(self) -> None:
        """Write the result."""
        ...

    def close(self) -> None:
        """Leave nothing in flight, after the last call that every rank makes."""
        ...

    def report(self) -> dict[str, Any]:
        """What more there is to say of the run than how long its steps took."""
        ...


class ResidentLoop:
    """One run of `program`, call by call."""

    def __init__(self, program: Program, calls: Calls, timer: RegionTimer) -> None:
        self._program, self._calls, self._timer = program, calls, timer
        self.began_s: list[float] = []  # of each step, on the machine's clock
        self.step_s: list[float] = []
        self.waited_s = self.prepare_s = 0.0

    def run(self, gate: Gate, *, step_done: Callable[[int], None], prepared: Callable[[], None]) -> None:
        """Run to the end; the result and the previews go to the request's tensors, this rank's rows of them.

        `prepared` is called once the modulations of all calls are there, if they are to be. Raises
        `RequestCancelledError`.
        """
        began = time.perf_counter()
        if self._calls.prepare():
            prepared()
        self.prepare_s = time.perf_counter() - began
        self._timer.lap()
        try:
            self._run_calls(gate, step_done)
        except RequestCancelledError:
            self._calls.close()
            raise
        self._calls.close()
        self._calls.finish()

    def _run_calls(self, gate: Gate, step_done: Callable[[int], None]) -> None:
        starts, ends = step_starts(self._program), {end: step for step, end in enumerate(self._program.step_ends)}
        began = time.perf_counter()
        for call in range(self._program.num_calls):
            if call in starts:
                waited = gate.wait(starts[call])
                self.waited_s += waited
                began += waited
            self._calls.run(call)
            if call in ends:
                self.began_s.append(began)
                self.step_s.append(time.perf_counter() - began)
                self._timer.lap()
                began = time.perf_counter()
                step_done(ends[call])

    def report(self) -> dict[str, Any]:
        """Seconds of each step, of what was computed before the first, and of waiting for leave to go on.

        Where they were timed, `regions` has a list for each, an entry a step; a run of very many steps goes without, as
        a message has room for no more.
        """
        report = {"step_s": _brief(self.step_s), "prepare_s": self.prepare_s, "waited_s": self.waited_s}
        report |= self._calls.report()
        if len(self.step_s) > MOST_TIMED_STEPS:
            return report
        report["began_s"] = _brief(self.began_s)
        if self._timer.on:
            _, *steps = self._timer.laps()  # the first is of what was prepared
            names = {name for step in steps for name in step}
            report["regions"] = {name: _brief([step.get(name, 0.0) for step in steps]) for name in sorted(names)}
        return report


class WholeCalls:
    """Calls through all blocks on this rank, its part of the tokens. `tensors` are the request's, whole."""

    def __init__(
        self,
        forward: Forward,
        program: Program,
        share: Share,
        tensors: Mapping[str, torch.Tensor],
        *,
        rows: LatentRows,
        options: Sequence[Mapping],
        passes_a_call: int,
        modulation_bytes: int,
    ) -> None:
        """`options` of the conditionings; `passes_a_call`: those of the busiest lane that shares our weights.

        `modulation_bytes`: as `prepare`'s `most_bytes`.
        """
        self._modulation_bytes = modulation_bytes
        self._forward, self._program, self._share, self._tensors = forward, program, share, tensors
        self._rows, self._options, self._passes_a_call = rows, options, passes_a_call
        self._shards = {cond: forward.shard(call_tensors(tensors, cond)) for cond in share.conds}
        self._ready: dict[int, Prepared] = {}

    @property
    def passes(self) -> int:
        """How often the run goes through the blocks' weights."""
        return 1 + self._passes_a_call * self._program.num_calls

    def prepare(self) -> bool:
        """As `Calls.prepare`."""
        self._ready = prepare(
            self._forward,
            self._program,
            self._share,
            self._tensors,
            rows=self._shards,
            blocks=self._forward.adapter.blocks,
            most_bytes=self._modulation_bytes,
        )
        return all(ready.modulations for ready in self._ready.values())

    def run(self, call: int) -> None:
        """As `Calls.run`."""
        x = self._rows.enter(call)
        found = [self._velocity(cond, call, x) for cond in self._share.conds]
        for _ in range(self._passes_a_call - len(found)):
            self._forward.weights.idle_pass(self._forward.beat)
        self._rows.leave(call, found)

    def finish(self) -> None:
        """As `Calls.finish`."""
        self._rows.finish()

    def report(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def close(self) -> None:
        """Nothing: a call ends with all of its exchanges done."""

    def _velocity(self, cond: int, call: int, x: torch.Tensor) -> torch.Tensor:
        """A conditioning's velocity of the latent's rows, (B, S, C) fp32."""
        forward, ready, (rows, width) = self._forward, self._ready[cond], x.shape[1:]
        img = ready.inputs["img"]
        img[:, :rows, :width] = x
        with forward.timer.region("embed"), forward.weights.block("") as w:
            tokens = forward.adapter.embed(w, img, replace(ready.condition, vec=ready.condition.vec[call]))
        velocity = forward.velocity(
            tokens, self._shards[cond], ready.inputs, self._options[cond], modulations=ready.modulations_of(call)
        )
        return velocity[:, :rows].float()


def step_starts(program: Program) -> dict[int, int]:
    """The calls with which a step starts, and its number."""
    return {end + 1: step + 1 for step, end in enumerate(program.step_ends)} | {0: 0}


def _brief(seconds: Sequence[float]) -> list[float]:
    """To a microsecond, so that a message has room for many."""
    return [round(value, 6) for value in seconds]
