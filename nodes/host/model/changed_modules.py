"""What nodes change on a MODEL's transformer by hand: its class, methods, modules and hooks.

The transformer here computes nothing, so such a change would do nothing, or compute with weights that are not here.
What the transformer is made of is noted once, when it is made. It is looked at before a run, with all that is inside of
it, and before each call, from the outside: many packs change a method for the time of a call, or a function in the
files of its classes. Where code of packs stands around a call, all that is inside is looked at as it is sent, which
takes some 4 ms for the 955 modules of Flux. On the transformer of a stock loader, which is to be ours, all code of
packs is such a change.
Owns that. Does not own which node a piece of code belongs to (writers.py).
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..contract.comfyui import ModelPatcher, comfy
from ..contract.foreign_code import foreign, is_trusted
from ..contract.refusals import refuse_by
from ..contract.writers import around, changers_of_models, executing_node, is_of_a_node, values_in, writers_of

log = logging.getLogger(__name__)
ROOT = "diffusion_model"
NOT_ASKED = (ModelPatcher, comfy.model_base.BaseModel, torch.Tensor, type, ModuleType, str, int, float)
REACH = 5  # of references: a function, what it has around it, a patch of unittest.mock, its getter, the module
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What of a MODEL's options runs around its calls, and what of its transformer_options, of whatever kind.
AROUND_CALLS = ("model_function_wrapper", "sampler_calc_cond_batch_function")
AROUND = ("wrappers", "callbacks")


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A module as it was made: its class, the methods that it has itself, its modules and the numbers of its hooks."""

    kind: type
    methods: dict[str, object]
    children: dict[str, nn.Module | None]
    hooks: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Change:
    """`what` a node did to `module`, in words that go on about the node; `value` is its code."""

    what: str
    value: object
    module: nn.Module
    made: _Made

    def take_back(self) -> None:
        """Have the module as it was made."""
        self.module.__class__ = self.made.kind
        for name in set(_methods(self.module)) - set(self.made.methods):
            del vars(self.module)[name]
        vars(self.module).update(self.made.methods)
        vars(self.module)["_modules"].update(self.made.children)
        for hooks in HOOKS:
            for number in set(vars(self.module)[hooks]) - self.made.hooks:
                del vars(self.module)[hooks][number]


class AsMade:
    """What a transformer and the modules in it were made as. Refers to no module that has it as an attribute."""

    def __init__(self, transformer: nn.Module) -> None:
        self._made = {path: _look_at(module) for path, module in transformer.named_modules()}
        files = {type(module).__module__ for module in transformer.modules()}
        self._functions = {name: _functions(name) for name in sorted(files) if name.startswith("comfy.ldm.")}
        self.told: set[str] = set()

    def replaced(self) -> Iterator[tuple[str, object]]:
        """Functions of packs that stand in the place of those which the files of its classes had, with where."""
        for file, functions in self._functions.items():
            now = vars(sys.modules[file])
            for name, function in functions.items():
                if now.get(name, function) is not function and foreign(now[name]):
                    yield f"it replaces {file}.{name}", now[name]

    def changes(self, transformer: nn.Module, *, deep: bool) -> Iterator[Change]:
        """What is no longer as it was made; `deep`: of the modules inside as well. None of those that are new."""
        modules = transformer.named_modules() if deep else [("", transformer)]
        for path, module in modules:
            if (made := self._made.get(path)) is not None:
                yield from _changes(path, module, made)


def note_as_made(transformer: nn.Module) -> None:
    """Have each call of the transformer look at it first."""
    transformer.register_forward_pre_hook(_before_call)
    transformer.as_made = AsMade(transformer)


def _before_call(transformer: nn.Module, _: object) -> None:
    refuse_changed(transformer, deep=False)


def refuse_changed(transformer: nn.Module, *, deep: bool) -> None:
    """Raise `ValueError` for a change of a node that is in the graph. What another graph left behind is taken back."""
    as_made: Any = transformer.as_made
    for change in list(as_made.changes(transformer, deep=deep)):
        _refuse_of_graph(change.what, change.value)
        change.take_back()
        log.warning("a node that is no longer in the graph had changed the model (%s); taken back", change.what)
    for what, value in as_made.replaced():
        # of no other node of the graph: unlike a change of the model, this cannot be taken back
        if (nodes := writers_of(value)) or executing_node() is None:
            raise refuse_by(nodes, what)
        if what not in as_made.told:
            log.warning("a node that is no longer in the graph had changed ComfyUI (%s); ranks do without", what)
        as_made.told.add(what)


def have_packs_around(options: Mapping[str, Any], names: Iterable[str] = AROUND) -> bool:
    """Whether code of packs stands around a call that has these options: it may change modules for its time."""
    return any(foreign(each) for name in names for each in values_in(options.get(name)))


