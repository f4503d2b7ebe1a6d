"""What ComfyUI's model sampling says of each call of a run, as numbers.

At one sigma it scales the latent for the model, turns the model's output and the latent into a denoised latent, and
noises what a mask keeps. Each is a sum of multiples of what it is given: so it is asked once for unit values, and once
more for others, which the numbers must reproduce. Nodes that replace a MODEL's sampling are served without being known.

Owns the asking. What is done with the numbers is worker/latent.py's.
"""

import torch

from ....parallel_runtime.sampler_recurrence import CallReading, SamplerRecurrence
from ..contract.comfyui import comfy


class HostLoopError(ValueError):
    """The run must stay in ComfyUI's loop; the message says why."""


UNITS = (1.0, 0.0, 0.7), (0.0, 1.0, -1.3)  # the third numbers are others
TOLERANCE = 1e-6  # relative; the asked computes partly in fp32


def with_predictions(
    recurrence: SamplerRecurrence, model: comfy.model_base.BaseModel, *, dims: int, masked: bool
) -> SamplerRecurrence:
    """The recurrence with what `model` says of each call on a latent of so many dims; `masked`: of a mask as well.

    Raises `HostLoopError` for a model sampling that is no sum of multiples.
    """
    known: dict[float, CallReading] = {}
    states = []
    for state in recurrence.states:
        if state.sigma is not None:
            if state.sigma not in known:
                known[state.sigma] = _asked(model, state.sigma, dims=dims, masked=masked)
            if known[state.sigma] != CallReading.of_flow(state.sigma):
                state = state._replace(prediction=known[state.sigma])
        states.append(state)
    return SamplerRecurrence(states=tuple(states), step_ends=recurrence.step_ends)


def _asked(model: comfy.model_base.BaseModel, at: float, *, dims: int, masked: bool) -> CallReading:
    sampling, sigma = model.model_sampling, torch.tensor([at])
    first, second = (torch.tensor(values, dtype=torch.float64).reshape((1,) * (dims - 1) + (3,)) for values in UNITS)
    scale, nothing = _factors(sampling.calculate_input(sigma, first.clone()))
    if nothing:
        raise HostLoopError("the model's sampling adds something to the latent")
    skip, weight = _factors(sampling.calculate_denoised(sigma, second.clone(), first.clone()))
    flow = CallReading.of_flow(at)
    kept = (flow.kept_noise, flow.kept_latent)
    if masked:
        noised = model.scale_latent_inpaint(
            x=first.clone(), sigma=sigma, noise=first.clone(), latent_image=second.clone()
        )
        kept = _near(_factors(noised), kept)
    return CallReading(scale, *_near((skip, weight), (flow.skip, flow.weight)), *kept)


def _factors(made: torch.Tensor) -> tuple[float, float]:
    """What the two given values were multiplied by. Raises `HostLoopError` where that does not explain the third."""
    one, two, other = made.double().flatten().tolist()
    wanted = one * UNITS[0][2] + two * UNITS[1][2]
    if not abs(other - wanted) <= TOLERANCE * max(abs(one), abs(two), 1e-30):
        raise HostLoopError("the model's sampling is no sum of multiples of the latent and what the model says")
    return one, two


def _near(found: tuple[float, float], usual: tuple[float, float]) -> tuple[float, float]:
    """The usual numbers where those found are the same in fp32, so that they need not travel."""
    return usual if torch.equal(torch.tensor(found), torch.tensor(usual)) else found
