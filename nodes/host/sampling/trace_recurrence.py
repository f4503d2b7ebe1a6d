"""A stock sampler as a recurrence of numbers, found by running the sampler itself, not by knowing it.

A sampler that treats latents linearly gives itself away when its model answers with unit vectors: what it then passes
to the model, and returns, are the weights of its own update. It runs in double precision on a handful of numbers, in
milliseconds, and once more on random ones, which the recurrence found must reproduce. Noise is drawn by the sampler
too, on a latent of zeros, so that seeds, order and noise samplers are its own.

Owns the tracing. What a recurrence is and how it runs is parallel_runtime/sampler_recurrence.py's.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from ....parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence
from ..contract.comfyui import comfy

# Relative, of sums over a whole run, in the precision a sampler is traced in.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-6}
# Of latents whose run the recurrence must reproduce: places and images may count, too, and a hundredth more in size.
TRIED = (2, 2, 3, 101)
SHOWN_TOLERANCE = 0.05  # how far what a step shows may be from the denoised latent, in a real run
MAX_WINDOW = 8  # earlier calls that a multistep sampler looks back on
MAX_STEPS = 500  # tracing keeps (4 x steps)^2 numbers, and a recurrence of more would not fit into a message
MAX_FACTOR = 2.0  # a state made of large multiples of others would enlarge their rounding


class NotLinearError(ValueError):
    """The sampler cannot be written as a recurrence; the message says what it does."""


@dataclass(kw_only=True)
class TracedCalls:
    """What a sampler passed to its model, and the denoised latents that it called back with."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    sigmas: list[float] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)  # as the denoised latent, at each of the step's ends
    result: torch.Tensor | None = None
    sigmas_left: torch.Tensor | None = None  # the sigmas it was given, which some samplers change
    sigmas_in_calls: torch.Tensor | None = None  # as each call of the model found them


