"""What keeps state that depends on the order of the model's calls, and so must see them as stock ComfyUI makes them.

Owns the list of wrappers of others that are known not to depend on the order of calls. Each was read in ComfyUI's
source; any other is taken to depend on it, unless it says so: a function with an attribute `parallel_dit_any_order`
keeps nothing from one call to the next. Knows no batch groups.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .comfyui import CallbacksMP, WrappersMP, comfy
from .version import off

PROMISE = "parallel_dit_any_order"
OURS = __name__.rpartition(".nodes.")[0]
# EasyCache decides to skip before a call and notes what it needs after it, each by conditioning; LazyCache is outside
# of the calls of one step. Both begin each sampling run with a copy of their state.
STEP_CACHES = "nodes_easycache"
# Functions of these files only compute with what they are given. Not here: APG, which sums up over the steps of a run.
STATELESS = ("cfg", "differential_diffusion", "eps", "fresca", "latent", "mahiro", "model_advanced", "perpneg", "tcfg")
FUNCTIONS = (
    *("model_function_wrapper", "sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function"),
    *("sampler_calc_cond_batch_function", "denoise_mask_function"),
)
IN_A_STEP = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
CALLBACKS_IN_A_STEP = (CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_APPLY_HOOKS)


@dataclass(frozen=True)
class StepCache:
    """What a step cache of ComfyUI's skipped in a sampling run, of so many steps."""

    name: str
    threshold: float
    skipped: int
    steps: int


def skipped_by_stock(model_options: Mapping[str, Any], *, steps: int) -> StepCache | None:
    """Of a run with EasyCache or LazyCache that is at its end; None without."""
    holder = model_options.get("transformer_options", {}).get("easycache")
    if holder is None or not _is_of(type(holder), STEP_CACHES):
        return None
    return StepCache(holder.name, holder.reuse_threshold, holder.total_steps_skipped, steps)


def of_step_cache(function: Callable | type) -> bool:
    """Whether ComfyUI brings it for EasyCache or LazyCache."""
    return _is_of(function, STEP_CACHES)


def why_calls_keep_order(
    callbacks: Mapping[str, Mapping[str, list]], conds: Iterable[dict], model_options: Mapping[str, Any]
) -> str | None:
    """Why the conditionings of one step have to run one after the other, or None when they need not.

    `callbacks` are those of the patcher that samples; `conds` are the active entries.
    """
    if off("cfg"):
        return off("cfg")
    conds = list(conds)
    options = model_options.get("transformer_options", {})
    for key, what in (("default", "default conditioning"), ("hooks", "hooks"), ("gligen", "GLIGEN")):
        if any(cond.get(key) is not None for cond in conds):
            return f"a conditioning has {what}"
    for key, what in (("context_handler", "context windows"), ("multigpu_clones", "copies on other devices")):
        if model_options.get(key) is not None:
            return f"the MODEL has {what}"
    around = [*_listed(model_options.get("model_function_wrapper"))]
    around += _of_kinds(options.get("wrappers", {}), IN_A_STEP)
    around += _of_kinds(options.get("callbacks", {}), CALLBACKS_IN_A_STEP)
    around += _of_kinds(callbacks, CALLBACKS_IN_A_STEP)
    if any(_is_of(each, STEP_CACHES) for each in around) and any("area" in cond for cond in conds):
        return "EasyCache begins again where a conditioning has another size"
    return _first_unknown(around)


def why_runs_keep_order(model: Any, conds: Iterable[Iterable[tuple]]) -> str | None:  # noqa: ANN401
    """Why whole sampling runs with a MODEL have to come one after the other, or None when they need not.

    `model` is a ModelPatcher, `conds` are CONDITIONINGs as they travel between nodes.
    """
    if off("cfg"):
        return off("cfg")
    if any(comfy.sampler_helpers.cond_has_hooks(cond) for cond in conds):
        return "a conditioning has hooks"
    model_options = model.model_options
    if model_options.get("context_handler") is not None:
        return "the MODEL has context windows"
    options = model_options["transformer_options"]
    around = [each for name in FUNCTIONS for each in _listed(model_options.get(name))]
    for by_kind in (model.wrappers, model.callbacks, options.get("wrappers", {}), options.get("callbacks", {})):
        around += _of_kinds(by_kind, by_kind)
    return _first_unknown(around)


def _first_unknown(around: Iterable[Callable]) -> str | None:
    for each in around:
        known = _is_of(each, STEP_CACHES, *(f"nodes_{name}" for name in STATELESS))
        if not known and not _module(each).startswith(OURS) and not hasattr(each, PROMISE):
            return f"a function of {_module(each)} may keep state from one call to the next"
    return None


def _is_of(function: Callable | type, *files: str) -> bool:
    """Whether ComfyUI itself brings the function, in one of these files; it names those modules by their paths."""
    folder, _, file = _module(function).replace("\\", "/").replace(".", "/").rpartition("/")
    return file in files and folder.rpartition("/")[2] == "comfy_extras"


def _module(function: Callable | type) -> str:
    return function.__module__ or "no module"


def _of_kinds(by_kind: Mapping[str, Mapping[str, list]], kinds: Iterable[str]) -> Iterator[Callable]:
    for kind in kinds:
        for functions in by_kind.get(kind, {}).values():
            yield from functions


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]
