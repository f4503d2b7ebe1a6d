"""Whether a ComfyUI has what this pack relies on (contract.py), in the process that has imported it.

Owns the look and its words. Imports what a line names and is not imported yet; changes nothing.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from ...proof import ProofStore
from .contract import FEATURES, LINES, NEWEST_TESTED, OLDEST, Line

UPDATE_PACK = "update the pack"
UPDATE_COMFYUI = "update ComfyUI (git pull, then pip install -r requirements.txt, in its folder) and start it again"


class MissingInComfyUIError(ValueError):
    """ComfyUI lacks something that is needed now; the text is the sentence of the feature that is off."""


class _Nothing:
    """What is found where there is nothing: any value may be there, None too."""


NOTHING = _Nothing()


def look(lines: Sequence[Line] = LINES) -> list[Line]:
    """The lines that this process's ComfyUI does not fulfil, in their order."""
    return [line for line in lines if not _fulfilled(line)]


def off_by_feature(missing: Iterable[Line], version: str | None) -> dict[str, str]:
    """The features that are off, each with the sentence that says why; `version` as ComfyUI writes it."""
    by_feature: dict[str, list[Line]] = {}
    for line in missing:
        by_feature.setdefault(line.feature, []).append(line)
    return {name: sentence(name, by_feature[name], version) for name in FEATURES if name in by_feature}


def sentence(feature: str, missing: Sequence[Line], version: str | None) -> str:
    """What the user is told, such as ``ComfyUI 0.47 has no `X`: the loop in the workers is off (...); update the
    pack``."""
    first, about, version = missing[0], FEATURES[feature], version or "without a version"
    named = f"{first.name}.{first.attribute}" if first.attribute else first.name
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    remedy = UPDATE_COMFYUI if is_older(version) else UPDATE_PACK
    there: Any = find(first.name)
    option = first.attribute if isinstance(there, FunctionType) else ""
    if there is not NOTHING and (first.arguments or option):
        lacks = option or ", ".join(each for each in first.arguments if not _takes(there, [each]))
        named = first.name
        return (
            f"ComfyUI {version} has a `{named}` that takes no {lacks}{more}: {about.title} is off, {about.instead}; "
            f"{remedy}"
        )
    return f"ComfyUI {version} has no `{named}`{more}: {about.title} is off, {about.instead}; {remedy}"


def numbers(version: str | None) -> tuple[int, ...] | None:
    """A version as numbers; None for one without any, such as "nightly"."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version or "0.0")
    return None if found is None else tuple(int(number or 0) for number in found.groups())


def is_older(version: str | None) -> bool:
    """Whether it is older than what the pack needs; a version without numbers is given the chance."""
    found = numbers(version)
    return found is not None and found < OLDEST


def newer_than_tested(version: str | None, store: ProofStore) -> str:
    """What is said of a ComfyUI that is newer than the newest tested, with what `store` says is proven there; "" for
    all others."""
    found = numbers(version)
    if version is None or found is None or found[:2] <= NEWEST_TESTED[:2]:
        return ""
    newest, counts = ".".join(map(str, NEWEST_TESTED)), store.counted(version)
    known = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none so far"
    return (
        f"ComfyUI {version} is newer than {newest}, the newest that this version of the pack was tested with; "
        f"plans are proven before their first step, kinds of calls there: {known}"
    )


def find(name: str) -> Any:  # noqa: ANN401  whatever ComfyUI has there
    """What ComfyUI has under a full name; `NOTHING` where it has none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = _module(".".join(parts[:length]))
        if module is None:
            continue
        found: Any = module
        for part in parts[length:]:
            found = _attribute(found, part)
            if found is NOTHING:
                break
        if found is not NOTHING:
            return found
    return NOTHING


def _attribute(owner: object, name: str) -> object:
    """`NOTHING` too where looking raises, as a module's own `__getattr__` may that imports what is not installed."""
    try:
        return getattr(owner, name, NOTHING)
    except Exception:  # noqa: BLE001  any code of ComfyUI's
        return NOTHING


def _module(path: str) -> object | None:
    """The module, imported where it is not; None where there is none of this name, or it cannot be imported."""
    if path in sys.modules:
        return sys.modules[path]
    if "." in path and _attribute(_module(path.rpartition(".")[0]), "__path__") is NOTHING:
        return None  # an attribute of a module, not a part of a package
    try:
        return importlib.import_module(path)
    except Exception:  # noqa: BLE001  any code of ComfyUI's: what cannot be looked at is missing
        return None


def _fulfilled(line: Line) -> bool:
    found = find(line.name)
    if found is NOTHING:
        return False
    if line.attribute:
        return any(line.attribute in names for names in _names_in(found))
    return not line.arguments or _takes(found, line.arguments)


def _takes(function: Callable[..., object], arguments: Sequence[str]) -> bool:
    """Whether a function, or a class when it is called, takes these arguments by name."""
    parameters = _parameters(function)
    if parameters is None:
        return True
    return set(arguments) <= parameters.keys() or inspect.Parameter.VAR_KEYWORD in parameters.values()


def _parameters(function: Callable[..., object]) -> Mapping[str, object] | None:
    """The kind of each parameter by its name; None for a function that does not say, {} for one not to be looked at."""
    try:
        function = vars(function).get("__init__", function) if isinstance(function, type) else function
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None:
            return {name: each.kind for name, each in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):
        return None
    except Exception:  # noqa: BLE001  any code of ComfyUI's
        return {}
    kind, count = inspect.Parameter, code.co_argcount + code.co_kwonlyargcount  # no signature: the look has to be quick
    found: dict[str, object] = dict.fromkeys(code.co_varnames[:count], kind.POSITIONAL_OR_KEYWORD)
    for flag, which in ((inspect.CO_VARARGS, kind.VAR_POSITIONAL), (inspect.CO_VARKEYWORDS, kind.VAR_KEYWORD)):
        if code.co_flags & flag:
            found[code.co_varnames[count]], count = which, count + 1
    return found


def _names_in(found: object) -> Iterator[Sequence[str]]:
    """What a class and its bases have, and what the code of their methods names; the options that a function knows."""
    if isinstance(found, FunctionType):
        code = inspect.unwrap(found).__code__
        yield code.co_varnames
        yield from (each if isinstance(each, tuple) else (each,) for each in code.co_consts)
    for base in found.__mro__[:-1] if isinstance(found, type) else ():
        yield list(vars(base))
        for value in vars(base).values():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                yield from _codes(function.__code__)


def _codes(code: CodeType) -> Iterator[Sequence[str]]:
    yield code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
