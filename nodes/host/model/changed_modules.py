"""What nodes change on a MODEL's transformer by hand: its class, methods, plain values, modules and hooks.

The transformer here computes nothing, so such a change would do nothing, or compute with weights that are not here.
What the transformer is made of is noted once, when it is made. It is looked at before a run, with all that is inside of
it, and before each call, from the outside: many packs change a method for the time of a call, or a function in the
files of its classes. Where code of packs stands around a call, all that is inside is looked at as it is sent, which
takes some 4 ms for the 955 modules of Flux. On the transformer of a stock loader, which is to be ours, all code of
packs is such a change.
Owns that. Does not own which node a piece of code belongs to (writers.py), nor functions of ComfyUI's files and classes
(replaced_code.py).
"""

import dis
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..contract.comfyui import ModelPatcher, comfy
from ..contract.foreign_code import PLAIN, foreign, is_trusted
from ..contract.refusals import refuse_by
from ..contract.writers import (
    FILE,
    PACK,
    USES,
    Code,
    GraphNode,
    alike,
    around,
    changers_of_models,
    code_of,
    defining,
    executing_node,
    is_of_a_node,
    naming,
    now_in_graph,
    packs_with_models,
    still_there,
    values_in,
    writers_of,
)
from .replaced_code import CodeAsMade, is_imported

log = logging.getLogger(__name__)
ROOT = "diffusion_model"
NOT_ASKED = (ModelPatcher, comfy.model_base.BaseModel, torch.Tensor, type, ModuleType, str, int, float)
REACH = 5  # of references: a function, what it has around it, a patch of unittest.mock, its getter, the module
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
OF_TORCH = frozenset(vars(nn.Module()))  # what every module has, as `training`
# What of a MODEL's options runs around its calls, and what of its transformer_options, of whatever kind.
AROUND_CALLS = ("model_function_wrapper", "sampler_calc_cond_batch_function")
AROUND = ("wrappers", "callbacks")


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A module as it was made: its class, methods and plain values that it has itself, modules, numbers of hooks."""

    kind: type
    methods: dict[str, object]
    values: dict[str, object]
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
        vars(self.module).update({name: _copied(self.made.values[name]) for name in _set(self.module, self.made)})
        vars(self.module)["_modules"].update(self.made.children)
        for hooks in HOOKS:
            for number in set(vars(self.module)[hooks]) - self.made.hooks:
                del vars(self.module)[hooks][number]


@dataclass(frozen=True, kw_only=True)
class TakenBack:
    """A change that was. `nodes`: of which one made it, () where none of the graph did; `code`: where what it put there
    is defined, None of a plain value. `in_place`: the node, where it copied no MODEL.
    """

    what: str
    nodes: tuple[GraphNode, ...]
    code: Code | None
    in_place: GraphNode | None


class AsMade:
    """What a transformer and the modules in it were made as. Refers to no module that has it as an attribute."""

    def __init__(self, transformer: nn.Module) -> None:
        self.made = {path: _look_at(module) for path, module in transformer.named_modules()}
        self.code = CodeAsMade(transformer)
        self.told: set[str] = set()
        # The classes of packs' nodes that were in the graph, by what was done to a value, where nothing says by which.
        self.blamed: dict[str, frozenset[str]] = {}
        self.taken_back: list[TakenBack] = []

    def changes(self, transformer: nn.Module, *, deep: bool) -> Iterator[Change]:
        """What is no longer as it was made; `deep`: of the modules inside as well, but of those that are new."""
        others: list[str] = []  # what is inside of another module is that one's
        for path, module in transformer.named_modules() if deep else [("", transformer)]:
            made = self.made.get(path)
            if made is not None and not any(f"{path}.".startswith(f"{other}.") for other in others):
                yield from _changes(path, module, made)
                now = vars(module)["_modules"]
                others += [
                    f"{path}.{name}".lstrip(".") for name in made.children if made.children[name] is not now.get(name)
                ]


def note_as_made(transformer: nn.Module) -> None:
    """Have each call of the transformer look at it first."""
    transformer.register_forward_pre_hook(_before_call)
    transformer.as_made = as_made = AsMade(transformer)
    if before := as_made.code.replaced_before():
        # Not refused: a pack does so as it is imported, for all MODELs, so there is no node to remove from the graph.
        log.warning("a pack had changed ComfyUI before the model was made (%s); ranks do without", ", ".join(before))


def _before_call(transformer: nn.Module, _: object) -> None:
    refuse_changed(transformer, deep=False)


def refuse_changed(
    transformer: nn.Module, *, deep: bool, made_by: Sequence[tuple[GraphNode, int]] | None = None
) -> None:
    """Raise `ValueError` for a change of a node that is in the graph. What another graph left behind is taken back.

    `made_by`, where a run begins: the nodes of packs that its MODEL comes from, with how many changes had been taken
    back when each ran. What is a node's is taken back then, too, so that what is found next was done since, by
    whichever node; a node whose change was taken back, and which ComfyUI did not run again, is refused for that.
    """
    as_made: Any = transformer.as_made
    changes = list(as_made.changes(transformer, deep=deep))
    if deep:
        found = {change.what for change in changes}
        as_made.blamed = {what: kinds for what, kinds in as_made.blamed.items() if what in found}
    whose = [(change, *_whose(change.what, change.value, as_made.blamed)) for change in changes]
    refusals = [refuse_by(nodes, change.what) for change, nodes, _ in whose if nodes]
    if refusals and made_by is None:
        raise refusals[0]
    # What is taken back of a module is all of it. Where nothing says whose it is, it stays while such a node is there.
    stay = {id(change.module) for change, nodes, known in whose if nodes and not known}
    for change, nodes, _ in whose:
        if id(change.module) not in stay:
            change.take_back()
            as_made.taken_back.append(_taken_back(change.what, change.value, nodes, made_by or ()))
    if refusals:
        raise refusals[0]
    for where, value in as_made.code.replaced():
        what = f"it replaces {where}"
        # of no other node of the graph: unlike a change of the model, this cannot be taken back
        if (nodes := writers_of(value)) or executing_node() is None:
            raise refuse_by(nodes, what)
        if what not in as_made.told:
            log.warning("a node that is no longer in the graph had changed ComfyUI (%s); ranks do without", what)
        as_made.told.add(what)
    if made_by is not None:
        _refuse_taken_back(as_made.taken_back, made_by)


def as_it_was(model: Any, made_by: Sequence[tuple[GraphNode, int]]) -> nn.Module:  # noqa: ANN401
    """The transformer that a parallel model was made with, put back where another one is in its place. Raises
    `ValueError` where a node of the graph put it there; `made_by` as of `refuse_changed`."""
    made, now, what = model.made_with(), model.diffusion_model, f"it replaces {ROOT}"
    if now is made:
        return made
    nodes, known = _whose(what, type(now), made.as_made.blamed)
    if known or not nodes:
        model.diffusion_model = made
        made.as_made.taken_back.append(_taken_back(what, type(now), nodes, made_by))
    if nodes:
        raise refuse_by(nodes, what)
    return made


def num_taken_back(model: Any) -> int:  # noqa: ANN401
    """How many changes of a parallel model's transformer have been taken back so far."""
    return len(model.made_with().as_made.taken_back)


