"""Functions that stock nodes put inside of a model and that ranks have themselves: a block skipped, attention by name.

An allow-list: a function is known by the stock file and by the name that it is defined under, and travels as a name and
numbers (parallel_runtime/models/hosted/stock_functions.py). Owns that list. What is refused is refusals.py's.
"""

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ....parallel_runtime.models.hosted.stock_functions import ATTENTION, OVERRIDE, SKIPPED
from ..contract.comfyui import comfy
from ..contract.writers import around

# The function of Skip Layer Guidance's nodes: a block's arguments are its result.
SKIPS = ("nodes_slg.py", ".<locals>.skip")
# What `ModelPatcher.set_model_optimized_attention` makes of a function, and what it calls the function.
OVERRIDES, OVERRIDING = "ModelPatcher.set_model_optimized_attention.<locals>.", "optimized_attention"


def is_skip(function: object) -> bool:
    """Whether this is stock's function by which a block is skipped."""
    if not inspect.isfunction(function) or not function.__qualname__.endswith(SKIPS[1]):
        return False
    folder, file = os.path.split(function.__code__.co_filename)
    return file == SKIPS[0] and os.path.basename(folder) == "comfy_extras"


def skipped(options: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The kinds and numbers of the blocks that a call's options have stock's function skip."""
    replaced = options.get("patches_replace", {}).get("dit", {})
    return [(kind, number) for (kind, number, *more), function in replaced.items() if not more and is_skip(function)]


def registered_name(function: object) -> str:
    """The name under which ComfyUI itself registers an attention function; "" for any other."""
    attention = comfy.ldm.modules.attention
    if getattr(function, "__module__", None) != attention.__name__:
        return ""
    return next((name for name, each in attention.REGISTERED_ATTENTION_FUNCTIONS.items() if each is function), "")


def named_override(override: object) -> str:
    """The name of the registered function that ComfyUI's own override calls; "" for any other override."""
    if not inspect.isfunction(override) or not override.__qualname__.startswith(OVERRIDES):
        return ""
    return registered_name(around(override).get(OVERRIDING))


def sent(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a call's transformer_options tell the ranks of such functions."""
    if blocks := skipped(options):
        yield SKIPPED, [list(each) for each in blocks]
    if name := named_override(options.get(OVERRIDE)):
        yield ATTENTION, name
