"""Hooks on ComfyUI's unmodified module, by which ranks share the tokens of one call.

    install()                                   # attention.py: in the worker, before any model's file is imported
    shared = SharedModel(model, plan_for(type(model)), group)
    out = model(x, t, context=..., ...)         # every rank passes the same and gets the whole output
    shared.active = False                       # the next calls run whole, without the group
    shared.group = other                        # the next calls go over other ranks
    shared.remove()                             # takes every hook off again

`model` is the class's instance, with weights or on `meta` still; its parameters may be replaced at any time. `group` is
a `TokenGroup` (group.py). Construction raises ValueError when the plan names a module or an argument that the class
lacks. A stream of fewer tokens than the group has ranks is computed whole by each of them. No state is left after a
call that raises.

All that can be known before a call is found once (places.py, cuts.py); a hook only looks values up and changes them.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..plans.plan import Plan
from .attention import installed
from .call import TokenCall, Told
from .cuts import cut_control
from .group import TokenGroup
from .places import NOWHERE, Argument, Place, find_places

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class SharedModel:
    """A model whose calls are shared by the ranks of `group`, while `active`."""

    def __init__(self, model: nn.Module, plan: Plan, group: TokenGroup) -> None:
        self.model, self.plan, self.group = model, plan, group
        self.active = True
        self.tokens = 0  # of the largest attention call that the last call shared
        self._switch = installed()
        self._call: TokenCall | None = None
        self._told: Told = {}
        self._control_at = _position_of(model, "control")
        said = [each for blocks in plan.attention for each in plan.attention_of(blocks).values()]
        self._open_lengths = any(not each.local and not each.queries for each in said)
        places = find_places(model, plan)
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        for place in places:
            self._hook(place)

    def remove(self) -> None:
        """Take every hook off. The model is then as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if not self.active:
            self._call = self._switch.call = None
            return None
        control = None
        if self.plan.control:
            control = kwargs.get("control") or (args[self._control_at] if len(args) > self._control_at else None)
        call = TokenCall(self.group, type(module).__name__, self._told, open_lengths=self._open_lengths)
        self._call = self._switch.call = call
        if not control:
            return None
        unknown = sorted(name for name, each in control.items() if each and name not in self.plan.control)
        if unknown:
            raise ValueError(
                f"{call.name}: a ControlNet's list {unknown[0]!r} is not in the plan, which has "
                f"{', '.join(self.plan.control)}; use cfg parallel or data parallel with this ControlNet"
            )
        call.control = dict(control)  # cut as soon as its streams are known; the caller's own stays whole
        if "control" in kwargs:
            return args, {**kwargs, "control": call.control}
        return (*args[: self._control_at], call.control, *args[self._control_at + 1 :]), kwargs

    def _end(self, *_: object) -> None:
        self.tokens = 0 if self._call is None else self._call.tokens
        self._call = self._switch.call = None

    def _hook(self, place: Place) -> None:
        module = place.module
        if place.arguments or place.attention is not None:
            self._handles.append(module.register_forward_pre_hook(self._before(place), with_kwargs=True))
        if place.results or place.attention is not None:
            self._handles.append(module.register_forward_hook(self._after(place)))

    def _before(self, place: Place) -> Callable[..., Arguments | None]:
        """The hook that sets the attention of a module and changes its arguments."""
        attention, arguments = place.attention, tuple(place.arguments)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            call = self._call
            if call is None:
                return None
            if attention is not None:
                call.attention = attention
            changed: list[Any] | None = None
            for argument in arguments:
                if argument.name in kwargs:  # torch makes this dict for this call alone
                    kwargs[argument.name] = _changed(call, argument, kwargs[argument.name])
                elif argument.position < len(args):
                    changed = list(args) if changed is None else changed
                    changed[argument.position] = _changed(call, argument, args[argument.position])
                elif argument.required:
                    raise ValueError(
                        f"{call.name}: {type(module).__name__} was given no {argument.name!r}, which the plan names; "
                        "use a ComfyUI that the plan was made for"
                    )
            if call.control is not None:
                self._cut_control(call)
            return None if changed is None else (tuple(changed), kwargs)

        return before

    def _after(self, place: Place) -> Callable[..., Any]:
        """The hook that changes a module's output and sets the attention of what is around it."""
        attention, around, results = place.attention, place.around, tuple(place.results)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:  # noqa: ANN401
            call = self._call
            if call is None:
                return None
            if attention is not None:
                call.attention = around
            for change in results:
                out = change(call, out)
            return out if results else None

        return after

    def _cut_control(self, call: TokenCall) -> None:
        control = call.control
        if control is None or not all(stream in call.streams for stream in self.plan.control.values()):
            return
        for name, stream in self.plan.control.items():
            if control.get(name):
                control[name] = cut_control(call, control[name], stream)
        call.control = None


def _changed(call: TokenCall, argument: Argument, value: Any) -> Any:  # noqa: ANN401
    """An argument's value, changed; once a call for a value that many modules are given."""
    if value is None:
        return None
    if argument.key is None:
        return argument.change(call, value)
    known = call.changed.get((id(value), argument.key))
    if known is None:
        known = call.changed[(id(value), argument.key)] = (
            value,
            argument.change(call, value),
        )  # value: keeps its id its own
    return known[1]


def _position_of(model: nn.Module, name: str) -> int:
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return names.index(name) if name in names else NOWHERE
