"""Functions of stock nodes that a rank has itself, so that no code travels: a block skipped, an attention function.

A call's transformer_options name them (`SKIPPED`, `ATTENTION`). A block is skipped as Skip Layer Guidance does: it is
called and hands back what it was given, so tokens are cut and gathered as ever. An attention function is one that
ComfyUI registers under its name, for the heads that a rank attends with. Owns both. Does not own which functions of
the host's process these are (nodes/host/model/stock_functions.py).
"""

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from ..block_chain import SKIP, Forward, chain_at
from ..specs import find_spec, why_without
from ..specs.spec import ShardingSpec
from .stage import HandedOn

SKIPPED = "skipped_blocks"  # [[kind, number], ...] as ComfyUI numbers a model's blocks
ATTENTION = "attention_function"  # the name that ComfyUI registers it under
OVERRIDE = "optimized_attention_override"  # ComfyUI's key for a function in the place of attention


def why_not_skipped(kind: type[nn.Module]) -> str:
    """Why ranks cannot skip blocks of a class by their numbers; "" where they can."""
    spec = find_spec(kind)
    return why_without(kind) if spec is None else spec.unchained


class SkippedBlocks:
    """The blocks of a model of which `why_not_skipped` says nothing; each can hand back what it is given."""

    def __init__(self, model: nn.Module, spec: ShardingSpec) -> None:
        self._skipping = False
        self._spec, modules = spec, dict(model.named_modules())
        self._replaced = {
            (kind, number): (block, names)
            for kind, (path, names) in spec.replaced.items()
            for number, block in enumerate(modules[path].children())
        }
        for path in (path for path in spec.attention if path in modules):
            for block in modules[path].children():
                handed = HandedOn(spec.handed_on(path), block)
                chain_at(block).put(SKIP, partial(partial, self._placed, handed))

    def replacing(self, blocks: Iterable[tuple[str, int]]) -> dict[str, dict[tuple[str, int], Forward]]:
        """What ComfyUI's `patches_replace` is for a call that skips these blocks."""
        return {"dit": {place: partial(self._skip, place) for place in blocks}}

    def _skip(self, place: tuple[str, int], args: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:  # noqa: ANN401
        self._skipping = True
        try:
            if place in self._replaced:
                return self._skip_replaced(place, args)
            return extra["original_block"](args)
        finally:
            self._skipping = False

    def _skip_replaced(self, place: tuple[str, int], args: Mapping[str, Any]) -> dict[str, Any]:
        """As stock's function: a block's arguments are its result."""
        block, names = self._replaced[place]
        path, _ = self._spec.replaced[place[0]]
        handed = self._spec.handed_on(path)
        (name,) = (name for name in args if names.get(name, name) == handed)
        return {**args, name: block(**{names.get(name, name): value for name, value in args.items()})}

    def _placed(self, handed: HandedOn, inner: Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return handed.read(args, kwargs) if self._skipping else inner(*args, **kwargs)


def attention_named(name: str) -> Forward:
    """What stands at `OVERRIDE` for ComfyUI's function of this name. Raises `ValueError` where ComfyUI has none."""
    function = sys.modules["comfy.ldm.modules.attention"].REGISTERED_ATTENTION_FUNCTIONS.get(name)
    if function is None:
        raise ValueError(
            f"this rank's ComfyUI has no attention function {name!r}; remove the node that chooses it, or start "
            "ComfyUI with the option that brings it"
        )

    def override(_: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return function(*args, **kwargs)

    override.__name__ = name
    if (in_containers := getattr(function, "container_function", None)) is not None:
        vars(override)["container_function"] = in_containers
    return override


def overriding(options: Mapping[str, Any]) -> str:
    """The name of the function that attends in the place of ComfyUI's with the options of its call; "" for none."""
    function = (options.get("transformer_options") or {}).get(OVERRIDE)
    return "" if function is None else str(function.__name__)