def _taken_back(
    what: str, value: object, nodes: Sequence[GraphNode], made_by: Sequence[tuple[GraphNode, int]]
) -> TakenBack:
    if not nodes:
        log.warning("a node that this run does not depend on had changed the model (%s); taken back", what)
    its = nodes[0] if len(nodes) == 1 and not any(alike(nodes[0], node) for node, _ in made_by) else None
    code = None if _is_plain(value) else code_of(value)
    return TakenBack(what=what, nodes=tuple(nodes), code=code, in_place=its)


def _refuse_taken_back(taken_back: Sequence[TakenBack], made_by: Sequence[tuple[GraphNode, int]]) -> None:
    for number, change in enumerate(taken_back):
        nodes = [node for node, before in made_by if before <= number and _did(node, change)]
        if change.in_place is not None and still_there(change.in_place):
            nodes.append(change.in_place)
        if nodes:
            raise refuse_by(map(now_in_graph, nodes), change.what)


def _did(node: GraphNode, change: TakenBack) -> bool:
    """Whether a node is one of those that may have made a change."""
    if change.nodes:
        return any(alike(node, each) for each in change.nodes)
    if change.code is None:
        return bool(naming([node], change.what.rpartition(".")[2], pack=False))
    return bool(defining([change.code], [node], FILE))


def have_packs_around(options: Mapping[str, Any], names: Iterable[str] = AROUND) -> bool:
    """Whether code of packs stands around a call that has these options: it may change modules for its time."""
    return any(foreign(each) for name in names for each in values_in(options.get(name)))


def refuse_changed_stock(transformer: nn.Module, fresh: nn.Module, patched: Collection[str]) -> None:
    """Raise `ValueError` for what a node of the graph changed by hand on the transformer of a stock loader, which ranks
    would do without. `fresh`: ComfyUI's transformer of the same file, as no node has seen it. `patched`: what is there
    for as long as a MODEL of the loader is in use, by its whole name."""
    as_made: Any = fresh.as_made
    refuse_on_stock(_of_packs(transformer, as_made.made, patched))
    for where, value in as_made.code.foreign():  # which may have been there before `fresh` was made
        # what a pack's import put there, as Easy-Use's does, is no node's that has nothing of it
        if nodes := writers_of(value, surely=USES if is_imported(value) else PACK):
            raise refuse_by(nodes, f"it replaces {where}")


def refuse_on_stock(changes: Iterable[tuple[str, object]]) -> None:
    """Raise `ValueError` for a change of a stock loader's model by a node of the graph; what another graph left behind
    the log tells. Each is what was done, in words that go on about the node, and its code."""
    for what, value in changes:
        if nodes := _whose(what, value)[0]:
            raise refuse_by(nodes, what)
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


