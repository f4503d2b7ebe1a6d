"""A node that sets things on ComfyUI's model itself, `model.model`, in the ways of packs: no MODEL carries them.

Letters: `C` channels, `H`, `W` of a latent.
"""

from collections.abc import Callable
from typing import Any

import comfy.conds
import torch
from comfy_api.latest import io

from .node import node

SHIFT = 3.0  # Flux's own is 1.15


def set_parameters(model: Any) -> None:
    """Another shift, by the function of the sampling that computes its sigmas."""
    model.model.model_sampling.set_parameters(shift=SHIFT)


def register_sigmas(model: Any) -> None:
    """The same by hand, as packs have it that serve several ComfyUIs."""
    sampling = model.model.model_sampling
    sampling.shift = SHIFT
    sampling.register_buffer("sigmas", sampling.sigma(torch.arange(1, 10001) / 10000))


def latent_format(model: Any) -> None:
    """Another latent format: what ComfyUI makes of the sampled latent (B, C, H, W)."""
    stock = model.model.latent_format
    kind = type("Brighter", (type(stock),), {"process_out": lambda self, latent: latent * 2.0})
    model.model.latent_format = kind()


def extra_conds(model: Any) -> None:
    """As ostris' FlexTools does: what is made of a conditioning, by a function of the pack's."""
    stock = model.model.extra_conds

    def of_pack(**kwargs: Any) -> dict[str, Any]:
        found = stock(**kwargs)
        return found | {"guidance": comfy.conds.CONDRegular(torch.FloatTensor([9.0]))}

    model.model.extra_conds = of_pack


def apply_model(model: Any) -> None:
    """As FlexTools does, too: what a step does around the transformer."""
    stock = model.model._apply_model
    model.model._apply_model = lambda *args, **kwargs: stock(*args, **kwargs) * 1.01


def model_class(model: Any) -> None:
    """Another class of ComfyUI's model."""
    kind = type(model.model)
    model.model.__class__ = type("OtherModel", (kind,), {"__module__": __name__})


WAYS: dict[str, Callable[[Any], None]] = {
    "set_parameters": set_parameters,
    "register sigmas": register_sigmas,
    "latent format": latent_format,
    "extra_conds": extra_conds,
    "apply_model": apply_model,
    "class": model_class,
}


@node("SetOnModel", way=list(WAYS), gives=[io.Model])
def set_on_model(model: io.Model, way: str) -> io.NodeOutput:
    """Sets something on ComfyUI's model in one of WAYS."""
    model = model.clone()
    WAYS[way](model)
    return io.NodeOutput(model)
