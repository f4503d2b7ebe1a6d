"""Two sampling runs that take turns step by step, with MODELs that share one set of weights, or with one MODEL.

Owns: who runs and that the second may be cancelled half-way. The turns are the pack's cooperative tasks.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import comfy.model_management
import nodes
from comfy_api.latest import io

from .node import node


@node("SampleInTurn", gives=[io.Latent, io.Latent])
def sample_in_turn(
    model: io.Model,
    model_2: io.Model,
    positive: io.Conditioning,
    latent: io.Latent,
    seed: int,
    steps: int,
    cancel_after: int = 0,
) -> io.NodeOutput:
    """Both latents; of a second run that is cancelled, which is when its model was called that often, the first's."""
    host = type(model).__module__.rsplit(".", 2)[0]  # it is of model/patcher.py there
    turns, lists = (import_module(f"{host}.tasks.{name}") for name in ("cooperative_tasks", "list_sampling"))
    settings = (seed, steps, 1.0, "euler", "simple", positive, positive, latent)
    second = partial(nodes.common_ksampler, model_2, *settings)
    if cancel_after:
        second = partial(_cancelled, model_2, settings, cancel_after)
    kept = [turns.RandomNumbers(), lists.CurrentPatcher(model.model)]
    tasks = [partial(nodes.common_ksampler, model, *settings), second]
    (one,), (other,) = turns.run_in_turns(tasks, at_once=2, kept=kept)
    return io.NodeOutput(one, other or one)


def _cancelled(model: Any, settings: tuple, calls: int) -> tuple[None]:
    """Sample, and have the user's interrupt raised where the model has answered that often."""
    left = [calls]

    def count(args: dict[str, Any]) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise comfy.model_management.InterruptProcessingException
        return args["denoised"]

    model = model.clone()
    model.set_model_sampler_post_cfg_function(count)
    try:
        nodes.common_ksampler(model, *settings)
    except comfy.model_management.InterruptProcessingException:
        return (None,)
    raise RuntimeError("the run ended before it was cancelled")