def _whose(what: str, value: object, blamed: dict[str, frozenset[str]] | None = None) -> tuple[list[GraphNode], bool]:
    """The nodes of the graph of which one made a change, and whether that is known. Raises `ValueError` outside of a
    prompt.

    A plain value has no code; a node whose source has its name set it. Where nothing says whose a change is, one of the
    packs' nodes made it; `blamed`, of our own model: a plain value, of those that were in the graph when it was found.
    """
    there = packs_with_models()
    nodes = naming(there, what.rpartition(".")[2]) if _is_plain(value) else writers_of(value)
    if executing_node() is None:
        raise refuse_by(nodes, what)
    if nodes or (blamed is None if _is_plain(value) else is_of_a_node(value)):
        return nodes, True
    if blamed is None or not _is_plain(value):
        return there, False
    kinds = blamed.setdefault(what, frozenset(node.class_type for node in there))
    return [node for node in there if node.class_type in kinds], False


def _of_packs(
    transformer: nn.Module, made: Mapping[str, _Made], patched: Collection[str]
) -> Iterator[tuple[str, object]]:
    """Classes, methods, values and hooks of packs in a transformer. `made`: modules by path of one without any."""
    for path, module in transformer.named_modules():
        place, kind, stock = _place(path), type(module), made.get(path)
        if (stock is None or stock.kind is not kind) and not is_trusted(kind.__module__):
            yield f"it replaces the class of {place}", kind
        if stock is not None and stock.kind is kind:  # a class for another dtype has other values
            for name, value in _set(module, stock).items():
                if _place(path, name) not in patched:
                    yield f"it sets {_place(path, name)}", value
        for name, value in _methods(module).items():
            if foreign(value) and _place(path, name) not in patched:
                yield f"it replaces {_place(path, name)}", value
        for value in (value for hooks in HOOKS for value in vars(module)[hooks].values()):
            if foreign(value):
                yield f"it hooks {place}", value


def _look_at(module: nn.Module) -> _Made:
    hooks = frozenset(number for name in HOOKS for number in vars(module)[name])
    children = dict(vars(module)["_modules"])
    return _Made(kind=type(module), methods=_methods(module), values=_values(module), children=children, hooks=hooks)


def _place(path: str, name: str = "") -> str:
    return ".".join(filter(None, [ROOT, path, name]))


def _methods(module: nn.Module) -> dict[str, object]:
    """What a module has itself in the place of a method of its class."""
    kind = type(module)
    return {name: value for name, value in vars(module).items() if callable(value) and hasattr(kind, name)}


def _values(module: nn.Module) -> dict[str, object]:
    """The plain values that a module computes by, as the base of its positions."""
    own = _set_by(type(module))
    return {name: _copied(value) for name, value in vars(module).items() if name not in own and _is_plain(value)}


def _set(module: nn.Module, made: _Made) -> dict[str, object]:
    """What a module has now in the place of plain values that it was made with."""
    now = vars(module)
    there = ((name, now[name], value) for name, value in made.values.items() if name in now)
    return {name: new for name, new, value in there if new is not value and not (_is_plain(new) and new == value)}


@cache
def _set_by(kind: type) -> frozenset[str]:
    """What a class sets on its modules after they are made, as it is loaded or runs: caches, and what torch keeps."""
    functions = [
        each
        for base in kind.__mro__
        if base.__module__.startswith("comfy.")
        for name, each in vars(base).items()
        if isinstance(each, FunctionType) and name != "__init__"
    ]
    steps = (step for each in functions for step in dis.get_instructions(each))
    return OF_TORCH | {step.argval for step in steps if step.opname == "STORE_ATTR"}


def _is_plain(value: object) -> bool:
    return isinstance(value, PLAIN) or (type(value) in (list, tuple) and all(map(_is_plain, value)))  # type: ignore[call-overload]


def _copied(value: Any) -> Any:  # noqa: ANN401
    """A plain value that stays as it is where a list is changed in place."""
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def _changes(path: str, module: nn.Module, made: _Made) -> Iterator[Change]:
    place = _place(path)

    def change(what: str, value: object) -> Change:
        return Change(what=what, value=value, module=module, made=made)

    if type(module) is not made.kind:
        yield change(f"it replaces the class of {place}", type(module))
    for name, value in _methods(module).items():
        if made.methods.get(name) is not value:
            yield change(f"it replaces {_place(path, name)}", value)
    for name, value in _set(module, made).items():
        yield change(f"it sets {_place(path, name)}", value)
    for name, child in vars(module)["_modules"].items():
        if name in made.children and made.children[name] is not child:
            yield change(f"it replaces {_place(path, name)}", child)
    for hooks in HOOKS:
        for number in set(vars(module)[hooks]) - made.hooks:
            yield change(f"it hooks {place}", vars(module)[hooks][number])
