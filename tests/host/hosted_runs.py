"""Whole sampling runs of models that ComfyUI's modules compute: as the ranks' loop takes them, and step by step here.

The second shares the sampler's numbers with the first, and nothing of how parts of a latent travel.
Letters: `B` images, `N` numbers of an image's latent, which travels as one row (B, 1, N).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from families.variants import BY_NAME, write_families
from host.tiny_hosted import CHANNELS, SIZE, TEXT_DIM, spec_of
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.model_call import CallPlace, ModelCall
from parallel_runtime.models.hosted.calls import to_tree
from parallel_runtime.models.hosted.other_calls import apply_call
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import Inpaint, WorkerLoopRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import CallReading, RecurrenceStep, SamplerRecurrence

AskModel: TypeAlias = Callable[[Sequence[ModelCall]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Model:
    """What a call of a model is given: a latent, a text, and more of a conditioning by its name in a call."""

    latent: tuple[int, ...] = (CHANNELS, *SIZE)
    text_width: int = TEXT_DIM
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    name: str = ""  # of the variant whose file it has

    def write(self, folder: Path) -> ModelSpec:
        """Its file, for ranks."""
        models = write_families(folder, only=[self.name])
        return spec_of(models / "diffusion_models" / BY_NAME[self.name].file)

    def given(self, text: int, batch: int, numbers: torch.Generator) -> dict[str, torch.Tensor]:
        """The conditioning of so many text tokens, by its names in a call of `apply_model`."""
        shapes = {"c_crossattn": (text, self.text_width), **self.more}
        found = {name: torch.randn(batch, *shape, generator=numbers) for name, shape in shapes.items()}
        return {name: value.abs() + 1 if name == "guidance" else value for name, value in found.items()}


TINY = Model()  # of tiny_hosted.py
WAN = Model((16, 2, 8, 12), 48, name="wan 2.1 t2v")
FLUX = Model((16, 12, 16), 64, {"y": (32,), "guidance": ()}, name="flux.1 t2i")
SD35 = Model((16, 12, 16), 48, {"y": (64,)}, name="sd3.5 medium")


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
    return recurrence_of(states, (0, 1, 3), timesteps)


def heun() -> SamplerRecurrence:
    """Steps of two calls with noise between them, the last of one."""
    states = (
        RecurrenceStep(given=True, sigma=1.0),
        RecurrenceStep(inputs=((0, 0.7),), denoised=((0, 0.3),), sigma=0.7),
        RecurrenceStep(inputs=((0, 0.7),), denoised=((0, 0.1), (1, 0.2)), given=True, sigma=0.7),
        RecurrenceStep(inputs=((2, 0.5),), denoised=((2, 0.5),), sigma=0.35),
        RecurrenceStep(inputs=((2, 0.5),), denoised=((2, 0.2), (3, 0.3)), sigma=0.35),
        RecurrenceStep(denoised=((4, 1.0),)),
    )
    return recurrence_of(states, (1, 3, 4), 1.0)


def euler(steps: int, *, timesteps: float = 1000.0) -> SamplerRecurrence:
    """So many steps of one call each, from sigma 1 to 0."""
    states = [RecurrenceStep(given=True, sigma=1.0)]
    for step in range(steps):
        sigma = 1 - (step + 1) / steps
        kept = sigma / (1 - step / steps)
        after = {"inputs": ((step, kept),), "sigma": sigma} if sigma else {}
        states.append(RecurrenceStep(denoised=((step, 1 - kept),), **after))
    return recurrence_of(states, tuple(range(steps)), timesteps)


def recurrence_of(states: Sequence[RecurrenceStep], step_ends: tuple[int, ...], timesteps: float) -> SamplerRecurrence:
    """Of states that lack their timesteps."""
    told = [state if state.sigma is None else state._replace(timestep=state.sigma * timesteps) for state in states]
    return SamplerRecurrence(states=tuple(told), step_ends=step_ends)


def read_otherwise(run: WorkerLoopRun) -> WorkerLoopRun:
    """The same run under a model sampling whose numbers are no flow's, and other ones in each call."""
    states = [
        state if state.sigma is None else state._replace(prediction=CallReading(0.4, 0.7, -0.5 * state.sigma, 0.3, 0.8))
        for state in run.recurrence.states
    ]
    return replace(run, recurrence=replace(run.recurrence, states=tuple(states)))


