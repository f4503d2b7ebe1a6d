"""Whole sampling runs of the tiny hosted model for tests, and the way of one process to do them: one call of the model
after another, as ComfyUI does.

Letters: `B` images, `N` numbers of an image's latent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.models.hosted.other_calls import apply_call
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.in_worker_sampling import Inpaint, InWorkerRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import Prediction, RecurrenceStep, SamplerRecurrence

from .tiny_hosted import CHANNELS, CLASS, SIZE, TEXT_DIM, call_of

SHAPE = (CHANNELS, *SIZE)  # of an image's latent
# What the model makes (B, 1, N) of a conditioning, a latent (B, 1, N) and a timestep.
Model = Callable[[ModelCall, torch.Tensor, float], torch.Tensor]


def two_call_recurrence() -> SamplerRecurrence:
    """Three steps of four calls: Euler, then one that looks back on two calls, then two with noise given ahead."""
    return SamplerRecurrence(
        states=(
            RecurrenceStep(given=True, sigma=1.0, timestep=1000.0),
            RecurrenceStep(inputs=((0, 0.8),), denoised=((0, 0.2),), sigma=0.8, timestep=800.0),
            RecurrenceStep(inputs=((1, 0.5),), denoised=((0, -0.1), (1, 0.6)), given=True, sigma=0.45, timestep=450.0),
            RecurrenceStep(inputs=((1, 0.2), (2, 0.1)), denoised=((2, 0.7),), sigma=0.2, timestep=200.0),
            RecurrenceStep(denoised=((3, 1.0),), given=True),
        ),
        step_ends=(0, 1, 3),
    )


def euler(steps: int) -> SamplerRecurrence:
    """So many steps of one call each, from sigma 1."""
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1000.0)]
    for step in range(steps - 1):
        sigma = 1 - (step + 1) / steps
        kept = sigma / (1 - step / steps)
        inputs, denoised = ((step, kept),), ((step, 1 - kept),)
        states.append(RecurrenceStep(inputs=inputs, denoised=denoised, sigma=sigma, timestep=1000 * sigma))
    states.append(RecurrenceStep(denoised=((steps - 1, 1.0),)))
    return SamplerRecurrence(states=tuple(states), step_ends=tuple(range(steps)))


def read_otherwise(run: InWorkerRun) -> InWorkerRun:
    """The same run under a model sampling whose numbers are no flow's, and other ones in each call."""
    states = [
        state if state.sigma is None else state._replace(prediction=Prediction(0.4, 0.7, -0.5 * state.sigma, 0.3, 0.8))
        for state in run.recurrence.states
    ]
    return replace(run, recurrence=replace(run.recurrence, states=tuple(states)))


def with_options(run: InWorkerRun, **options: object) -> InWorkerRun:
    """The same run with more options in its calls."""
    conds = tuple(replace(cond, options={**cond.options, **options}) for cond in run.conds)
    return replace(run, conds=conds)


def conditioning(side: int, *, text: int, batch: int) -> ModelCall:
    """A side's call of ComfyUI's `apply_model`, of a text of so many tokens."""
    context = torch.randn(batch, text, TEXT_DIM, generator=torch.Generator().manual_seed(side))
    given = {"c_concat": None, "c_crossattn": context, "control": None, "transformer_options": {}}
    call = apply_call(CLASS, torch.Size((batch, *SHAPE)), [side], given)
    return ModelCall(tensors=call.tensors, out_shape=call.out_shape, out_dtype=torch.float32, options=call.options)


def make_run(
    *,
    batch: int = 1,
    sides: tuple[int, ...] = (7,),
    mask: bool = False,
    recurrence: SamplerRecurrence | None = None,
) -> InWorkerRun:
    """A run whose conditionings have texts of `sides` tokens; by default of `two_call_recurrence`."""
    recurrence = recurrence or two_call_recurrence()
    shape = (batch, 1, torch.Size(SHAPE).numel())
    numbers = torch.Generator().manual_seed(11)
    given = {number: torch.randn(shape, generator=numbers) for number in recurrence.given}
    inpaint = None
    if mask:
        kept = (torch.rand(shape, generator=numbers) > 0.4).float()
        noise, latent = (torch.randn(shape, generator=numbers) for _ in range(2))
        inpaint = Inpaint(mask=kept, noise=noise, latent=latent)
    conds = tuple(conditioning(side, text=text, batch=batch) for side, text in enumerate(sides))
    return InWorkerRun(recurrence=recurrence, conds=conds, cfg=2.5, given=given, inpaint=inpaint)


def on_one_rank(pool: Pool, spec: ModelSpec) -> Model:
    """The model on one rank of a pool, which runtime/test_parity.py holds to ComfyUI's bare module."""
    return partial(_call_one_rank, pool, spec)


def _call_one_rank(pool: Pool, spec: ModelSpec, cond: ModelCall, x: torch.Tensor, timestep: float) -> torch.Tensor:
    rows = len(x)
    call = call_of(x.reshape(rows, *SHAPE), torch.full((rows,), timestep), cond.tensors["t0"])
    return pool.run(spec, ParallelPlan(), [call]).outs[0].reshape(x.shape)


def host_loop(model: Model, run: InWorkerRun) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result and every step's denoised latent, by one call of `model` after another."""
    previews = []

    def denoise(number: int, x: torch.Tensor) -> torch.Tensor:
        state = run.recurrence.states[number]
        reading = state.prediction or Prediction.of_flow(state.sigma)
        if run.inpaint is not None:
            kept = run.inpaint.noise * reading.kept_noise + run.inpaint.latent * reading.kept_latent
            x = x * run.inpaint.mask + kept * (1 - run.inpaint.mask)
        sides = [
            x * reading.skip + model(cond, x * reading.scale, state.timestep) * reading.weight for cond in run.conds
        ]
        out = sides[0] if len(sides) == 1 else sides[1] + (sides[0] - sides[1]) * run.cfg
        if run.inpaint is not None:
            out = out * run.inpaint.mask + run.inpaint.latent * (1 - run.inpaint.mask)
        if number in run.recurrence.step_ends:
            previews.append(out)
        return out

    return run.recurrence.run(run.given.__getitem__, denoise), previews
