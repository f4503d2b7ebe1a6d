"""A sampler's run as numbers: how each input of the model is made of earlier ones.

Letters: `X_e` is the input of the model's e-th call, `D_e` that call's denoised latent, `G_e` a tensor given ahead.
Every sampler whose update is linear in latents, denoised latents and noise is, for given sigmas, the recurrence

    X_e = sum of factor_k * X_k + sum of weight_j * D_j + G_e        k, j < e

whose numbers depend on nothing that a model says. X_0 is G_0, and noise that a sampler adds is in the other G. The last
state is the result. A recurrence works token by token, so ranks that hold different tokens each run it on their own.

Owns the recurrence, how it is run, and the numbers on which both ends of a run agree. Does not own where its numbers
come from (nodes/host/sampling/trace_recurrence.py) nor the model (worker/).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

NUM_SIDES = 2  # of cfg: the positive conditioning, the negative one
PREVIEW_SLOTS = 2  # a step's preview is read before the step after the next may start


class CallReading(NamedTuple):
    """How ComfyUI's model sampling reads one call: of X to what the model is given, of its output to D.

    The model is given `X * scale`, and D is `X * skip + output * weight`. What a noise mask keeps of X is
    `noise * kept_noise + latent * kept_latent`.
    """

    scale: float
    skip: float
    weight: float
    kept_noise: float
    kept_latent: float

    @classmethod
    def of_flow(cls, sigma: float) -> "CallReading":
        """A flow's: the model is given X and says its velocity."""
        return cls(1.0, 1.0, -sigma, sigma, 1.0 - sigma)


class RecurrenceStep(NamedTuple):
    """How one X is made. `sigma` and `timestep` are those of the call that it goes into; the result has none.

    `prediction`: how that call is read; None: as a flow's.
    """

    inputs: tuple[tuple[int, float], ...] = ()  # (k, factor of X_k)
    denoised: tuple[tuple[int, float], ...] = ()  # (j, weight of D_j)
    given: bool = False
    sigma: float | None = None
    timestep: float | None = None
    prediction: CallReading | None = None

    @property
    def reading(self) -> CallReading:
        """How the call is read. Raises `ValueError` for the result, which goes into none."""
        if self.sigma is None:
            raise ValueError("a state without sigma goes into no call; the recurrence is not whole")
        return CallReading.of_flow(self.sigma) if self.prediction is None else self.prediction


@dataclass(frozen=True, kw_only=True)
class SamplerRecurrence:
    """All states of a run, the result last, and the call after which each step of the sampler is done.

    Raises `ValueError` for states that refer to what is not there yet or are made of nothing, for calls without sigma
    and timestep, and for steps that do not each end with a call of their own.
    """

    states: tuple[RecurrenceStep, ...]
    step_ends: tuple[int, ...]  # step i has its denoised latent when call step_ends[i] is done

    def __post_init__(self) -> None:
        if not self.states:
            raise ValueError("a recurrence without states has no result; give at least one")
        for number, state in enumerate(self.states):
            for index, _ in (*state.inputs, *state.denoised):
                if not 0 <= index < number:
                    raise ValueError(f"state {number} is made of number {index}; use one from 0 to {number - 1}")
            if not (state.inputs or state.denoised or state.given):
                raise ValueError(f"state {number} is made of nothing; give it a tensor, or make it of earlier states")
            if {state.sigma is None, state.timestep is None} != {number == self.num_calls}:
                raise ValueError(f"state {number} of {len(self.states)}: all but the last need a sigma and a timestep")
        if list(self.step_ends) != sorted(set(self.step_ends)):
            raise ValueError(f"step_ends {list(self.step_ends)} do not rise; end each step with a later call")
        if any(not 0 <= call < self.num_calls for call in self.step_ends):
            raise ValueError(f"step_ends {list(self.step_ends)} names a call outside 0 to {self.num_calls - 1}")

    @property
    def num_calls(self) -> int:
        """How often the model is called."""
        return len(self.states) - 1

    @property
    def given(self) -> tuple[int, ...]:
        """The states that need a tensor given ahead."""
        return tuple(number for number, state in enumerate(self.states) if state.given)

    def run(
        self,
        given: Callable[[int], torch.Tensor],
        denoise: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The result. `given(e)` is G_e; `denoise(e, X_e)` is D_e and must leave X_e alone."""
        trajectory = Trajectory(self)
        for number in range(self.num_calls):
            x = trajectory.enter(number, given(number) if self.states[number].given else None)
            trajectory.finish_call(number, denoise(number, x))
        return trajectory.enter(self.num_calls, given(self.num_calls) if self.states[-1].given else None)


class Trajectory:
    """A recurrence as it runs: holds what later states still need, and drops it after."""

    def __init__(self, recurrence: SamplerRecurrence) -> None:
        self._recurrence = recurrence
        self._x: dict[int, torch.Tensor] = {}
        self._denoised: dict[int, torch.Tensor] = {}
        self._last_use_x = _last_uses(recurrence.states, lambda state: [k for k, _ in state.inputs])
        self._last_use_denoised = _last_uses(recurrence.states, lambda state: [j for j, _ in state.denoised])

    def enter(self, number: int, given: torch.Tensor | None) -> torch.Tensor:
        """X of state `number`; states are entered in order, each after the call before it was left."""
        state = self._recurrence.states[number]
        terms = [(self._x[k], factor) for k, factor in state.inputs]
        terms += [(self._denoised[j], weight) for j, weight in state.denoised]
        if not terms:
            if given is None:
                raise ValueError(f"state {number} is made of nothing; it needs a tensor given ahead")
            x = given
        else:
            first, factor = terms[0]
            x = first * factor
            for tensor, weight in terms[1:]:
                x.add_(tensor, alpha=weight)
            if given is not None:
                x.add_(given)
        if number in self._last_use_x:
            self._x[number] = x
        _drop(self._x, self._last_use_x, number)
        _drop(self._denoised, self._last_use_denoised, number)
        return x

    def finish_call(self, number: int, denoised: torch.Tensor) -> None:
        """Take the denoised latent of call `number`."""
        if number in self._last_use_denoised:
            self._denoised[number] = denoised


def _last_uses(states: Sequence[RecurrenceStep], uses: Callable[[RecurrenceStep], list[int]]) -> dict[int, int]:
    """For each number that any state uses, the last state that does."""
    return {used: number for number, state in enumerate(states) for used in uses(state)}


def _drop(held: dict[int, torch.Tensor], last_uses: Mapping[int, int], number: int) -> None:
    for old in [old for old in held if last_uses[old] <= number]:
        del held[old]