def refuse_changed_stock(transformer: nn.Module, fresh: nn.Module) -> None:
    """Raise `ValueError` for what a node of the graph changed by hand on the transformer of a stock loader, which ranks
    would do without. `fresh`: ComfyUI's transformer of the same file, as no node has seen it."""
    refuse_on_stock(_of_packs(transformer, {path: type(module) for path, module in fresh.named_modules()}))


def refuse_on_stock(changes: Iterable[tuple[str, object]]) -> None:
    """Raise `ValueError` for a change of a stock loader's model by a node of the graph; what another graph left behind
    the log tells. Each is what was done, in words that go on about the node, and its code."""
    for what, value in changes:
        _refuse_of_graph(what, value)
        log.warning("a node that is no longer in the graph had changed the stock model (%s); ranks do without", what)


def refuse_held(values: Iterable[object], transformer: nn.Module) -> None:
    """Raise `ValueError` for one of the values that has a module of a stock loader's transformer, as a function around
    it or an object as its attribute: what it changes there for the time of a call, ranks would do without."""
    modules = {id(module) for module in transformer.modules()}
    for value in values:
        if any(id(module) in modules for held in _modules_of(value) for module in held.modules()):
            raise refuse_by(
                writers_of(value) or changers_of_models(), "it keeps the transformer of the stock loader to change it"
            )


def _modules_of(value: object) -> Iterator[nn.Module]:
    """The modules that a value has around it or in it. Not by a MODEL: what has one may read other things of it."""
    seen: dict[int, object] = {}  # alive, as their ids count
    due = [value]
    for _ in range(REACH):
        due = [each for each in due if id(each) not in seen and not isinstance(each, NOT_ASKED)]
        seen |= {id(each): each for each in due}
        yield from (each for each in due if isinstance(each, nn.Module))
        due = [inside for each in due if not isinstance(each, nn.Module) for inside in _inside(each)]


def _inside(value: Any) -> Iterable[object]:  # noqa: ANN401
    """What a function refers to, or an object or a container has."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, list | tuple):
        return value
    found: dict[Any, object] = value if isinstance(value, dict) else around(value) or getattr(value, "__dict__", {})
    return list(found.values())


def _refuse_of_graph(what: str, value: object) -> None:
    """Raise `ValueError` unless the code in `value` is that of a node which is no longer in the graph."""
    nodes = writers_of(value)
    if not nodes and not is_of_a_node(value):
        nodes = changers_of_models()
    if nodes or executing_node() is None:
        raise refuse_by(nodes, what)


def _of_packs(transformer: nn.Module, kinds: Mapping[str, type]) -> Iterator[tuple[str, object]]:
    """Classes, methods and hooks of packs in a transformer, whose modules have other classes than `kinds` by path."""
    for path, module in transformer.named_modules():
        place, kind = _place(path), type(module)
        if kinds.get(path) is not kind and not is_trusted(kind.__module__):
            yield f"it replaces the class of {place}", kind
        for name, value in _methods(module).items():
            if foreign(value):
                yield f"it replaces {place}.{name}", value
        for value in (value for hooks in HOOKS for value in vars(module)[hooks].values()):
            if foreign(value):
                yield f"it hooks {place}", value


def _look_at(module: nn.Module) -> _Made:
    hooks = frozenset(number for name in HOOKS for number in vars(module)[name])
    return _Made(kind=type(module), methods=_methods(module), children=dict(vars(module)["_modules"]), hooks=hooks)


def _place(path: str) -> str:
    return ".".join(filter(None, [ROOT, path]))


def _functions(file: str) -> dict[str, object]:
    """What code in one of ComfyUI's modules can call by its name, its attention function among it."""
    return {
        name: value
        for name, value in vars(sys.modules[file]).items()
        if callable(value) and not isinstance(value, type)
    }


def _methods(module: nn.Module) -> dict[str, object]:
    """What a module has itself in the place of a method of its class."""
    kind = type(module)
    return {name: value for name, value in vars(module).items() if callable(value) and hasattr(kind, name)}


def _changes(path: str, module: nn.Module, made: _Made) -> Iterator[Change]:
    place = _place(path)

    def change(what: str, value: object) -> Change:
        return Change(what=what, value=value, module=module, made=made)

    if type(module) is not made.kind:
        yield change(f"it replaces the class of {place}", type(module))
    for name, value in _methods(module).items():
        if made.methods.get(name) is not value:
            yield change(f"it replaces {place}.{name}", value)
    for name, child in vars(module)["_modules"].items():
        if name in made.children and made.children[name] is not child:
            yield change(f"it replaces {place}.{name}", child)
    for hooks in HOOKS:
        for number in set(vars(module)[hooks]) - made.hooks:
            yield change(f"it hooks {place}", vars(module)[hooks][number])
