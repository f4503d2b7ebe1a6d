"""Functions that a class makes in each call of the model and gives to its blocks, as HiDream-O1 and Qwen-Image 2.1 do.

Another call has another function of the same code. What tells two apart is what they hold: the names that they find
around them, and their defaults. So a graph of a block is made for that, as for the block's other arguments.

Owns what such a function holds. Does not own what of it a graph is made for (block_graphs.py, compiled.py).
"""

from types import CellType, FunctionType
from typing import Any

Held = tuple[dict[str, Any], tuple[Any, ...] | None, dict[str, Any] | None]


def held_by(function: FunctionType) -> Held | None:
    """The values that a function finds around it, by name, and its defaults; None where one of them is a function, or
    where something is not known: a name without a value yet, or attributes."""
    cells = function.__closure__ or ()
    if vars(function) or CellType() in cells:
        return None
    held = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    return None if any(map(callable, held.values())) else (held, function.__defaults__, function.__kwdefaults__)


def holding(function: FunctionType, held: Held) -> FunctionType:
    """A function of the same code that holds these."""
    values, defaults, named = held
    cells = tuple(map(CellType, values.values()))
    other = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    other.__kwdefaults__ = named
    return other
