"""A sampling run in the workers' form: its latents as rows, its conditionings as calls of the model.

Letters: `B` images, `S` rows of a latent, `C` numbers of a row.

A model with blocks of our own takes tokens, and of its call all but the latent and the timestep is known once.
ComfyUI's own model takes its latent as ComfyUI has it, whatever its dims, and its call is one of `apply_model`, which
the rank runs too: what depends on sigma beside the timestep (a timestep a token, what lies beside the latent) is made
there.

Owns both forms and what of a run neither takes. Does not own what else of a run may live in the workers
(in_worker_sampling.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP

from ...parallel_runtime.models.hosted.calls import apply_call, rows_that_belong_together, takes_whole_batches
from ...parallel_runtime.models.hosted.formats import coarse_inputs
from ...parallel_runtime.models.plans import find_plan
from ...parallel_runtime.models.plans.whole import find_whole
from ...parallel_runtime.pool.calls import ModelCall
from ...parallel_runtime.pool.in_worker_sampling import shares
from .host_loop import HostLoopError
from .hosted_model import KEPT
from .refusals import INSIDE_BLOCKS
from .run_context import options_of_run, run_of
from .workload_from_guider import PATCH, asks_negative

CAPTURE_KEY = "parallel_dit_capture"
SIDES = ("positive", "negative")


@dataclass(frozen=True)
class Cond:
    """A conditioning as the ranks' call of the model; of ComfyUI's own, also as the call by which plans are proven."""

    call: ModelCall
    module_call: ModelCall | None = None


class Form(Protocol):
    """How a run's latents and conditionings go to the workers."""

    def refuse(self, guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
        """Raise `HostLoopError` for what of a MODEL and a plan this form does not have."""
        ...

    def refuse_latent(self, guider: comfy.samplers.CFGGuider, model_options: dict, x: torch.Tensor) -> None:
        """Raise `HostLoopError` for a latent of ComfyUI's that it does not have."""
        ...

    def rows(self, latent: torch.Tensor) -> torch.Tensor:
        """A latent of ComfyUI's as (B, S, C)."""
        ...

    def latent(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The way back, to a latent of `shape`."""
        ...

    def cond(
        self, guider: comfy.samplers.CFGGuider, name: str, model_options: dict, x: torch.Tensor, sigma: torch.Tensor
    ) -> Cond:
        """What ComfyUI would call the model with for one conditioning in the first step, at `sigma` (1,)."""
        ...


class TokenForm:
    """(B, C, H, W) as tokens of `PATCH` latent pixels a side, for blocks of our own."""

    def refuse(self, guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
        """Nothing."""

    def refuse_latent(self, guider: comfy.samplers.CFGGuider, model_options: dict, x: torch.Tensor) -> None:
        """One that does not divide into tokens."""
        if x.ndim != 4 or x.shape[2] % PATCH or x.shape[3] % PATCH:
            raise HostLoopError(f"a latent of {tuple(x.shape[2:])} does not divide into tokens of {PATCH}")

    def rows(self, latent: torch.Tensor) -> torch.Tensor:
        """(B, H / 2 * W / 2, C * 4), channels outermost within a token, as ComfyUI's module has them."""
        parts = latent.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # (B, C, h, 2, w, 2)
        return parts.permute(0, 2, 4, 1, 3, 5).flatten(3, 5).flatten(1, 2)

    def latent(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The way back."""
        _, channels, height, width = shape
        parts = rows.unflatten(1, (height // PATCH, width // PATCH)).unflatten(3, (channels, PATCH, PATCH))
        return parts.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    def cond(
        self, guider: comfy.samplers.CFGGuider, name: str, model_options: dict, x: torch.Tensor, sigma: torch.Tensor
    ) -> Cond:
        """The transformer's call, whose image begins with the latent's tokens."""
        sigma = sigma.expand(x.shape[0])
        call = _captured(guider, name, model_options, x, sigma)
        sampling = guider.inner_model.model_sampling
        tokens = self.rows(sampling.calculate_input(sigma, x)).to(call.tensors["img"])
        rows, width = tokens.shape[1:]
        times = sampling.timestep(sigma).float()
        if not torch.equal(call.tensors["img"][:, :rows, :width], tokens) or not torch.equal(
            call.tensors["timesteps"].to(times.device), times
        ):
            raise HostLoopError("the latent reaches the model changed")
        return Cond(call)


class WholeForm:
    """A latent of any dims as one row of numbers an image, for ComfyUI's own model."""

    def refuse(self, guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
        """What changes from call to call, and what would be shared out otherwise than step by step."""
        plan, kind = run_of(model_options).plan, type(guider.inner_model.diffusion_model)
        options = model_options.get("transformer_options", {})
        if any(options.get(name) for name in INSIDE_BLOCKS):
            raise HostLoopError("a node patches the model's blocks")
        if plan.pipefusion > 1:
            raise HostLoopError(f"a pipeline of {kind.__name__} runs step by step")
        if takes_whole_batches(kind):
            raise HostLoopError(f"{kind.__name__} takes both conditionings in one call")
        spread = plan.layout.shards > plan.parts
        if spread and find_plan(kind) is None and find_whole(kind) is None:
            raise HostLoopError(f"the order of {kind.__name__}'s blocks is not known, by which ranks share them")

    def refuse_latent(self, guider: comfy.samplers.CFGGuider, model_options: dict, x: torch.Tensor) -> None:
        """One of several rows that stock ComfyUI's layers round together."""
        recognised = guider.inner_model.prover.recognised
        rows = x.shape[0] * len(cond_names(guider, model_options))
        if rows > 1 and coarse_inputs(recognised.config, recognised.weights):
            raise HostLoopError("layers of the file's format round all rows of a step by one scale")

    def rows(self, latent: torch.Tensor) -> torch.Tensor:
        """(B, 1, numbers)."""
        return latent.reshape(latent.shape[0], 1, -1)

    def latent(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The way back."""
        return rows.reshape(shape)

    def cond(
        self, guider: comfy.samplers.CFGGuider, name: str, model_options: dict, x: torch.Tensor, sigma: torch.Tensor
    ) -> Cond:
        """The call of `apply_model`. Raises `HostLoopError` for a video whose frames the plan would part."""
        run = run_of(model_options)
        sigma = sigma.expand(x.shape[0])
        seen: list[dict[str, Any]] = []

        def apply_model(
            executor: Callable[..., torch.Tensor],
            latent: torch.Tensor,
            sigmas: torch.Tensor,
            c_concat: torch.Tensor | None = None,
            c_crossattn: torch.Tensor | None = None,
            control: object = None,
            transformer_options: Mapping[str, object] | None = None,
            **conds: object,
        ) -> torch.Tensor:
            if not torch.equal(latent, x) or not torch.equal(sigmas, sigma):
                raise HostLoopError("the latent reaches the model changed")
            named = {"c_concat": c_concat, "c_crossattn": c_crossattn, "control": control}
            seen.append({**named, "transformer_options": transformer_options or {}, **conds})
            return executor(latent, sigmas, c_concat, c_crossattn, control, transformer_options, **conds)

        module_call = _captured(guider, name, model_options, x, sigma, apply_model)
        transformer = guider.inner_model.diffusion_model
        together = rows_that_belong_together(transformer, seen[0], x.shape[0])
        num_conds = len(cond_names(guider, model_options))
        parts = [share.stop - share.start for share in shares(run.plan, images=x.shape[0], num_conds=num_conds)]
        if any(part % together for part in parts):
            raise HostLoopError(f"{run.plan.name} would part the {together} frames of a video")
        call = apply_call(type(transformer).__name__, x.shape, seen[0], stay_here=KEPT)
        applied = ModelCall(
            tensors=call.tensors,
            out_shape=call.out_shape,
            out_dtype=torch.float32,
            options={**call.options, **run.engine_options()},
        )
        return Cond(applied, module_call)


def _captured(
    guider: comfy.samplers.CFGGuider,
    name: str,
    model_options: dict,
    x: torch.Tensor,
    sigma: torch.Tensor,
    apply_model: Callable[..., torch.Tensor] | None = None,
) -> ModelCall:
    """The transformer's call for one conditioning of a run, in a stock step that is answered with zeros.

    `apply_model` is put around ComfyUI's, as a wrapper. Raises `HostLoopError` for more than one call.
    """
    calls: list[ModelCall] = []
    looking = replace(run_of(model_options), captured=calls)
    options = options_of_run(model_options, looking)
    if apply_model is not None:
        inside = options["transformer_options"]
        wrapped = {WrappersMP.APPLY_MODEL: {CAPTURE_KEY: [apply_model]}}
        inside["wrappers"] = {**inside.get("wrappers", {}), **wrapped}
    conds = [guider.conds[each] if each == name else None for each in SIDES]  # the place says which side it is
    comfy.samplers.calc_cond_batch(guider.inner_model, conds, x, sigma, options)
    if len(calls) != 1:
        raise HostLoopError(f"the {name} conditioning makes {len(calls)} calls of the model")
    return calls[0]


def cond_names(guider: comfy.samplers.CFGGuider, model_options: dict) -> tuple[str, ...]:
    """The conditionings that each step asks for."""
    return SIDES if asks_negative(guider.cfg, model_options) else SIDES[:1]
