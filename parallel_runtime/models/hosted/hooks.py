"""Hooks on ComfyUI's unmodified module, by which ranks share the tokens of one call.

    install()                                   # attention.py: in the worker, before any model's file is imported
    shared = SharedModel(model, spec_of(model), group)
    out = model(x, t, context=..., ...)         # every rank passes the same and gets the whole output
    shared.group = other                        # the next calls go over other ranks; None: they run whole
    shared.new_call = make                      # they are passes of a pipeline (pass_call.py)
    shared.moved = move                         # of the next call: brings rows of a ControlNet's residuals here
    shared.remove()                             # takes every hook off again

`model` is the class's instance, with weights or on `meta` still; its parameters may be replaced at any time. `group` is
a `SequenceParallelAttention`. Construction raises ValueError when the spec names a module or an argument that the class
lacks. A stream of fewer tokens than the group has ranks is computed whole by each of them. No state is left after a
call that raises.

All that can be known before a call is found once (hook_points.py, cuts.py); a hook only looks values up and changes
them.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...parallel.attention import SequenceParallelAttention
from ..block_chain import SHARE, Around, Forward, chain_at
from ..specs.spec import ShardingSpec
from .attention import installed
from .call import TokenCall
from .cuts import Moved, cut_control
from .hook_points import NOWHERE, Argument, HookPoint, find_hook_points
from .sites import name_site


class SharedModel:
    """A model whose calls are shared by the ranks of `group`; None: they are not shared."""

    def __init__(self, model: nn.Module, spec: ShardingSpec, group: SequenceParallelAttention) -> None:
        self.model, self.spec = model, spec
        self.group: SequenceParallelAttention | None = group
        self.new_call: Callable[[str], TokenCall] | None = None  # where a call is not one pass of all tokens
        self.moved: Moved | None = None  # brings rows of the next call's residuals here, where these lie elsewhere
        self._switch = installed()
        self.call: TokenCall | None = None  # that is under way
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        self._control_at = names.index("control") if "control" in names else NOWHERE
        self._links: list[tuple[nn.Module, str, Around]] = []
        self._sites: list[tuple[nn.Module, str, Forward | None]] = []
        for point in find_hook_points(model, spec):
            for module, method, name in point.sites:
                before = chain_at(module, method).inner
                if name_site(self._switch, module, method, name):
                    self._sites.append((module, method, before))
            self._wrap(point.module, partial(self._placed, point), point.method)
        self._wrap(model.get_submodule(spec.each_call), self._shared)

    def remove(self) -> None:
        """Take every hook off."""
        for module, method, around in self._links:
            chain_at(module, method).take_off(around)
        for module, method, before in self._sites:
            chain_at(module, method).inner = before
        self._links.clear()
        self._sites.clear()

    def _wrap(self, module: nn.Module, around: Around, method: str = "forward") -> None:
        """Put a function around a module's method. torch's own hooks would take longer than what they do."""
        self._links.append((module, method, around))
        chain_at(module, method).put(SHARE, around)

    def _shared(self, inner: Forward) -> Forward:
        """The model's forward, as a call that the ranks share."""
        name = type(self.model).__name__

        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self.group is None:
                return inner(*args, **kwargs)
            try:
                call = TokenCall(self.group, name) if self.new_call is None else self.new_call(name)
                args = self._with_control(call, args, kwargs)
                self.call = self._switch.call = call
                return inner(*args, **kwargs)
            finally:
                self.call = self._switch.call = self.moved = None

        return forward

    def _with_control(self, call: TokenCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments with a ControlNet's lists that may be cut; those by name are changed in `kwargs`."""
        control = None
        if self.spec.control:
            control = kwargs.get("control") or (args[self._control_at] if len(args) > self._control_at else None)
        if not control:
            return args
        unknown = sorted(name for name, each in control.items() if each and name not in self.spec.control)
        if unknown:
            raise ValueError(
                f"{call.name}: a ControlNet's list {unknown[0]!r} is not in the plan, which has "
                f"{', '.join(self.spec.control)}; use cfg parallel or data parallel with this ControlNet"
            )
        # Cut as soon as their streams are known: in place, as a class may have taken a list by then. The caller's own
        # lists stay whole.
        call.control = {name: each and list(each) for name, each in control.items()}
        if "control" in kwargs:
            kwargs["control"] = call.control
            return args
        return *args[: self._control_at], call.control, *args[self._control_at + 1 :]

    def _placed(self, point: HookPoint, inner: Forward) -> Forward:
        """A module's forward that sets the attention of what is in it, and changes its arguments and its output."""
        attention, inside, works = point.attention, point.inside, point.works
        title, arguments, results = type(point.module).__name__, tuple(point.arguments), tuple(point.results)

        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            call = self.call
            if call is None or (works is not None and not works.holds(args, kwargs)):
                return inner(*args, **kwargs)
            if attention is not None:
                call.attention, call.inside, call.first_keys = attention, inside, None
            args = _change_arguments(call, title, arguments, args, kwargs)
            if call.control is not None:
                self._cut_control(call)
            out = inner(*args, **kwargs)
            if attention is not None:
                call.attention, call.inside, call.first_keys = None, {}, None
            for change in results:
                out = change(call, out)
            return out

        return forward

    def _cut_control(self, call: TokenCall) -> None:
        control = call.control
        if control is None or not all(stream in call.streams for stream in self.spec.control.values()):
            return
        found: dict[tuple[str, int], Tensor] = {}
        for name, stream in self.spec.control.items():
            if control.get(name):
                control[name][:] = cut_control(call, control[name], stream, found, self.moved)
        call.control = None


def _change_arguments(
    call: TokenCall, title: str, arguments: tuple[Argument, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments by position, changed; those by name are changed in `kwargs`, which is this call's alone."""
    changed: list[Any] | None = None
    for argument in arguments:
        if argument.name in kwargs:
            kwargs[argument.name] = _changed(call, argument, kwargs[argument.name])
        elif argument.position < len(args):
            changed = list(args) if changed is None else changed
            changed[argument.position] = _changed(call, argument, args[argument.position])
        elif argument.required:
            raise ValueError(
                f"{call.name}: {title} was given no {argument.name!r}, which the plan names; "
                "use a ComfyUI that the plan was made for"
            )
    return args if changed is None else tuple(changed)


def _changed(call: TokenCall, argument: Argument, value: Any) -> Any:  # noqa: ANN401
    """An argument's value, changed; once where one module after the other is given the same value.

    Of each argument only the last value is kept: what is made anew for each block would pile up.
    """
    if value is None:
        return None
    if argument.key is None:
        return argument.change(call, value)
    known = call.changed.pop(argument.key, None)
    if known is None or known[0] is not value:
        known = None  # before the new one, which may be as large
        known = value, argument.change(call, value)
    call.changed[argument.key] = known
    return known[1]
