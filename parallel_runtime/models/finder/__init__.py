"""Finds the plan of a model that has no written one, by looking at its calls.

    seen = look(model, call, tap)         # one call, at one size
    for candidate in plans([seen, ...]):  # those that explain all calls, the one that cuts most first
        ...                               # the first that is proven counts (proof.py)

`call()` calls the model; `tap(attend)` hands every attention call inside to a function. Imports no ComfyUI and reads no
class's source. What is not explained raises NotFoundError, which names the module.
"""

from .blocks import NotFoundError
from .compose import Candidate
from .look import LookedAt, look, plans

__all__ = ["Candidate", "NotFoundError", "LookedAt", "look", "plans"]
