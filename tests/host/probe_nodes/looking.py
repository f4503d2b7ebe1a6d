"""Nodes that look at each step of a sampling run, as packs do whose own loop it is not."""

from collections.abc import Callable
from typing import Any

import comfy.model_base
import comfy.samplers
import torch
from comfy.k_diffusion.sampling import sample_euler
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy_api.latest import io

from .node import node

SEEN: list[str] = []


def by_callback(model: Any) -> None:
    """A function around the progress of each step."""

    def around(executor: Any, guider: Any, sigmas: Any, extra: Any, callback: Any, *rest: Any, **named: Any) -> Any:
        def look(*step: Any) -> None:
            SEEN.append("callback")
            callback(*step)

        return executor(guider, sigmas, extra, look, *rest, **named)

    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "look", around)


def by_state(model: Any) -> None:
    """What ComfyUI calls as each step begins."""
    model.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "look", lambda *_: SEEN.append("state"))


def by_replacing(holder: Any, name: str) -> Callable[[Any], None]:
    """Another function in the place of ComfyUI's, for the time of the run; on the MODEL's model where no holder is."""

    def replace(model: Any) -> None:
        def around(executor: Any, *arguments: Any, **named: Any) -> Any:
            place = model.model if holder is None else holder
            stock, own = getattr(place, name), vars(place).get(name)

            def look(*each: Any, **more: Any) -> Any:
                SEEN.append("function")
                return stock(*each, **more)

            setattr(place, name, look)
            try:
                return executor(*arguments, **named)
            finally:
                delattr(place, name) if own is None else setattr(place, name, own)

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "look", around)

    return replace


def by_guider(model: Any) -> None:
    """A guider whose scale is asked for in each step."""

    def around(executor: Any, *arguments: Any, **named: Any) -> Any:
        guider, scale = executor.class_obj, executor.class_obj.cfg

        def look(_: Any) -> float:
            SEEN.append("guider")
            return scale

        kind = type(guider)
        guider.__class__ = type("ScaleByStep", (kind,), {"cfg": property(look, lambda *_: None)})
        try:
            return executor(*arguments, **named)
        finally:
            guider.__class__ = kind

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "look", around)


LOOKS: dict[str, Callable[[Any], None]] = {
    "callback": by_callback,
    "state": by_state,
    "function": by_replacing(comfy.samplers, "cfg_function"),
    "batch": by_replacing(comfy.samplers, "_calc_cond_batch"),
    "class": by_replacing(comfy.model_base.BaseModel, "_apply_model"),
    "instance": by_replacing(None, "process_timestep"),
    "guider": by_guider,
}


@node("LookAtSteps", way=list(LOOKS), gives=[io.Model])
def look_at_steps(model: io.Model, way: str) -> io.NodeOutput:
    """Looks at each step in one of LOOKS."""
    model = model.clone()
    SEEN.clear()
    LOOKS[way](model)
    return io.NodeOutput(model)


class ExtraOptions:
    """An object, as RES4LYF's samplers put one of this name into the options of each call."""


@node("SampleByPack", way=["function", "objects", "instance"], gives=[io.Sampler])
def sample_by_pack(way: str) -> io.NodeOutput:
    """A sampler of a pack's own, which happens to be Euler's, or one that writes objects into the options of the model,
    as RES4LYF's do; or ComfyUI's, with a `sample` of the pack's."""
    SEEN.clear()

    def sample(model: Any, x: torch.Tensor, sigmas: torch.Tensor, **named: Any) -> torch.Tensor:
        SEEN.extend("sampler" for _ in sigmas[1:])
        if way == "objects":
            options = named["extra_args"]["model_options"]["transformer_options"]
            options["ExtraOptions"] = ExtraOptions()
            options["model_sampling"] = model.inner_model.inner_model.model_sampling
        return sample_euler(model, x, sigmas, **named)

    if way != "instance":
        return io.NodeOutput(comfy.samplers.KSAMPLER(sample))
    sampler = comfy.samplers.sampler_object("euler")
    stock = sampler.sample

    def whole(guider: Any, sigmas: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        SEEN.extend("sampler" for _ in sigmas[1:])
        return stock(guider, sigmas, *more, **named)

    sampler.sample = whole
    return io.NodeOutput(sampler)


@node("ReportLooks", shows=True)
def report_looks(latent: io.Latent) -> io.NodeOutput:
    """How often a node that looks has looked until `latent` was there."""
    return io.NodeOutput(ui={"looks": [len(SEEN)]})