def make_run(
    model: Model = TINY,
    *,
    batch: int = 1,
    texts: Sequence[int] = (7,),
    together: bool = False,
    mask: bool = False,
    size: tuple[int, ...] = (),
    recurrence: SamplerRecurrence | None = None,
    timeline: bool = False,
) -> WorkerLoopRun:
    """A run of latents of `size`; `texts` are the tokens of its conditionings, one, or two for cfg.

    `together`: both are one call. By default of `two_call_recurrence`.
    """
    recurrence = recurrence or two_call_recurrence()
    latent = torch.Size((batch, model.latent[0], *(size or model.latent[1:])))
    numbers = torch.Generator().manual_seed(11)
    rows = (batch, 1, latent[1:].numel())
    inpaint = None
    given = {number: torch.randn(rows, generator=numbers) for number in recurrence.given}
    if mask:
        kept = (torch.rand(rows, generator=numbers) > 0.4).float()
        noise, image = (torch.randn(rows, generator=numbers) for _ in range(2))
        inpaint = Inpaint(mask=kept, noise=noise, latent=image)
    conds = []
    for sides in [range(len(texts))] if together else [[side] for side in range(len(texts))]:
        each = [model.given(texts[side], batch, numbers) for side in sides]
        asked: dict[str, Any] = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        asked |= {"c_concat": None, "control": None, "transformer_options": {"cond_or_uncond": list(sides)}}
        conds.append(apply_call("Model", latent, sides, asked))
    more = {"cfg": 2.5, "given": given, "inpaint": inpaint, "timeline": timeline}
    return WorkerLoopRun(recurrence=recurrence, conds=tuple(conds), **more)


def with_options(run: WorkerLoopRun, **options: object) -> WorkerLoopRun:
    """The same run with more options in each of its calls."""
    return replace(run, conds=tuple(replace(cond, options={**cond.options, **options}) for cond in run.conds))


def asking(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, *, run: str = "", keys_of: int = 1, **options: object
) -> AskModel:
    """The model under a plan, all conditionings of a step in one request; `run` is the sampling run's name.

    As from ComfyUI's `apply_model`, all but the timestep comes in the dtype that is computed in. `keys_of`: of how many
    calls before a pipeline's keys are, which is wrong unless it is 1.
    """
    dtype, number = getattr(torch, spec.dtype), itertools.count()

    def asked(key: str, call: ModelCall) -> ModelCall:
        tensors = {name: each if name == "t1" else each.to(dtype) for name, each in call.tensors.items()}
        return replace(call, tensors=tensors, place=CallPlace(run, key), options={**call.options, **options})

    def ask(calls: Sequence[ModelCall]) -> Sequence[torch.Tensor]:
        turn = next(number) % keys_of
        return pool.run(spec, plan, [asked(f"side {side} {turn}", call) for side, call in enumerate(calls)]).outs

    return ask


def module_call(cond: ModelCall, x: torch.Tensor, timestep: float) -> ModelCall:
    """What ComfyUI's `apply_model` makes of a call for a latent (B, 1, N): one of the module."""
    latent, sides = cond.options["latent"], len(cond.options["sides"])
    named = cond.options["call"]["d"]["kwargs"]["d"]
    places = {name: each["t"] for name, each in named.items() if isinstance(each, dict) and "t" in each}
    given = {name: cond.tensors[f"t{place}"] for name, place in places.items()}
    context, rows = given.pop("c_crossattn"), len(x) * sides
    arguments = [x.reshape(len(x), *latent).repeat(sides, *[1] * len(latent)), torch.full((rows,), timestep)]
    kwargs = {"context": context, **given, "transformer_options": {}}
    tree, tensors = to_tree({"args": arguments, "kwargs": kwargs})
    told = {"call": tree, "tensors": len(tensors), "batched": [*range(len(tensors))], "residuals": [], "method": None}
    by_name = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    return ModelCall(tensors=by_name, out_shape=(rows, x.shape[-1]), out_dtype=torch.float32, options=told)


def outputs(model: AskModel, run: WorkerLoopRun, x: torch.Tensor, timestep: float) -> list[torch.Tensor]:
    """What the model makes of a latent (B, 1, N) for each side, of the same shape."""
    outs = model([module_call(cond, x, timestep) for cond in run.conds])
    return [side for out in outs for side in out.reshape(-1, *x.shape)]


def host_loop(model: AskModel, run: WorkerLoopRun) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result and every step's denoised latent (B, 1, N), the model asked step by step as ComfyUI's sampler does."""
    previews = []

    def denoise(number: int, x: torch.Tensor) -> torch.Tensor:
        state = run.recurrence.states[number]
        reading = state.prediction or CallReading(1.0, 1.0, -state.sigma, state.sigma, 1 - state.sigma)
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
