"""Previews of a sampler's loop in ComfyUI, made while the ranks compute the next step.

ComfyUI calls a step's callback, which makes the preview, before its sampler asks for the next step, and the ranks would
wait for it. Owns which callbacks may come later, and what they are given then. When that is, run_context.py says.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..contract.comfyui import CFGGuider, comfy
from ..contract.foreign_code import foreign
from ..tasks.cooperative_tasks import inside_a_task

if TYPE_CHECKING:
    from .run_context import RunContext

OnStep = Callable[[int, torch.Tensor, torch.Tensor, int], None]  # step, denoised, x, and how many steps there are
NAME, BEFORE = "callback", "sigmas"  # arguments of ComfyUI's `outer_sample`


class LateCallback:
    """A step's callback that is called once the next step is under way, if the run's loop stays in ComfyUI: from the
    first (`stays`), or for a reason that the run has.

    It gets copies, since a sampler may go on with the tensors of the step before.
    """

    def __init__(self, callback: OnStep, run: "RunContext", *, stays: bool) -> None:
        self._callback, self._run, self._stays = callback, run, stays
        self._due: Callable[[], None] | None = None

    def __call__(self, step: int, denoised: torch.Tensor, x: torch.Tensor, total_steps: int) -> None:
        self.call_due()
        in_ranks = not self._stays and self._run.loop_reason is None
        if in_ranks or inside_a_task():
            self._callback(step, denoised, x, total_steps)
        else:
            self._due = partial(self._callback, step, _copy(denoised), _copy(x), total_steps)

    def call_due(self) -> None:
        """Make the call that is due, if any. Raises what the callback raises, ComfyUI's interrupt among it."""
        due, self._due = self._due, None
        if due is not None:
            due()


def with_late_callback(
    run: "RunContext", sampler: object, arguments: Sequence[Any], named: Mapping[str, Any], *, stays: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of `outer_sample` behind its sigmas, with the callback as a `LateCallback` where that is known to
    change nothing else: ComfyUI's own callback, and a stock sampler."""
    arguments, named = list(arguments), dict(named)
    parameters = list(inspect.signature(CFGGuider.outer_sample).parameters)
    known = type(sampler) is comfy.samplers.KSAMPLER and {NAME, BEFORE} <= set(parameters)
    position = parameters.index(NAME) - parameters.index(BEFORE) - 1 if known else len(arguments)
    holder, key = (named, NAME) if NAME in named else (arguments, position)
    if not known or (holder is arguments and position >= len(arguments)):
        return arguments, named
    callback = holder[key]
    if callback is not None and not foreign(callback) and not foreign(sampler.sampler_function):
        holder[key] = run.late = LateCallback(callback, run, stays=stays)
    return arguments, named


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A latent of its own; of a nested one, which is made anew for the call, itself."""
    return tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
