"""Which of ComfyUI's classes can share their tokens over ranks, and how: data, by the class's dotted path.

Knows no ComfyUI and no torch.
"""

from collections.abc import Mapping

from . import audio, images, lightricks, minimax, more_images, pixels, qwen, shapes, two_streams, videos, wan
from .found import Found, found_of, path_of
from .spec import ShardingSpec
from .without import NEEDS_NONE, NOT_SAMPLED, WITHOUT

__all__ = [
    "BETWEEN",
    "NOT_SAMPLED",
    "SPECS",
    "WITHOUT",
    "Found",
    "ShardingSpec",
    "find_spec",
    "may_be_found",
    "not_sampled",
    "spec_of",
    "why_without",
]

SPECS: dict[str, ShardingSpec] = {
    path: spec
    for family in (two_streams, qwen, wan, lightricks, minimax, images, more_images, pixels, shapes, videos, audio)
    for path, spec in family.SPECS.items()
}


# Of classes whose blocks stock nodes put patches between that need all tokens: tokens are whole between all blocks, and
# cut in each; between.py has the same for patches that act behind some. What a patch does is computed by every rank.
BETWEEN: dict[str, ShardingSpec] = {path: spec for family in (qwen, images) for path, spec in family.BETWEEN.items()}


def spec_of(model: object, specs: Mapping[str, ShardingSpec] = SPECS, *, made_as: type | None = None) -> ShardingSpec:
    """The spec of a model or of a class: what people wrote for it, or for the class that it derives from if it changes
    none of its methods; else what was found and given to the model (found.py). `made_as`: the class that a model was
    made as, where it may have been given another one.

    Raises ValueError for a class without a spec, with the reason if it is known, and for one that changes what the
    spec was made for.
    """
    model_class, found = (model, None) if isinstance(model, type) else (made_as or type(model), found_of(model))
    if specs is not SPECS or found is None or not may_be_found(model_class):
        return _written(model_class, specs)
    if found.spec is None:
        raise ValueError(f"{model_class.__name__} has no plan to share its tokens: {found.why}; {NEEDS_NONE}")
    return found.spec


def may_be_found(model_class: type) -> bool:
    """Whether a plan of a class can be looked for: people wrote none, and no reason is known why there is none."""
    if any(path_of(base) in WITHOUT for base in model_class.__mro__):
        return False
    try:
        _written(model_class, SPECS)
    except ValueError:
        return True
    return False


def _written(model_class: type, specs: Mapping[str, ShardingSpec]) -> ShardingSpec:
    own: set[str] = set()
    for base in model_class.__mro__:
        spec = specs.get(path_of(base))
        changed = sorted(name for name in own if hasattr(base, name))
        if spec is not None and not changed:
            return spec
        if spec is not None:
            raise ValueError(
                f"{model_class.__name__} has no plan to share its tokens: it changes {changed[0]!r} of "
                f"{base.__name__}; {NEEDS_NONE}"
            )
        if path_of(base) in WITHOUT:
            reason, instead = WITHOUT[path_of(base)]
            raise ValueError(f"{model_class.__name__} has no plan to share its tokens: {reason}; {instead}")
        own |= {name for name, value in vars(base).items() if callable(value) and not name.startswith("__")}
    raise ValueError(f"{model_class.__name__} has no plan to share its tokens; {NEEDS_NONE}")


def find_spec(model: object) -> ShardingSpec | None:
    """As `spec_of`; None where that raises."""
    try:
        return spec_of(model)
    except ValueError:
        return None


def why_without(model: object) -> str:
    """Why a model, or a class, has no spec."""
    model_class, found = (model, None) if isinstance(model, type) else (type(model), found_of(model))
    looked = "there is no plan for it" if found is None else found.why
    return WITHOUT.get(path_of(model_class), (looked, ""))[0]


def not_sampled(model_class: type) -> str:
    """Why no sampler calls a class, and what to use instead; "" for a diffusion model."""
    for base in model_class.__mro__:
        reason, instead = WITHOUT.get(path_of(base), ("", ""))
        if instead == NOT_SAMPLED:
            return f"{model_class.__name__}: {reason}; {instead}"
    return ""
