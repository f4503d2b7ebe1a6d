"""A node that changes the modules of a MODEL by hand, in the ways of packs that cache steps or bring adapters.

Nothing of it is wrong in stock: each way computes what the model does without it.
"""

from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import comfy.ldm.flux.layers
import comfy.ldm.flux.math
import comfy.samplers
import torch
from comfy.k_diffusion.sampling import sample_euler
from comfy_api.latest import io

from .node import node

BLOCK = "single_blocks.0"


def same_method(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for the transformer's own `forward_orig`, as the pack's copy of it would."""
    return type(self).forward_orig(self, *args, **kwargs)


def same_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for its `forward`."""
    return type(self).forward(self, *args, **kwargs)


def same_forward_of_the_next_class(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for the `forward` of a pack's class of the transformer, as Fluxtapoz and RES4LYF have one."""
    return super(OtherClass, self).forward(*args, **kwargs)


def for_a_call(model: Any, at: str = "", **changed: Callable[[Any], Any]) -> None:
    """Have attributes of the transformer replaced while ComfyUI calls the model, as TeaCache and WaveSpeed do.

    `at`: of which module inside of it; "" for itself.
    """
    transformer = model.get_model_object("diffusion_model").get_submodule(at)
    values = {name: make(transformer) for name, make in changed.items()}

    def wrapper(function: Any, given: dict[str, Any]) -> Any:
        with patch.multiple(transformer, **values):
            return function(given["input"], given["timestep"], **given["c"])

    model.set_model_unet_function_wrapper(wrapper)


def changed_block(transformer: Any) -> Any:
    """Changes a method of a block while it is entered."""
    block = transformer.get_submodule(BLOCK)
    return patch.object(block, "forward", MethodType(same_forward, block))


def inside_for_a_call(model: Any) -> None:
    """Have a block computed by a method of the pack's, as Comfy Couple does: a wrapper sets it and puts it back."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with changed_block(executor.class_obj):
            return executor(*args, **kwargs)

    model.add_wrapper_with_key("diffusion_model", "inside", wrapper)


def inside_for_a_run(model: Any) -> None:
    """As before, by what ComfyUI calls as a run begins and ends."""
    changes: list[Any] = []

    def begin(patcher: Any) -> None:
        changes.append(changed_block(patcher.model.diffusion_model))
        changes[0].start()

    def end(_: Any) -> None:
        changes.pop().stop()

    model.add_callback("on_pre_run", begin)
    model.add_callback("on_cleanup", end)


def attention_for_a_call(model: Any, file: ModuleType, name: str) -> None:
    """Have ComfyUI's module attend by a function of the pack's, as RadialAttn does."""
    stock = getattr(file, name)

    def attend(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    def wrapper(function: Any, given: dict[str, Any]) -> Any:
        with patch.object(file, name, attend):
            return function(given["input"], given["timestep"], **given["c"])

    model.set_model_unet_function_wrapper(wrapper)


def of_the_class(model: Any) -> None:
    """Have a method of a block's class replaced while ComfyUI calls the model, as packs do that own a `_forward`."""
    kind = type(model.get_model_object("diffusion_model").get_submodule(BLOCK))
    stock = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, *args, **kwargs)

    def wrapper(function: Any, given: dict[str, Any]) -> Any:
        with patch.object(kind, "forward", forward):
            return function(given["input"], given["timestep"], **given["c"])

    model.set_model_unet_function_wrapper(wrapper)


class Wrapped(torch.nn.Module):
    """A pack's module around the transformer."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.inside = transformer

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the transformer."""
        return self.inside(*args, **kwargs)


class OtherClass:
    """What a pack's own class of the transformer has more, or in the place of ComfyUI's."""

    forward = same_forward_of_the_next_class


def other_class(model: Any) -> None:
    """As RES4LYF does where a model is patched for its styles."""
    transformer = model.model.diffusion_model
    kind = type(transformer)
    transformer.__class__ = type("OtherFlux", (OtherClass, kind), {"__module__": __name__})


WAYS: dict[str, Callable[[Any], None]] = {
    "method for a call": lambda model: for_a_call(model, forward_orig=lambda it: MethodType(same_method, it)),
    "forward for a call": lambda model: for_a_call(model, forward=lambda it: MethodType(same_forward, it)),
    "blocks for a call": lambda model: for_a_call(
        model, single_blocks=lambda it: torch.nn.ModuleList(list(it.single_blocks))
    ),
    "inner method for a call": inside_for_a_call,
    "inner method around a call": lambda model: for_a_call(
        model, BLOCK, forward=lambda it: MethodType(same_forward, it)
    ),
    "inner method for a run": inside_for_a_run,
    "attention for a call": lambda model: attention_for_a_call(model, comfy.ldm.flux.layers, "attention"),
    "inner attention for a call": lambda model: attention_for_a_call(model, comfy.ldm.flux.math, "optimized_attention"),
    # As WanMotionScale does with the base of positions; of a value that nothing is computed by.
    "value for good": lambda model: setattr(model.model.diffusion_model.get_submodule(BLOCK), "scale", 0.5),
    "value for a call": lambda model: for_a_call(model, BLOCK, scale=lambda _: 0.5),
    "method of a class": of_the_class,
    # As PuLID for Flux does.
    "method for good": lambda model: setattr(
        model.model.diffusion_model, "forward_orig", MethodType(same_method, model.model.diffusion_model)
    ),
    # As Spectrum does to read what a block makes.
    "hook": lambda model: model.model.diffusion_model.single_blocks[0].register_forward_hook(lambda *_: None),
    "class": other_class,
    # As compiling nodes and those do that wrap it in a module of their own.
    "wrapped": lambda model: setattr(model.model, "diffusion_model", Wrapped(model.model.diffusion_model)),
    "layer of torch": lambda model: model.model.diffusion_model.single_blocks.__setitem__(1, torch.nn.Identity()),
}


@node("ChangeModules", way=list(WAYS), gives=[io.Model])
def change_modules(model: io.Model, way: str) -> io.NodeOutput:
    """Changes modules in one of WAYS."""
    model = model.clone()
    WAYS[way](model)
    return io.NodeOutput(model)


@node("ChangeInPlace", way=list(WAYS), gives=[io.Model])
def change_in_place(model: io.Model, way: str) -> io.NodeOutput:
    """As ChangeModules, of the MODEL that it is given, which it hands on."""
    WAYS[way](model)
    return io.NodeOutput(model)


@node("MakeAnotherModel", gives=[io.Model])
def make_another_model(model: io.Model) -> io.NodeOutput:
    """Hands on a MODEL of its own of the same weights, as AnimateDiff Evolved's nodes do."""
    return io.NodeOutput(comfy.model_patcher.ModelPatcher(model.model, model.load_device, model.offload_device))


@node("ChangeWhileSampling", gives=[io.Sampler])
def change_while_sampling() -> io.NodeOutput:
    """Euler's sampler, which has a block computed by a method of the pack's while it samples."""

    def sample(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with changed_block(model.inner_model.inner_model.diffusion_model):
            return sample_euler(model, *args, **kwargs)

    return io.NodeOutput(comfy.samplers.KSAMPLER(sample))
