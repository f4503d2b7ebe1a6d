"""Sampling runs for pools of workers, of models that ComfyUI's modules compute; no ComfyUI in this process.

The judge is `step_by_step`: the same run with the loop in this process, and one request of the module for each call of
each conditioning, so that a pipeline is empty between any two steps. It shares the sampler's numbers with the loop in
the ranks, and nothing of how parts of a latent travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from families.variants import BY_NAME, write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.models.hosted.calls import to_tree
from parallel_runtime.models.hosted.other_calls import apply_call
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import Inpaint, ModelCall, WorkerLoopRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence


@dataclass(frozen=True)
class Model:
    """A model's file by the name of its variant, what a call of it is given."""

    name: str
    latent: tuple[int, ...]
    inputs: Mapping[str, tuple[int, ...]]  # of a conditioning beside the text, by their names in a call
    text_width: int

    def write(self, folder: Path) -> ModelSpec:
        """Its file, for ranks."""
        models = write_families(folder, only=[self.name])
        path = models / "diffusion_models" / BY_NAME[self.name].file
        return ModelSpec.of(path, "float32", comfyui=ComfyUI(str(comfyui_path()), ()))

    def given(self, text: int, batch: int, *, seed: int) -> dict[str, torch.Tensor]:
        """The conditioning of so many text tokens, by its names in a call of `apply_model`."""
        numbers = torch.Generator().manual_seed(seed)
        found = {"c_crossattn": torch.randn(batch, text, self.text_width, generator=numbers)}
        more = {name: torch.randn(batch, *shape, generator=numbers) for name, shape in self.inputs.items()}
        return found | {name: value.abs() + 1 if name == "guidance" else value for name, value in more.items()}


WAN = Model("wan 2.1 t2v", (16, 2, 8, 12), {}, 48)
FLUX = Model("flux.1 t2i", (16, 12, 16), {"y": (32,), "guidance": ()}, 64)
SD35 = Model("sd3.5 medium", (16, 12, 16), {"y": (64,)}, 48)
EULER = (1.0, 0.8, 0.55, 0.3, 0.0)


def euler(sigmas: tuple[float, ...] = EULER) -> SamplerRecurrence:
    """Steps of one call."""
    states = [RecurrenceStep(given=True, sigma=sigmas[0], timestep=sigmas[0])]
    for step, (before, sigma) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        ratio = sigma / before
        ends = {"sigma": sigma, "timestep": sigma} if sigma else {}
        states.append(RecurrenceStep(inputs=((step, ratio),), denoised=((step, 1 - ratio),), **ends))
    return SamplerRecurrence(states=tuple(states), step_ends=tuple(range(len(sigmas) - 1)))


def heun() -> SamplerRecurrence:
    """Steps of two calls with noise between them, the last of one."""
    states = (
        RecurrenceStep(given=True, sigma=1.0, timestep=1.0),
        RecurrenceStep(inputs=((0, 0.7),), denoised=((0, 0.3),), sigma=0.7, timestep=0.7),
        RecurrenceStep(inputs=((0, 0.7),), denoised=((0, 0.1), (1, 0.2)), given=True, sigma=0.7, timestep=0.7),
        RecurrenceStep(inputs=((2, 0.5),), denoised=((2, 0.5),), sigma=0.35, timestep=0.35),
        RecurrenceStep(inputs=((2, 0.5),), denoised=((2, 0.2), (3, 0.3)), sigma=0.35, timestep=0.35),
        RecurrenceStep(denoised=((4, 1.0),)),
    )
    return SamplerRecurrence(states=states, step_ends=(1, 3, 4))


