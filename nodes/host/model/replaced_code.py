"""Functions that packs put in the place of ComfyUI's own, in the files and classes that a transformer is made of.

Ranks have ComfyUI's, so such a function would be without effect in them. What stands there is noted when the
transformer is made. Owns that. Does not own what of it is refused, nor the transformer's modules (changed_modules.py).
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ..contract.foreign_code import foreign
from ..contract.writers import Code, code_of

COMPUTES = "comfy.ldm."  # the package whose files and classes compute
_IMPORTED: set[Code] = set()


def note_imported() -> None:
    """Called before the first prompt: functions of packs that stand there were put there as the packs were imported."""
    modules = [each for name, each in list(sys.modules.items()) if name.startswith(COMPUTES)]
    files = [vars(each) for each in modules if isinstance(each, ModuleType)]
    kinds = [kind for names in files for kind in list(names.values()) if isinstance(kind, type)]
    for names in (*files, *(vars(kind) for kind in kinds if kind.__module__.startswith(COMPUTES))):
        functions = [each for each in list(names.values()) if isinstance(each, FunctionType)]
        _IMPORTED.update(code_of(each) for each in functions if foreign(each))


def is_imported(function: object) -> bool:
    """Whether a function stood there before any node ran: it is there for all MODELs, and no node of a graph put it."""
    return code_of(function) in _IMPORTED


class CodeAsMade:
    """The functions of ComfyUI's files and classes that a transformer computes by, as they were when it was made."""

    def __init__(self, transformer: nn.Module) -> None:
        files = {name: vars(sys.modules[name]) for name in _files(transformer)}
        self._classes = _classes(transformer)
        self._made = {name: (names, _functions(names)) for name, names in files.items()}
        self._made |= {name: (vars(kind), _methods(kind)) for name, kind in self._classes.items()}

    def replaced(self) -> Iterator[tuple[str, object]]:
        """Functions of packs that stand in the place of those that were there, with where."""
        for place, (now, functions) in self._made.items():
            for name, function in functions.items():
                if now.get(name, function) is not function and foreign(now[name]):
                    yield f"{place}.{name}", now[name]

    def foreign(self) -> Iterator[tuple[str, object]]:
        """Functions of packs that stand there now, what files import of others among them, with where."""
        return self._foreign_in(self._made)

    def replaced_before(self) -> list[str]:
        """Where a class had a function of a pack already. Of files this is unknown: they import others' functions."""
        return [where for where, _ in self._foreign_in(self._classes)]

    def _foreign_in(self, places: Iterable[str]) -> Iterator[tuple[str, object]]:
        for place in places:
            now, functions = self._made[place]
            for name in functions:
                if isinstance(each := now.get(name), FunctionType) and foreign(each):
                    yield f"{place}.{name}", each


def _files(transformer: nn.Module) -> list[str]:
    """The files of its classes, and those in which the functions that stand in such a file are defined: Flux attends by
    a function of `comfy.ldm.flux.math`, which has no class of a module."""
    found: set[str] = set()
    due = {type(module).__module__ for module in transformer.modules()}
    while due := {name for name in due - found if name.startswith(COMPUTES) and name in sys.modules}:
        found |= due
        functions = [each for name in due for each in _functions(vars(sys.modules[name])).values()]
        due = {str(each.__module__) for each in functions if hasattr(each, "__module__")}
    return sorted(found)


def _classes(transformer: nn.Module) -> dict[str, type]:
    """Its modules' classes and those that they are derived from, by where they are."""
    kinds = {base for module in transformer.modules() for base in type(module).__mro__}
    found = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
    return {place: found[place] for place in sorted(found) if place.startswith(COMPUTES)}


def _methods(kind: type) -> dict[str, object]:
    """The functions of a class and those that it has of ComfyUI's classes before it, which it may be given itself."""
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("comfy.")]
    return {name: each for base in bases for name, each in _functions(vars(base)).items()}


def _functions(names: Mapping[str, Any]) -> dict[str, object]:
    """What code can call by its name, the attention function of a file and the `forward` of a class among it."""
    return {name: each for name, each in names.items() if callable(each) and not isinstance(each, type)}
