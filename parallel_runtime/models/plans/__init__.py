"""Which of ComfyUI's classes can share their tokens over ranks, and how: data, by the class's dotted path.

Knows no ComfyUI and no torch.
"""

from collections.abc import Mapping

from . import audio, images, lightricks, minimax, more_images, pixels, qwen, shapes, two_streams, videos, wan
from .plan import Plan

__all__ = ["BETWEEN", "PLANS", "Plan", "find_plan", "plan_for"]

WITHOUT_PLAN = "use cfg parallel, data parallel or sharded weights, which need none"

PLANS: dict[str, Plan] = {
    path: plan
    for family in (two_streams, qwen, wan, lightricks, minimax, images, more_images, pixels, shapes, videos, audio)
    for path, plan in family.PLANS.items()
}


# Of classes whose blocks stock nodes put patches between: tokens are whole between all blocks, and cut in each. What a
# patch then does is computed by every rank.
BETWEEN: dict[str, Plan] = {path: plan for family in (qwen, images) for path, plan in family.BETWEEN.items()}


def plan_for(model_class: type, plans: Mapping[str, Plan] = PLANS) -> Plan:
    """The plan of a class, or of the class that it derives from if it changes none of its methods.

    Raises ValueError for a class without a plan, and for one that changes what the plan was made for.
    """
    own: set[str] = set()
    for base in model_class.__mro__:
        plan = plans.get(f"{base.__module__}.{base.__qualname__}")
        changed = sorted(name for name in own if hasattr(base, name))
        if plan is not None and not changed:
            return plan
        if plan is not None:
            raise ValueError(
                f"{model_class.__name__} has no plan to share its tokens: it changes {changed[0]!r} of "
                f"{base.__name__}; {WITHOUT_PLAN}"
            )
        own |= {name for name, value in vars(base).items() if callable(value) and not name.startswith("__")}
    raise ValueError(f"{model_class.__name__} has no plan to share its tokens; {WITHOUT_PLAN}")


def find_plan(model_class: type) -> Plan | None:
    """As `plan_for`; None where that raises."""
    try:
        return plan_for(model_class)
    except ValueError:
        return None
