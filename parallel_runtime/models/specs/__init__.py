"""Which of ComfyUI's classes can share their tokens over ranks, and how: data, by the class's dotted path.

Knows no ComfyUI and no torch.
"""

from collections.abc import Mapping

from . import audio, images, lightricks, minimax, more_images, pixels, qwen, shapes, two_streams, videos, wan
from .found import found_plan
from .spec import ShardingSpec
from .without import NEEDS_NONE, NOT_SAMPLED, WITHOUT

__all__ = [
    "BETWEEN",
    "NOT_SAMPLED",
    "SPECS",
    "WITHOUT",
    "ShardingSpec",
    "find_spec",
    "not_sampled",
    "spec_of",
    "why_without",
]

SPECS: dict[str, ShardingSpec] = {
    path: spec
    for family in (two_streams, qwen, wan, lightricks, minimax, images, more_images, pixels, shapes, videos, audio)
    for path, spec in family.SPECS.items()
}


# Of classes whose blocks stock nodes put patches between: tokens are whole between all blocks, and cut in each. What a
# patch then does is computed by every rank.
BETWEEN: dict[str, ShardingSpec] = {path: spec for family in (qwen, images) for path, spec in family.BETWEEN.items()}


def spec_of(model_class: type, specs: Mapping[str, ShardingSpec] = SPECS) -> ShardingSpec:
    """The spec of a class, or of the class that it derives from if it changes none of its methods; where people wrote
    none, and no reason is known, the one that was found and kept (found.py).

    Raises ValueError for a class without a spec, with the reason if it is known, and for one that changes what the
    spec was made for.
    """
    own: set[str] = set()
    for base in model_class.__mro__:
        spec = specs.get(_path(base))
        changed = sorted(name for name in own if hasattr(base, name))
        if spec is not None and not changed:
            return spec
        if spec is not None:
            raise ValueError(
                f"{model_class.__name__} has no plan to share its tokens: it changes {changed[0]!r} of "
                f"{base.__name__}; {NEEDS_NONE}"
            )
        if _path(base) in WITHOUT:
            reason, instead = WITHOUT[_path(base)]
            raise ValueError(f"{model_class.__name__} has no plan to share its tokens: {reason}; {instead}")
        own |= {name for name, value in vars(base).items() if callable(value) and not name.startswith("__")}
    if specs is SPECS and (found := found_plan(model_class)) is not None:
        return found
    raise ValueError(f"{model_class.__name__} has no plan to share its tokens; {NEEDS_NONE}")


def find_spec(model_class: type) -> ShardingSpec | None:
    """As `spec_of`; None where that raises."""
    try:
        return spec_of(model_class)
    except ValueError:
        return None


def why_without(model_class: type) -> str:
    """Why a class has no spec."""
    return WITHOUT.get(_path(model_class), ("there is no plan for it", ""))[0]


def not_sampled(model_class: type) -> str:
    """Why no sampler calls a class, and what to use instead; "" for a diffusion model."""
    for base in model_class.__mro__:
        reason, instead = WITHOUT.get(_path(base), ("", ""))
        if instead == NOT_SAMPLED:
            return f"{model_class.__name__}: {reason}; {instead}"
    return ""


def _path(model_class: type) -> str:
    return f"{model_class.__module__}.{model_class.__qualname__}"
