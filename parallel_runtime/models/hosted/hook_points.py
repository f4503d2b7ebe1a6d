"""Where in a model the hooks of a spec go, and what each does there: found once, and checked against the class.

A spec that names a module or an argument which this ComfyUI's class lacks is refused here, with both names.
"""

import fnmatch
import inspect
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from torch import nn

from ..specs.spec import ShardingSpec, Words
from ..specs.words import UNPLANNED, Attention, Every, Word, introduced_by, parse
from .cuts import Change
from .word_handlers import cutter, gatherer

RETURN = "return"
IN_KWARGS = "**"
NOWHERE = 1 << 30  # the position of an argument that is only passed by name
UNNAMED = NOWHERE + 1  # the same, and no forward of the class names it


@dataclass(frozen=True)
class Argument:
    """An argument of a module's forward that is changed. `key`: of one that many modules are given alike, else None."""

    name: str
    position: int
    change: Change
    key: int | None

    @property
    def required(self) -> bool:
        """Whether the module must be given it: only then is it known that it takes it."""
        return self.position == UNNAMED


@dataclass(frozen=True)
class Works:
    """A module that computes where one of its arguments is `among` these, and else returns what it is given."""

    name: str
    position: int
    among: Container[Any]

    def holds(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it computes, given this."""
        return (kwargs[self.name] if self.name in kwargs else args[self.position]) in self.among


@dataclass
class HookPoint:
    """What is done at one method of a module."""

    module: nn.Module
    method: str = "forward"
    arguments: list[Argument] = field(default_factory=list)
    results: list[Change] = field(default_factory=list)
    attention: Attention | None = None  # while the module runs; None: as around it
    inside: Mapping[str, Attention] = field(default_factory=dict)  # while a module in it runs, by its name in the block
    sites: list[tuple[nn.Module, str, str]] = field(default_factory=list)  # those modules, the method, and the name
    works: Works | None = None  # else the module hands on what it gets


def find_hook_points(model: nn.Module, spec: ShardingSpec) -> list[HookPoint]:
    """Every module that a spec has something for. Raises ValueError for a spec that is not of this class."""
    return _Places(model).fill(spec)


class _Places:
    def __init__(self, model: nn.Module) -> None:
        self.title = type(model).__name__
        self.modules = dict(model.named_modules())
        self.points: dict[str, HookPoint] = {}

    def fill(self, spec: ShardingSpec) -> list[HookPoint]:
        for pattern, name in spec.unless.items():
            self._refuse_where_set(pattern, name)
        for blocks in spec.attention:
            self._attention(blocks, spec.attention_of(blocks), spec.methods_of(blocks))
        table = next((each for each in spec.gathers if all(self._find(path) for path in each)), spec.gathers[0])
        self._cuts(spec.cut, {path for pattern in table for path in self._matching(pattern)})
        for pattern, words in spec.whole.items():
            for path in self._matching(pattern):
                self._whole(path, words)
                if pattern in spec.works_where:
                    self._at(path).works = self._works(path, *spec.works_where[pattern])
        for pattern, text in table.items():
            for path in self._matching(pattern):
                self._at(path).results.append(gatherer(parse(text)))
        return list(self.points.values())

    def _at(self, path: str) -> HookPoint:
        path, method = _parted(path)
        return self.points.setdefault(f"{path}:{method}", HookPoint(self.modules[path], method))

    def _attention(self, blocks: str, said: Mapping[str, Attention], methods: Collection[str]) -> None:
        """Blocks themselves, and modules in them."""
        inside = {name: attention for name, attention in said.items() if name}
        paths = self._matching(f"{blocks}.*")
        for path in paths:
            here = {
                name: self._windowed(f"{path}.{name}", attention)
                for name, attention in inside.items()
                if self._has(f"{path}.{name}")
            }
            named = {name: _parted(f"{path}.{name}") for name in here}
            sites = [(self.modules[module], method, name) for name, (module, method) in named.items()]
            for method in methods:
                point = self._at(f"{path}:{method}")
                point.attention, point.inside, point.sites = said.get("", UNPLANNED), here, sites
        for name in inside if paths else ():
            if not any(self._has(f"{path}.{name}") for path in paths):
                raise self._missing(f"{blocks}.*.{name}")

    def _windowed(self, path: str, attention: Attention) -> Attention:
        """With the window that the module says."""
        if not attention.within:
            return attention
        return replace(attention, window=self._attribute(path, attention.within))

    def _refuse_where_set(self, pattern: str, name: str) -> None:
        for path in self._matching(pattern):
            if self._attribute(path, name):
                raise ValueError(
                    f"{self.title}: {path} has {name}, which needs all tokens, and its plan is for models without; "
                    "use cfg parallel, data parallel or sharded weights"
                )

    def _attribute(self, path: str, name: str) -> Any:  # noqa: ANN401
        """What a module says of itself. Raises ValueError where it has no such attribute."""
        try:
            return getattr(self.modules[_parted(path)[0]], name)
        except AttributeError:
            raise ValueError(
                f"{self.title}: {path} of this ComfyUI has no attribute {name!r}, which the plan names; "
                "use a ComfyUI that the plan was made for"
            ) from None

    def _cuts(self, cut: Mapping[str, Words], gathered: Collection[str]) -> None:
        """What the modules take. One whose output becomes whole is given tensors that no other module is given, and so
        is a layer, whose arguments have a place alone."""
        said: dict[str, dict[str, tuple[Word, int | None]]] = {}
        keys = count()
        for pattern, words in cut.items():
            paths = self._matching(pattern)
            for name, text in words.items():
                word = parse(text)
                # a number tells nothing of where it comes from, and may be another in the next block
                alike = len(paths) > 1 and not name.startswith("#") and not isinstance(word, Every)
                key = next(keys) if alike else None
                for path in paths:
                    said.setdefault(path, {})[name] = word, None if path in gathered else key
        for path, parsed in said.items():
            point = self._at(path)
            # a stream's length first, then what is cut by it
            for name, (word, key) in sorted(parsed.items(), key=lambda item: not introduced_by(item[1][0])):
                if name == RETURN:
                    point.results.append(cutter(word))
                else:
                    point.arguments.append(Argument(_bare(name), self._position(path, name), cutter(word), key))

    def _whole(self, path: str, words: Words) -> None:
        point = self._at(path)
        for name, text in words.items():
            word = parse(text)
            if name == RETURN:
                point.results.append(cutter(word))
            else:
                point.arguments.append(Argument(_bare(name), self._position(path, name), gatherer(word), None))

    def _works(self, path: str, name: str, among: str) -> Works:
        """The argument and the module's table that say whether it does anything."""
        return Works(name, self._position(path, name), self._attribute(path, among))

    def _position(self, path: str, name: str) -> int:
        """Where an argument of a module's method stands. Raises ValueError if no such method of its class has it."""
        if name.startswith("#"):
            return int(name[1:])
        module, method = _parted(path)
        kind = type(self.modules[module])
        if name.startswith(IN_KWARGS):
            taken = inspect.signature(getattr(kind, method)).parameters.values()
            if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken):
                return UNNAMED
            raise self._no_argument(path, name)
        for base in kind.__mro__:
            forward = vars(base).get(method)
            parameters = list(inspect.signature(forward).parameters.values())[1:] if forward else []
            names = [each.name for each in parameters]
            if name in names:
                by_place = parameters[names.index(name)].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                own = forward is getattr(kind, method)  # and no other one that may be given more hands it on
                return names.index(name) if by_place and own else NOWHERE
            if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters) and forward:
                break
        raise self._no_argument(path, name)

    def _has(self, path: str) -> bool:
        """Whether the model has this module, and the module this method."""
        module, method = _parted(path)
        return callable(getattr(self.modules.get(module), method, None))

    def _matching(self, pattern: str) -> list[str]:
        """Paths of a pattern; none for a list that is there and empty. Raises ValueError for what is not there."""
        module, colon, method = pattern.partition(":")
        if colon:
            found = [f"{path}:{method}" for path in self._matching(module)]
            missing = [path for path in found if not self._has(path)]
            if missing:
                raise self._missing(missing[0])
            return found
        found, parent = self._find(pattern), pattern.rpartition(".")[0]
        if not found and not (parent and self._find(parent)):
            raise self._missing(pattern)
        return found

    def _find(self, pattern: str) -> list[str]:
        pattern, _ = _parted(pattern)
        parent, _, last = pattern.rpartition(".")
        if last in ("0", "-1") and parent in self.modules:
            children = [name for name, _ in self.modules[parent].named_children()]
            return [f"{parent}.{children[int(last)]}".removeprefix(".")] if children else []
        depth = pattern.count(".")
        return [path for path in self.modules if path.count(".") == depth and fnmatch.fnmatchcase(path, pattern)]

    def _no_argument(self, path: str, name: str) -> ValueError:
        return ValueError(
            f"{self.title}: {path} of this ComfyUI takes no argument {name!r}, which the plan names; "
            "use a ComfyUI that the plan was made for"
        )

    def _missing(self, path: str) -> ValueError:
        kind = "method" if ":" in path else "module"
        return ValueError(
            f"{self.title} of this ComfyUI has no {kind} {path!r}, which the plan names; "
            "use a ComfyUI that the plan was made for"
        )


def _parted(path: str) -> tuple[str, str]:
    """A module's path, and the method that is named behind a colon."""
    module, _, method = path.partition(":")
    return module, method or "forward"


def _bare(name: str) -> str:
    return name.removeprefix(IN_KWARGS)
