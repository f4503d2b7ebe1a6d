"""A node that sets things on ComfyUI's model itself, `model.model`, in the ways of packs; MODELs carry the last two.

Letters: `C` channels, `H`, `W` of a latent.
"""

from collections.abc import Callable
from types import MethodType
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


def _guided(self: Any, **kwargs: Any) -> dict[str, Any]:
    """A conditioning with a guidance that says which model it is of: the one that is patched, or the stock one."""
    guidance = 9.0 if self.concat_keys == ("patched",) else 1.0
    return type(self).extra_conds(self, **kwargs) | {"guidance": comfy.conds.CONDRegular(torch.FloatTensor([guidance]))}


def patch_method(model: Any) -> None:
    """As IC-Light does: an object patch that is a method of the model that came in."""
    model.add_object_patch("concat_keys", ("patched",))
    model.add_object_patch("extra_conds", MethodType(_guided, model.model))


def patch_around_method(model: Any) -> None:
    """As many do: an object patch that calls the method whose place it takes, here one of a pack before it."""
    patch_method(model)
    stock = model.get_model_object("extra_conds")
    model.add_object_patch("extra_conds", lambda **kwargs: stock(**kwargs))


WAYS: dict[str, Callable[[Any], None]] = {
    "set_parameters": set_parameters,
    "register sigmas": register_sigmas,
    "latent format": latent_format,
    "extra_conds": extra_conds,
    "apply_model": apply_model,
    "class": model_class,
    "patch method": patch_method,
    "patch around method": patch_around_method,
}


@node("SetOnModel", way=list(WAYS), gives=[io.Model])
def set_on_model(model: io.Model, way: str) -> io.NodeOutput:
    """Sets something on ComfyUI's model, or patches it, in one of WAYS."""
    model = model.clone()
    WAYS[way](model)
    return io.NodeOutput(model)