class _Model(comfy.samplers.KSamplerX0Inpaint):
    """Stands where a sampler finds its model, and answers call e with `answer(e)`."""

    def __init__(
        self,
        guider: comfy.samplers.CFGGuider,
        sigmas: torch.Tensor,
        *,
        run: TracedCalls,
        answer: Callable[[int, torch.Tensor], torch.Tensor],
        options: dict,
        max_calls: int,
    ) -> None:
        super().__init__(guider, sigmas)
        self._run, self._answer, self._options, self._max_calls = run, answer, options, max_calls

    def __call__(
        self,
        x: torch.Tensor,
        sigma: torch.Tensor,
        denoise_mask: torch.Tensor | None = None,
        model_options: dict | None = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """Note the call; the answer is a tensor of its own, which the sampler may change."""
        if model_options is not self._options:
            raise NotLinearError("it changes the model's options while it runs")
        number = len(self._run.inputs)
        if number == self._max_calls:
            raise NotLinearError(f"it calls the model more than {self._max_calls} times")
        if not bool((sigma == sigma.flatten()[0]).all()):
            raise NotLinearError("it gives the images of a batch different sigmas")
        if self._run.sigmas_in_calls is None:
            self._run.sigmas_in_calls = self._run.sigmas_left.clone()
        if not torch.equal(self._run.sigmas_in_calls, self._run.sigmas_left):
            raise NotLinearError("it changes its sigmas between calls of the model")
        self._run.inputs.append(x.to("cpu", copy=True))
        self._run.sigmas.append(float(sigma.flatten()[0]))
        return self._answer(number, x)


@dataclass(frozen=True, kw_only=True)
class SamplerRun:
    """A stock sampler and all that it is called with, but the latent."""

    sampler: comfy.samplers.KSAMPLER
    guider: comfy.samplers.CFGGuider
    sigmas: torch.Tensor
    extra_args: dict

    def with_answers(
        self,
        x: torch.Tensor,
        answer: Callable[[int, torch.Tensor], torch.Tensor],
        *,
        shown: bool = True,
        noise: Callable[..., torch.Tensor] | None = None,
    ) -> TracedCalls:
        """Run the sampler from `x` with a model that answers as told. What is noted lies in host memory.

        `shown`: whether to note what each step shows. `noise` is drawn from in the place of what a sampler makes of its
        seed, if it takes that.
        """
        run = TracedCalls()
        told = {"options": self.extra_args["model_options"], "max_calls": _max_calls(len(self.sigmas))}
        model = _Model(self.guider, self.sigmas, run=run, answer=answer, **told)

        def step_done(news: dict) -> None:
            run.step_ends.append(len(run.inputs) - 1)
            if shown:
                run.shown.append(news["denoised"].clone())

        options = dict(self.sampler.extra_options)
        takes = inspect.signature(self.sampler.sampler_function).parameters
        if noise is not None and "noise_sampler" in takes and options.get("noise_sampler") is None:
            options["noise_sampler"] = noise
        run.sigmas_left = self.sigmas.to(x.device, copy=True)
        run.result = self.sampler.sampler_function(
            model,
            x,
            run.sigmas_left,
            extra_args=dict(self.extra_args),
            callback=step_done,
            disable=True,
            **options,
        )
        return run


class Traced(NamedTuple):
    """The recurrence of a sampler, and what it makes of its sigmas: as its calls of the model find them, which read
    those of the run, and as it leaves them to ComfyUI, which reads them again."""

    recurrence: SamplerRecurrence
    sigmas_in_calls: torch.Tensor
    sigmas_left: torch.Tensor


def trace(run: SamplerRun, timestep: Callable[[torch.Tensor], torch.Tensor]) -> Traced:
    """What a sampler does, in numbers.

    `timestep` maps a sigma to what the model is told, as ComfyUI's model sampling does.

    Leaves the random state of torch as it found it. Raises `NotLinearError` with what keeps the sampler from it.
    """
    steps = len(run.sigmas) - 1
    if steps > MAX_STEPS:
        raise NotLinearError(f"{steps} steps are more than {MAX_STEPS}, which is as many as are written down")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices of a few hundred numbers: waking a team of threads takes far longer
    try:
        return _trace(run, timestep, torch.float64)
    except RuntimeError:  # torch refuses to mix what the sampler makes in single precision with our double
        return _trace(run, timestep, torch.float32)
    finally:
        torch.set_num_threads(threads)


def _trace(run: SamplerRun, timestep: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Traced:
    width = 1 + _max_calls(len(run.sigmas))
    shape = (1, width, 1, 1)
    units = torch.eye(width, dtype=dtype).view(width, *shape)
    randoms = torch.randn((width, *TRIED), dtype=dtype, generator=torch.Generator().manual_seed(1))
    runs = []
    for vectors in (torch.zeros_like(units), units, torch.zeros_like(randoms), randoms):
        with torch.random.fork_rng(devices=[]):  # each draws the same noise for latents of its shape
            x = vectors[0].clone()
            noise = partial(_any_noise, x)  # a Brownian tree takes longer than all else here
            runs.append(run.with_answers(x, lambda number, _, v=vectors: v[number + 1].clone(), noise=noise))
    still, unit, plain, random = runs
    if any(each.sigmas != unit.sigmas or each.step_ends != unit.step_ends for each in runs):
        raise NotLinearError("what it does depends on what the model says")
    if any(each.shape != TRIED for each in (*random.inputs, random.result)):
        raise NotLinearError("it changes the size of the latent")
    ends = unit.step_ends
    if unit.inputs and (not ends or ends[0] < 0 or ends != sorted(set(ends))):
        raise NotLinearError("its steps do not each end with a call of the model")
    states = _states([*unit.inputs, unit.result], [*still.inputs, still.result], TOLERANCES[dtype])
    sigmas = [*unit.sigmas, None]
    times = [None if sigma is None else float(timestep(torch.tensor([sigma])).float()[0]) for sigma in sigmas]
    recurrence = SamplerRecurrence(
        states=tuple(
            RecurrenceStep(**state, sigma=sigma, timestep=time)
            for state, sigma, time in zip(states, sigmas, times, strict=True)
        ),
        step_ends=tuple(ends),
    )
    _check(recurrence, random, plain, randoms, 100 * TOLERANCES[dtype])
    seen = still.sigmas_in_calls if still.inputs else still.sigmas_left
    return Traced(recurrence, seen, still.sigmas_left)


def _any_noise(like: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.randn_like(like)


def given_tensors(
    run: SamplerRun, recurrence: SamplerRecurrence, x: torch.Tensor, check: Callable[[], None]
) -> dict[int, torch.Tensor]:
    """The recurrence's G_e for the latent `x` that the sampler starts from, drawing the noise that the sampler draws.

    Advances the random state of torch as a run of the sampler does. `check` is asked at each of its calls; raises what
    that raises.
    """
    if recurrence.given == (0,):
        return {0: x}

    def answer(_: int, latent: torch.Tensor) -> torch.Tensor:
        check()
        return torch.zeros_like(latent)

    still = run.with_answers(torch.zeros_like(x), answer, shown=False)
    found = [*still.inputs, *([] if still.result is None else [still.result.cpu()])]
    for number in sorted(recurrence.given, reverse=True):  # in place: each is made of earlier ones
        for k, factor in recurrence.states[number].inputs:
            found[number].sub_(found[k], alpha=factor)
    return {number: found[number] for number in recurrence.given} | {0: x}


def noise_bytes(recurrence: SamplerRecurrence, x: torch.Tensor) -> int:
    """Bytes that `given_tensors` keeps until it returns: a latent for each state, where the sampler draws noise."""
    return (1 if recurrence.given == (0,) else len(recurrence.states)) * x.nbytes


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Around drawing noise on `device`: where that fails, torch's random state is as it was before."""
    host, accelerator = torch.get_rng_state(), None if device.type == "cpu" else torch.get_device_module(device)
    named = () if device.type in ("cpu", "mps") else (device,)
    state = None if accelerator is None else accelerator.get_rng_state(*named)
    try:
        yield
    except BaseException:
        torch.set_rng_state(host)
        if accelerator is not None:
            accelerator.set_rng_state(state, *named)
        raise


def _max_calls(num_sigmas: int) -> int:
    return 4 * num_sigmas + 16


def _states(found: Sequence[torch.Tensor], still: Sequence[torch.Tensor], tolerance: float) -> list[dict]:
    """Each X as a sum of earlier ones and of denoised latents; `still` is the same run on zeros."""
    weights = torch.stack([(x - zero).flatten() for x, zero in zip(found, still, strict=True)]).double()
    if not bool(torch.isfinite(weights).all()):
        raise NotLinearError("it makes numbers that are not finite")
    noisy = [bool(zero.any()) for zero in still]
    states = [_recent(weights, number, tolerance) for number in range(len(found))]
    for number, state in enumerate(states):
        noise = noisy[number] or any(noisy[k] for k, _ in state["inputs"])
        state["given"] = noise or not (state["inputs"] or state["denoised"])
    return states


def _recent(weights: torch.Tensor, number: int, tolerance: float) -> dict:
    """State `number` by the fewest calls back that it can be made of. Row e of `weights`: X_e by X_0 and each D."""
    mine = weights[number]
    if number == 0:
        return {"inputs": (), "denoised": ()}
    limit = tolerance * float(mine.abs().max().clamp(min=1e-30))
    for window in range(1, min(MAX_WINDOW, number) + 1):
        calls = range(number - window, number)
        units = torch.zeros((window, len(mine)), dtype=weights.dtype)
        for row, call in enumerate(calls):
            units[row, 1 + call] = 1.0
        # The smallest factors that do: where earlier states depend on each other there are many.
        basis = torch.cat((weights[calls.start : calls.stop], units)).T
        factors = torch.linalg.pinv(basis, rtol=1e-12) @ mine
        factors[factors.abs() <= tolerance] = 0.0
        if float((basis @ factors - mine).abs().max()) <= limit and float(factors.abs().max()) <= MAX_FACTOR:
            return {"inputs": _terms(calls, factors[:window]), "denoised": _terms(calls, factors[window:])}
    calls = range(number)
    state = {"inputs": _terms(range(1), mine[:1]), "denoised": _terms(calls, mine[1 : 1 + number])}
    if float(mine[1 + number :].abs().max()) > limit:
        raise NotLinearError("an input of the model is no sum of earlier ones")
    return state


def _terms(calls: range, factors: torch.Tensor) -> tuple[tuple[int, float], ...]:
    return tuple((call, factor) for call, factor in zip(calls, factors.tolist(), strict=True) if factor)


def _given(state: RecurrenceStep, number: int, still: Sequence[torch.Tensor]) -> torch.Tensor:
    """G_e: what a run on zeros shows at state e beyond what it had from the states it is made of."""
    noise = still[number].clone()
    for k, factor in state.inputs:
        noise.sub_(still[k], alpha=factor)
    return noise


def _check(
    recurrence: SamplerRecurrence, run: TracedCalls, still: TracedCalls, vectors: torch.Tensor, tolerance: float
) -> None:
    """Raise `NotLinearError` unless the recurrence reproduces the sampler's run on random numbers, and what the sampler
    shows after a step is what the model said last. `still` is its run on zeros of the same shape."""
    noise = [*still.inputs, still.result]

    def given(number: int) -> torch.Tensor:
        return vectors[0] if number == 0 else _given(recurrence.states[number], number, noise)

    def denoise(number: int, x: torch.Tensor) -> torch.Tensor:
        _check_close(x, run.inputs[number], tolerance)
        return vectors[number + 1]

    _check_close(recurrence.run(given, denoise), run.result, tolerance)
    for end, shown in zip(run.step_ends, run.shown, strict=True):
        _check_shown(shown, run.inputs[end], vectors[end + 1], run.sigmas[end])


def _check_shown(shown: torch.Tensor, given: torch.Tensor, denoised: torch.Tensor, sigma: float) -> None:
    """Raise `NotLinearError` unless a step shows about what the model said last, `denoised`, to `given`.

    uni_pc makes it anew of the noise, by sigmas that single precision rounds (by 20 % below 4e-4): what it shows is off
    towards `given`, which is about sigma away in a real run, and far away among the independent numbers of the tracing.
    """
    step = given - denoised
    factor = float(((shown - denoised) * step).sum() / (step * step).sum().clamp(min=1e-30))
    _check_close(shown - factor * step, denoised, SHOWN_TOLERANCE)
    off = abs(factor) * min(sigma, 1.0)
    if not off <= SHOWN_TOLERANCE:
        raise NotLinearError(f"its steps show something else than the denoised latent (off by {off:.1e})")


def _check_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    if not error <= tolerance:
        raise NotLinearError(f"it is not linear in latents and denoised latents (off by {error:.1e})")
