"""Whose code a function is: ComfyUI's, torch's or this pack's; or that of a pack, which may look at each step.

A decorator, a partial and a closure are looked into, and a function is asked for the module whose names it uses:
`__module__` is what `functools.wraps` copies. Owns that. What follows from it is the caller's.
"""

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from .order import OURS

TRUSTED = ("comfy", "torch", "latent_preview")
EXTRAS = "comfy_extras"  # ComfyUI names modules of this folder by their paths
PLAIN = (bool, int, float, str, type(None))


def foreign(value: object) -> str | None:
    """The module of the first function in `value` that a pack brought; None where there is none.

    `value`: a function, a method, or a partial; of anything else that can be called its class decides.
    """
    return next((name for name in _modules(value, set()) if not is_trusted(name)), None)


def foreign_option(value: object) -> str | None:
    """As `foreign`, of an option of a sampler: a plain value has no module, what is no function has its class's."""
    return None if isinstance(value, PLAIN) else foreign(value)


def is_trusted(module: str) -> bool:
    """Whether a module of this name is ComfyUI's, torch's or this pack's."""
    folders = module.replace("\\", "/").replace(".", "/").split("/")
    ours = module == OURS or module.startswith(f"{OURS}.")
    return ours or folders[0] in TRUSTED or folders[-2:-1] == [EXTRAS]


def _modules(value: Any, seen: set[int]) -> Iterator[str]:  # noqa: ANN401
    """Modules of all functions in a value, each looked at once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
        yield from (name for each in inside if callable(each) for name in _modules(each, seen))
    elif isinstance(value, MethodType):
        yield from _modules(value.__func__, seen)
    elif isinstance(value, FunctionType):
        yield str(value.__globals__.get("__name__"))
        inside = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        inside += [vars(value).get("__wrapped__")]
        for each in inside:
            if isinstance(each, FunctionType | MethodType | functools.partial):
                yield from _modules(each, seen)
    elif not inspect.isbuiltin(value):
        yield type(value).__module__


def _is_filled(cell: Any) -> bool:  # noqa: ANN401  types.CellType
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return False
    return True
