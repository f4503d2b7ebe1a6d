"""Whole sampling runs of tiny_hosted.py's model: as the ranks' loop takes them, and step by step in this process.

Letters: `B` images, `N` numbers of an image's latent, which travels as one row (B, 1, N).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from host.tiny_hosted import CHANNELS, CLASS, SIZE, TEXT_DIM, call_of
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.models.hosted.other_calls import apply_call
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import Inpaint, ModelCall, WorkerLoopRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import Prediction, RecurrenceStep, SamplerRecurrence

AskModel: TypeAlias = Callable[[Sequence[ModelCall]], Sequence[torch.Tensor]]


def two_call_recurrence(*, timesteps: float = 1000.0) -> SamplerRecurrence:
    """Three steps of four calls: Euler, then one that looks back on two calls, then two with noise given ahead.

    `timesteps`: what the model is told of sigma 1.
    """
    states = (
        RecurrenceStep(given=True, sigma=1.0),
        RecurrenceStep(inputs=((0, 0.8),), denoised=((0, 0.2),), sigma=0.8),
        RecurrenceStep(inputs=((1, 0.5),), denoised=((0, -0.1), (1, 0.6)), given=True, sigma=0.45),
        RecurrenceStep(inputs=((1, 0.2), (2, 0.1)), denoised=((2, 0.7),), sigma=0.2),
        RecurrenceStep(denoised=((3, 1.0),), given=True),
    )
    told = [state if state.sigma is None else state._replace(timestep=state.sigma * timesteps) for state in states]
    return SamplerRecurrence(states=tuple(told), step_ends=(0, 1, 3))


def read_otherwise(run: WorkerLoopRun) -> WorkerLoopRun:
    """The same run under a model sampling whose numbers are no flow's, and other ones in each call."""
    states = [
        state if state.sigma is None else state._replace(prediction=Prediction(0.4, 0.7, -0.5 * state.sigma, 0.3, 0.8))
        for state in run.recurrence.states
    ]
    return replace(run, recurrence=replace(run.recurrence, states=tuple(states)))


def euler(steps: int) -> SamplerRecurrence:
    """So many steps of one call each, from sigma 1 to 0."""
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1000.0)]
    for step in range(steps - 1):
        sigma = 1 - (step + 1) / steps
        kept = sigma / (1 - step / steps)
        inputs, denoised = ((step, kept),), ((step, 1 - kept),)
        states.append(RecurrenceStep(inputs=inputs, denoised=denoised, sigma=sigma, timestep=1000 * sigma))
    states.append(RecurrenceStep(denoised=((steps - 1, 1.0),)))
    return SamplerRecurrence(states=tuple(states), step_ends=tuple(range(steps)))


def make_run(
    *,
    batch: int = 1,
    texts: Sequence[int] = (7,),
    mask: bool = False,
    size: tuple[int, int, int] = SIZE,
    recurrence: SamplerRecurrence | None = None,
) -> WorkerLoopRun:
    """A run of latents of `size`; `texts` are the tokens of its conditionings, one, or two for cfg.

    By default of `two_call_recurrence`.
    """
    recurrence, latent = recurrence or two_call_recurrence(), torch.Size((batch, CHANNELS, *size))
    numbers = torch.Generator().manual_seed(11)
    rows = (batch, 1, latent[1:].numel())
    inpaint = None
    given = {number: torch.randn(rows, generator=numbers) for number in recurrence.given}
    if mask:
        kept = (torch.rand(rows, generator=numbers) > 0.4).float()
        noise, image = (torch.randn(rows, generator=numbers) for _ in range(2))
        inpaint = Inpaint(mask=kept, noise=noise, latent=image)
    conds = []
    for side, text in enumerate(texts):
        context = torch.randn(batch, text, TEXT_DIM, generator=numbers)
        asked = {"c_concat": None, "c_crossattn": context, "control": None}
        made = apply_call(CLASS, latent, [side], asked | {"transformer_options": {"cond_or_uncond": [side]}})
        conds.append(
            ModelCall(
                tensors=made.tensors, out_shape=made.out_shape, out_dtype=torch.float32, options=dict(made.options)
            )
        )
    return WorkerLoopRun(recurrence=recurrence, conds=tuple(conds), cfg=2.5, given=given, inpaint=inpaint)


def with_options(run: WorkerLoopRun, **options: object) -> WorkerLoopRun:
    """The same run with more options in each of its calls."""
    return replace(run, conds=tuple(replace(cond, options={**cond.options, **options}) for cond in run.conds))


def asking(pool: Pool, spec: ModelSpec, plan: ParallelPlan, *, run: str = "", **options: object) -> AskModel:
    """The model under a plan, all conditionings of a step in one request; `run` is the sampling run's name.

    As from ComfyUI's `apply_model`, all but the timestep comes in the dtype that is computed in.
    """
    dtype = getattr(torch, spec.dtype)

    def asked(side: int, call: ModelCall) -> ModelCall:
        tensors = {name: each if name == "t1" else each.to(dtype) for name, each in call.tensors.items()}
        told = {**call.options, "place": {"run": run, "key": f"side {side}"}, **options}
        return replace(call, tensors=tensors, options=told)

    def ask(calls: Sequence[ModelCall]) -> Sequence[torch.Tensor]:
        return pool.run(spec, plan, [asked(*each) for each in enumerate(calls)]).outs

    return ask


def outputs(model: AskModel, run: WorkerLoopRun, x: torch.Tensor, timestep: float) -> list[torch.Tensor]:
    """What the model makes of a latent (B, 1, N) for each conditioning, of the same shape."""
    rows, times = len(x), torch.full((len(x),), timestep)
    calls = [call_of(x.reshape(rows, *cond.options["latent"]), times, cond.tensors["t0"]) for cond in run.conds]
    return [out.reshape(x.shape) for out in model(calls)]


def host_loop(model: AskModel, run: WorkerLoopRun) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result and every step's denoised latent (B, 1, N), the model asked step by step as ComfyUI's sampler does."""
    previews = []

    def denoise(number: int, x: torch.Tensor) -> torch.Tensor:
        state = run.recurrence.states[number]
        reading = state.prediction or Prediction(1.0, 1.0, -state.sigma, state.sigma, 1 - state.sigma)
        if run.inpaint is not None:
            kept = run.inpaint.noise * reading.kept_noise + run.inpaint.latent * reading.kept_latent
            x = x * run.inpaint.mask + kept * (1 - run.inpaint.mask)
        outs = outputs(model, run, x * reading.scale, state.timestep)
        sides = [x * reading.skip + out * reading.weight for out in outs]
        out = sides[0] if len(sides) == 1 else sides[1] + (sides[0] - sides[1]) * run.cfg
        if run.inpaint is not None:
            out = out * run.inpaint.mask + run.inpaint.latent * (1 - run.inpaint.mask)
        if number in run.recurrence.step_ends:
            previews.append(out)
        return out

    return run.recurrence.run(run.given.__getitem__, denoise), previews
