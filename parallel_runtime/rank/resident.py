"""A whole sampling run on one rank: the sampler's program over this rank's tokens, without the host in between.

Letters: `B` images of this rank's lane, `S` this rank's rows of the latent, `C` channels of a token, `E` calls.

What does not change from call to call (projected text, rotations) and what is known ahead (the modulations of every
call) is computed once. A sampler's update works token by token, so each rank keeps the latent of its own rows; only the
two sides of cfg, where lanes share them, are exchanged. Source of the idea that a schedule can be computed ahead:
PipeFusion (arXiv 2405.14430) keeps its loop in the workers for the same reason.

Owns the loop over calls and steps. Does not own the program (program.py), the model's arithmetic (adapters/) nor one
call of the model (forward.py).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..adapters.flux import Condition, Modulation
from ..errors import RequestCancelledError
from ..program import Program, Trajectory
from ..strategies.collectives import Axis
from ..strategies.lanes import Piece
from ..wire.channel import SegmentTable
from .forward import Forward

CREDIT_WAIT_S = 0.0001
MOST_TIMED_STEPS = 400
INPAINT = ("mask", "noise", "latent")
NUM_SIDES = 2  # of cfg: the positive conditioning, the negative one
PREVIEW_SLOTS = 2  # a step's preview is read before the step after the next may start


@dataclass(frozen=True, kw_only=True)
class Share:
    """What of a run one lane does: images `start` to `stop`, for the conditionings named.

    With `exchange`, the others of the cfg axis do the same images for the other conditionings.
    """

    start: int
    stop: int
    conds: tuple[int, ...]
    exchange: bool = False


class Gate:
    """Where a rank waits until it may start a step; what keeps all ranks' last step the same when one cancels.

    The parent raises the credit and stops raising it to cancel, so ranks that wait all wait at the same step.
    """

    def __init__(self, segments: SegmentTable, *, cancelled: Callable[[], bool], beat: Callable[[], None]) -> None:
        self._segments, self._cancelled, self._beat = segments, cancelled, beat

    def wait(self, step: int) -> float:
        """Return, with the seconds waited, when `step` may start. Raises `RequestCancelledError`."""
        began = time.perf_counter()
        while self._segments.credit <= step:
            if self._cancelled():
                raise RequestCancelledError(f"sampling was cancelled before step {step}")
            self._beat()
            time.sleep(CREDIT_WAIT_S)
        return time.perf_counter() - began


@dataclass(frozen=True)
class Prepared:
    """One conditioning, made ready for all calls."""

    inputs: dict[str, torch.Tensor]  # each call writes the latent into the first rows and columns of "img"
    condition: Condition  # with vec (E, B, ..., C)
    modulations: dict[str, Modulation] = field(default_factory=dict)  # by block prefix, each (E, B, ...)


class ResidentLoop:
    """One run of `program` by `forward`. `tensors` are the request's, whole: those of conditioning 0 as `0.img`."""

    def __init__(
        self,
        forward: Forward,
        program: Program,
        share: Share,
        tensors: Mapping[str, torch.Tensor],
        *,
        options: Sequence[Mapping],
        cfg: float,
        cfg_axis: Axis,
        passes_a_call: int,
    ) -> None:
        """`options` of the conditionings; `passes_a_call`: those of the busiest lane that shares our weights."""
        self._forward, self._program, self._share, self._tensors = forward, program, share, tensors
        self._options, self._cfg, self._cfg_axis = options, cfg, cfg_axis
        self._passes_a_call = passes_a_call
        self._shard = forward.shard(call_tensors(tensors, 0))
        self._trajectory = Trajectory(program)
        self._inpaint = {
            name: self._part(tensors[f"inpaint.{name}"]).to(forward.device)
            for name in INPAINT
            if f"inpaint.{name}" in tensors
        }
        self.began_s: list[float] = []  # of each step, on the machine's clock
        self.step_s: list[float] = []
        self.waited_s = self.prepare_s = 0.0

    def run(self, gate: Gate, *, step_done: Callable[[int], None], prepared: Callable[[], None]) -> None:
        """Run to the end; the result and the previews go to the request's tensors, this rank's rows of them.

        `prepared` is called when the modulations of all calls are there. Raises `RequestCancelledError`.
        """
        began = time.perf_counter()
        ready = self._prepare()
        prepared()
        self.prepare_s = time.perf_counter() - began
        self._forward.timer.lap()
        starts = {end + 1: step + 1 for step, end in enumerate(self._program.step_ends)} | {0: 0}
        ends = {end: step for step, end in enumerate(self._program.step_ends)}
        began = time.perf_counter()
        for call in range(self._program.num_calls):
            if call in starts:
                waited = gate.wait(starts[call])
                self.waited_s += waited
                began += waited
            denoised = self._denoised(call, self._trajectory.enter(call, self._given(call)), ready)
            self._trajectory.leave(call, denoised)
            if call in ends:
                self._write(f"preview.{ends[call] % PREVIEW_SLOTS}", denoised)
                self.began_s.append(began)
                self.step_s.append(time.perf_counter() - began)
                self._forward.timer.lap()
                began = time.perf_counter()
                step_done(ends[call])
        last = self._program.num_calls
        self._write("out", self._trajectory.enter(last, self._given(last)))

    def report(self) -> dict[str, Any]:
        """Seconds of each step, of what was computed before the first, and of waiting for leave to go on.

        Where they were timed, `regions` has a list for each, an entry a step; a run of very many steps goes without, as
        a message has room for no more.
        """
        report = {"step_s": _brief(self.step_s), "prepare_s": self.prepare_s, "waited_s": self.waited_s}
        if len(self.step_s) > MOST_TIMED_STEPS:
            return report
        report["began_s"] = _brief(self.began_s)
        if self._forward.timer.on:
            _, *steps = self._forward.timer.laps()  # the first is of what was prepared
            names = {name for step in steps for name in step}
            report["regions"] = {name: _brief([step.get(name, 0.0) for step in steps]) for name in sorted(names)}
        return report

    def _write(self, name: str, rows: torch.Tensor) -> None:
        """This rank's rows of a result; of lanes that have the same ones, the first writes. Waits for the device."""
        if self._share.conds and not (self._share.exchange and self._cfg_axis.index):
            self._part(self._tensors[name]).copy_(rows)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's view of a whole tensor (images, latent rows, C): its lane's images, its own rows."""
        return self._shard.take(tensor[self._share.start : self._share.stop], stream="image", dim=1)

    def _given(self, number: int) -> torch.Tensor | None:
        if not self._program.states[number].given:
            return None
        return self._part(self._tensors[f"given.{number}"]).to(self._forward.device)

    def _prepare(self) -> dict[int, Prepared]:
        """One pass over the weights: all that can be known before the first call."""
        adapter, weights, device = self._forward.adapter, self._forward.weights, self._forward.device
        if not self._share.conds:
            weights.idle_pass(self._forward.beat)
            return {}
        times = torch.tensor([state.timestep for state in self._program.states[:-1]], device=device)
        ready: dict[int, Prepared] = {}
        with weights.block("") as w:
            for cond in self._share.conds:
                whole = call_tensors(self._tensors, cond)
                piece = Piece(cond, self._share.start, self._share.stop)
                inputs = self._forward.inputs(piece, self._forward.shard(whole), whole)
                inputs["timesteps"] = times[:, None].expand(-1, piece.stop - piece.start)
                img = inputs["img"].clone()  # on the CPU it is a view of what the parent sent
                ready[cond] = Prepared(inputs | {"img": img}, adapter.condition(w, inputs))
        for block in adapter.blocks:
            with weights.block(block.prefix) as w:
                for side in ready.values():
                    side.modulations[block.prefix] = adapter.modulation_rows(block, w, side.condition.vec)
            self._forward.beat()
        return ready

    def _denoised(self, call: int, x: torch.Tensor, ready: Mapping[int, Prepared]) -> torch.Tensor:
        """D of this rank's rows, (B, S, C) fp32, by ComfyUI's order of operations."""
        sigma = self._program.states[call].sigma
        if sigma is None:
            raise ValueError(f"state {call} has no sigma; the program is not whole")
        if self._inpaint:
            mask, noise, latent = (self._inpaint[name] for name in INPAINT)
            x = x * mask + (noise * sigma + latent * (1.0 - sigma)) * (1.0 - mask)
        velocities = self._velocities(call, x, ready)
        if not velocities:  # a lane without work keeps in step with the others
            return x
        denoised = [x - velocity * sigma for velocity in velocities]
        out = denoised[0] if len(denoised) == 1 else denoised[1] + (denoised[0] - denoised[1]) * self._cfg
        return out * mask + latent * (1.0 - mask) if self._inpaint else out

    def _velocities(self, call: int, x: torch.Tensor, ready: Mapping[int, Prepared]) -> list[torch.Tensor]:
        """This lane's conditionings' velocities of the latent's rows, each (B, S, C) fp32."""
        found = [self._velocity(cond, call, x, ready[cond]) for cond in self._share.conds]
        for _ in range(self._passes_a_call - len(found)):
            self._forward.weights.idle_pass(self._forward.beat)
        return self._exchanged(found, x) if self._share.exchange else found

    def _velocity(self, cond: int, call: int, x: torch.Tensor, ready: Prepared) -> torch.Tensor:
        forward, (rows, width) = self._forward, x.shape[1:]
        img = ready.inputs["img"]
        img[:, :rows, :width] = x
        with forward.timer.region("embed"), forward.weights.block("") as w:
            condition = replace(ready.condition, vec=ready.condition.vec[call])
            tokens = forward.adapter.embed(w, img, condition)
        velocity = forward.velocity(
            tokens,
            forward.shard(call_tensors(self._tensors, cond)),
            ready.inputs,
            self._options[cond],
            modulations={prefix: tuple(part[call] for part in parts) for prefix, parts in ready.modulations.items()},
        )
        return velocity[:, :rows].float()

    def _exchanged(self, mine: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        """The velocities of both conditionings, of which this lane has made one, or, beyond the first two, none."""
        axis, count = self._cfg_axis, x.shape[0] * x.shape[1]
        lengths = tuple(count if index < NUM_SIDES else 0 for index in range(axis.size))
        nothing = (0,) * axis.size
        if not mine:
            axis.all_to_all(x.new_empty((0, x.shape[2])), send_lengths=nothing, receive_lengths=nothing)
            return []
        rows = mine[0].flatten(0, 1)
        both = axis.all_to_all(rows.repeat(NUM_SIDES, 1), send_lengths=lengths, receive_lengths=lengths)
        return list(both.unflatten(0, (NUM_SIDES, *x.shape[:2])).unbind(0))


def _brief(seconds: Sequence[float]) -> list[float]:
    """To a microsecond, so that a message has room for many."""
    return [round(value, 6) for value in seconds]


def call_tensors(tensors: Mapping[str, torch.Tensor], call: int) -> dict[str, torch.Tensor]:
    """Of a request's tensors those of one call, by the names that they have there."""
    start = f"{call}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
