"""A node that reaches into the model in the ways of packs that no stock node stands for, and one without exchange."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import PatcherInjection, WrappersMP
from comfy_api.latest import io

from .node import node

RUN_KEY = "parallel_dit_run"


def override_attention(model: Any) -> None:
    """Another attention function, straight into the options, as attention packs do."""
    options = model.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda function, *args, **kwargs: function(*args, **kwargs)


def copy_to_device(model: Any) -> None:
    """As MultiGPU CFG Split does for each further GPU."""
    copy = model.deepclone_multigpu(new_load_device=torch.device("cpu"))
    copy.is_multigpu_base_clone = True
    model.set_additional_models("multigpu", [copy])
    model.match_multigpu_clones()


NOTHING = PatcherInjection(inject=lambda patcher: None, eject=lambda patcher: None)
WAYS: dict[str, Callable[[Any], None]] = {
    "none": lambda model: None,
    # Modules are swapped while the model is loaded, as packs with adapters inside of blocks do.
    "inject": lambda model: model.set_injections("probe", [NOTHING]),
    # A weight is changed whenever it is cast for computing.
    "wrap weight": lambda model: model.add_weight_wrapper("diffusion_model.img_in.weight", lambda weight: weight),
    "replace layer": lambda model: model.add_object_patch("diffusion_model.img_in", torch.nn.Identity()),
    # As WanVideoNAG and LTX2_NAG of KJNodes do to embed a negative prompt.
    "move layer": lambda model: model.get_model_object("diffusion_model").img_in.to("cpu"),
    "override attention": override_attention,
    "patch block": lambda model: model.set_model_patch(lambda args: args, "double_block"),
    "replace block": lambda model: model.set_model_patch_replace(
        lambda args, extra: extra["original_block"](args), "dit", "single_block", 1
    ),
    "copy to device": copy_to_device,
    # As Select Model Device does in the end, with a device that need not be there: nothing is loaded.
    "select device": lambda model: setattr(model, "load_device", torch.device("cuda", 1)),
}


@node("ReachIntoModel", way=list(WAYS), gives=[io.Model])
def reach_into_model(model: io.Model, way: str) -> io.NodeOutput:
    """Reaches into the model in one of WAYS."""
    model = model.clone()
    WAYS[way](model)
    return io.NodeOutput(model)


class WithoutExchange:
    """A sampling run that is wrong on purpose: its ranks attend to their own tokens alone, or all run the first row."""

    def __init__(self, run: Any, rows: bool) -> None:
        self.run, self.rows = run, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

    def call(self, call: Any, **rest: Any) -> torch.Tensor:
        wrong = dataclasses.replace(call, options={**call.options, "local_attention": True})
        return self.run.call(call.of_first_row() if self.rows else wrong, **rest)


def with_run_without_exchange(argument: Any, rows: bool) -> Any:
    """ComfyUI's options of a transformer with such a run in place of theirs; any other argument as it is."""
    if not isinstance(argument, dict) or RUN_KEY not in argument:
        return argument
    return {**argument, RUN_KEY: WithoutExchange(argument[RUN_KEY], rows)}


CACHE_WAYS: dict[str, Callable[[Any], Any]] = {
    "threshold": lambda cache: cache.threshold / 4,
    "overwrites": lambda cache: not cache.overwrites,
}


def wrong_loop(run: Any, way: str) -> Any:
    """A sampling run like `run` whose loop in the workers is wrong on purpose, in one of several ways.

    `local_attention`: ranks attend to their own tokens alone. `one_side`: both sides of cfg are the positive one.
    Others are of a step cache: `threshold`: a quarter of it; `overwrites`: whether a skipped call leaves its result in
    the latent, the other way round.
    """

    class WrongLoop(type(run)):
        """Of the class that a run has."""

        def sample(self, run: Any, **rest: Any) -> torch.Tensor:
            """The run, with other calls."""
            conds = [dataclasses.replace(each, options={**each.options, way: True}) for each in run.conds]
            if way == "one_side":
                conds = [run.conds[0]] * len(conds)
            cache = run.cache
            if way in CACHE_WAYS:
                conds, changed = run.conds, CACHE_WAYS[way](cache)
                cache = dataclasses.replace(cache, **{way: changed})
            return super().sample(dataclasses.replace(run, conds=tuple(conds), cache=cache), **rest)

    return WrongLoop(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})


@node("SwitchLoopWrong", way=["local_attention", "one_side", *CACHE_WAYS], gives=[io.Model])
def switch_loop_wrong(model: io.Model, way: str) -> io.NodeOutput:
    """The negative control of a loop in the workers, which `SwitchOffExchange` would keep out of them."""

    def wrong(executor: Any, guider: Any, sigmas: Any, extra: dict[str, Any], *rest: Any, **named: Any) -> Any:
        options = extra["model_options"]
        inside = options["transformer_options"]
        changed = {**options, "transformer_options": {**inside, RUN_KEY: wrong_loop(inside[RUN_KEY], way)}}
        return executor(guider, sigmas, {**extra, "model_options": changed}, *rest, **named)

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "switch_loop_wrong", wrong)
    return io.NodeOutput(model)


@node("SwitchOffExchange", gives=[io.Model])
def switch_off_exchange(model: io.Model, rows: bool = False) -> io.NodeOutput:
    """The negative control of every comparison in a server: a parallel MODEL whose ranks exchange nothing.

    Where they have nothing to exchange (`rows`), those of other rows of a batch run the first one as well.
    """

    def without_exchange(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = {name: with_run_without_exchange(each, rows) for name, each in kwargs.items()}
        return executor(*(with_run_without_exchange(each, rows) for each in args), **named)

    model = model.clone()
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "switch_off_exchange", without_exchange)
    return io.NodeOutput(model)