def sampled(
    model: Model,
    recurrence: SamplerRecurrence,
    *,
    texts: tuple[int, ...] = (7, 12),
    batch: int = 1,
    mask: bool = False,
    options: Mapping[str, object] | None = None,
    latent: tuple[int, ...] | None = None,
    timeline: bool = False,
) -> WorkerLoopRun:
    """A run; texts of equal length are both sides of one call."""
    shape = (batch, *(latent or model.latent))
    numbers = torch.Generator().manual_seed(11)

    def noise() -> torch.Tensor:
        return torch.randn(shape, generator=numbers).reshape(batch, 1, -1)

    together = [(0, 1)] if len(texts) == 2 and texts[0] == texts[1] else [(side,) for side in range(len(texts))]
    conds = []
    for sides in together:
        each = [model.given(texts[side], batch, seed=side) for side in sides]
        kwargs: dict[str, Any] = {name: torch.cat([one[name] for one in each]) for name in each[0]}
        kwargs |= {"c_concat": None, "control": None, "transformer_options": {}}
        made = apply_call("Model", torch.Size(shape), sides, kwargs)
        told = {**made.options, **(options or {})}
        conds.append(ModelCall(tensors=made.tensors, out_shape=made.out_shape, out_dtype=torch.float32, options=told))
    inpaint = None
    if mask:
        kept = (torch.rand(shape, generator=numbers) > 0.4).float().reshape(batch, 1, -1)
        inpaint = Inpaint(mask=kept, noise=noise(), latent=noise())
    given = {number: noise() for number in recurrence.given}
    return WorkerLoopRun(
        recurrence=recurrence, conds=tuple(conds), cfg=2.5, given=given, inpaint=inpaint, timeline=timeline
    )


def step_by_step(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: WorkerLoopRun, *, name: str, keys_of: int = 1
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result and the denoised latent of each step, with the loop here. `keys_of`: of how many steps before a
    pipeline's keys are, which is wrong unless it is 1."""
    previews: list[torch.Tensor] = []
    warmup = plan.warmup_steps if plan.pipefusion > 1 else 0
    warm_calls = sum(
        1 for call in range(run.recurrence.num_calls) if sum(e < call for e in run.recurrence.step_ends) < warmup
    )
    told = replace(plan, warmup_steps=warm_calls) if plan.pipefusion > 1 else plan

    def denoise(number: int, x: torch.Tensor) -> torch.Tensor:
        state = run.recurrence.states[number]
        kept = x
        if run.inpaint is not None:
            mask, noise, latent = run.inpaint.mask, run.inpaint.noise, run.inpaint.latent
            kept = x * mask + (noise * state.reading.kept_noise + latent * state.reading.kept_latent) * (1 - mask)
        sides: dict[int, torch.Tensor] = {}
        calls = [
            module_call(cond, kept, state.timestep, key=f"{name} {at} {number % keys_of}")
            for at, cond in enumerate(run.conds)
        ]
        outs = pool.run(spec, told, calls).outs
        for cond, out in zip(run.conds, outs, strict=True):
            count = len(cond.options["sides"])
            for side, part in zip(cond.options["sides"], out.reshape(count, x.shape[0], 1, -1), strict=True):
                sides[side] = torch.add(kept, part, alpha=state.reading.weight)
        out = sides[0] if len(sides) == 1 else sides[1] + (sides[0] - sides[1]) * run.cfg
        if run.inpaint is not None:
            out = out * run.inpaint.mask + run.inpaint.latent * (1 - run.inpaint.mask)
        if number in run.recurrence.step_ends:
            previews.append(out)
        return out

    result = run.recurrence.run(lambda number: run.given[number], denoise)
    return result, previews


def module_call(cond: ModelCall, x: torch.Tensor, timestep: float, *, key: str) -> ModelCall:
    """What ComfyUI's `apply_model` makes of a call: one of the module, of a run of that name."""
    options, batch = cond.options, x.shape[0]
    tree, sides = options["call"], len(options["sides"])
    kwargs = {name: value for name, value in tree["d"]["kwargs"]["d"].items()}
    given = {
        name: cond.tensors[f"t{value['t']}"]
        for name, value in kwargs.items()
        if isinstance(value, dict) and "t" in value
    }
    context = given.pop("c_crossattn")
    latent = x.reshape(batch, *options["latent"]).repeat(sides, *[1] * len(options["latent"]))
    times = torch.full((batch * sides,), timestep)
    made = {"args": [latent, times], "kwargs": {"context": context, **given, "transformer_options": {}}}
    tree, tensors = to_tree(made)
    told = {
        "call": tree,
        "tensors": len(tensors),
        "batched": list(range(len(tensors))),
        "residuals": [],
        "method": None,
        "place": {"run": key.partition(" ")[0], "key": key},
    }
    named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    rows = batch * sides
    return ModelCall(tensors=named, out_shape=(rows, x.shape[-1]), out_dtype=torch.float32, options=told)
