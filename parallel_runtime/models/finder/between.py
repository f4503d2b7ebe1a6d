"""What becomes of tokens between lists of blocks and after the last one, where attention mixes no rows.

One token of a list's first block is changed in a call of the whole model: which rows of a later list's tokens, and of
the outputs of modules that follow, are its own.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .lists import ListWords
from .probe import Pattern, Rows, described
from .record import Call, CallWatch, ModuleCall, Tap
from .values import Address, copied, leaf_at, moved, nudged, tensors, with_leaf

CONTROL = "control"  # the argument that ComfyUI gives a ControlNet's lists in
CONTROL_LISTS = ("input", "middle", "output")
MOST_BLOCKS = 100  # as many residuals are in a list at most
# What a class raises whose call has no use of such lists.
TAKES_NONE = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
Place = tuple[str, int]  # a module, and which of its calls


@dataclass(frozen=True)
class Stream:
    """Tokens that begin at a flow of a list's first block. `dim`: one of a grid's."""

    name: str
    of: ListWords
    flow: int
    grid: bool = False


class _Asked(dict[str, list[Tensor]]):
    """Empty lists of a ControlNet, and the names of those that a model asked for."""

    def __init__(self) -> None:
        super().__init__((name, []) for name in CONTROL_LISTS)
        self.names: set[object] = set()

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> list[Tensor]:
        self.names.add(name)
        return super().__getitem__(name)


class Between:
    """A model's calls with one token changed."""

    def __init__(self, model: nn.Module, call: Call, tap: Tap, lists: Sequence[ListWords]) -> None:
        self.model, self._call, self._tap = model, call, tap
        last = lists[-1].blocks.calls[-1]
        self._ancestors = set(last.within)
        self._wanted = {call.path for each in lists for call in (each.blocks.calls[0], each.blocks.calls[-1])}
        self._blocks = {path for each in lists for path in each.blocks.paths}
        self.base = self._run(None)
        self._cache: dict[tuple[str, int, int], dict[Place, ModuleCall]] = {}
        self.after = self._after()

    def _keep(self, path: str) -> bool:
        if path in self._wanted:
            return True
        inside = any(path.startswith(f"{block}.") or path == block for block in self._blocks)
        return not inside and path.count(".") <= 2

    def _after(self) -> list[ModuleCall]:
        """The outermost modules that run after the last block, in their order."""
        order = list(self.base.values())
        lasts = [number for number, call in enumerate(order) if call.path in self._blocks]
        found = []
        for call in order[max(lasts) + 1 :]:
            inside = any(path in self._blocks for path in call.within)
            if not inside and set(call.within) <= self._ancestors and call.path not in self._ancestors:
                found.append(call)
        return found

    def changed(self, stream: Stream, axis: int, index: int) -> dict[Place, ModuleCall]:
        """The calls of modules when one token of a stream is another."""
        known = (stream.name, axis, index)
        if known not in self._cache:
            self._cache[known] = self._run((stream, axis, index))
        return self._cache[known]

    def size(self, stream: Stream, axis: int) -> int:
        """Tokens along an axis of a stream."""
        flow, call = stream.of.flows[stream.flow], stream.of.blocks.calls[0]
        return int(leaf_at(call.args[flow.name], flow.at).shape[flow.dim + axis])

    def pattern(self, stream: Stream, axis: int, place: Place, name: str | None, at: Address, dim: int) -> Pattern:
        """How the rows of an argument of a module, or of its output (`name` None), move with a stream's tokens."""
        before = self._leaf(self.base.get(place), name, at)
        size = self.size(stream, axis)
        found = []
        for index in sorted({0, size // 2, size - 1}):
            after = self._leaf(self.changed(stream, axis, index).get(place), name, at)
            if before is None or after is None:
                return "reshaped"
            rows = moved(before, after, dim)
            if rows is None:
                return "reshaped"
            found.append((index, rows))
        return described(found, size, before.shape[dim]) if before is not None else "reshaped"

    def _leaf(self, call: ModuleCall | None, name: str | None, at: Address) -> Tensor | None:
        try:
            leaf = None if call is None else leaf_at(call.out if name is None else call.args[name], at)
        except (KeyError, IndexError, TypeError):
            return None
        return leaf if isinstance(leaf, Tensor) else None

    def control(self, streams: Sequence[Stream]) -> dict[str, str]:
        """The lists of a ControlNet that the model adds to a stream, and which it is.

        Those moved rows tell it that a changed token of the stream moves too.
        """
        taken = inspect.signature(type(self.model).forward).parameters.values()
        if not any(each.name == CONTROL or each.kind is inspect.Parameter.VAR_KEYWORD for each in taken):
            return {}
        asked = _Asked()
        with suppress(*TAKES_NONE):  # a class may take a residual out of the list it asked for
            self._run(None, asked)
        found = {}
        for name in (name for name in CONTROL_LISTS if name in asked.names):
            for stream in (each for each in streams if not each.grid):
                flow, call = stream.of.flows[stream.flow], stream.of.blocks.calls[0]
                residual = torch.zeros_like(leaf_at(call.args[flow.name], flow.at))
                if flow.dim == 1 and residual.ndim == 3 and self._is_added(name, residual, stream):
                    found[name] = stream.name
                    break
        return found

    def _is_added(self, name: str, residual: Tensor, stream: Stream) -> bool:
        """Whether row j of a residual moves what token j of the stream moves, and nothing else."""
        size = residual.shape[1]
        given = [residual, *(nudged(residual, 1, index) for index in (0, size // 2, size - 1))]
        try:
            before, *after = [
                self._run(None, {**dict.fromkeys(CONTROL_LISTS, []), name: [each] * MOST_BLOCKS}) for each in given
            ]
        except TAKES_NONE:
            return False
        for place, call in before.items():
            for argument, value in (call.args if place[0] else {}).items():
                for at, leaf in tensors(value):
                    for dim in (each for each, rows in enumerate(leaf.shape) if rows >= size):
                        found = []
                        for index, run in zip((0, size // 2, size - 1), after, strict=True):
                            other = self._leaf(run.get(place), argument, at)
                            found.append((index, () if other is None else moved(leaf, other, dim) or ()))
                        said = described(found, size, leaf.shape[dim])
                        if isinstance(said, Rows):
                            return said == self.pattern(stream, 0, place, argument, at, dim)
        return False

    def _run(
        self, change: tuple[Stream, int, int] | None, control: Mapping[str, list[Tensor]] | None = None
    ) -> dict[Place, ModuleCall]:
        watch = CallWatch(self._keep)
        handle = None
        if change is not None:
            handle = self._nudge(*change)
        elif control is not None:
            handle = self.model.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, CONTROL: control}), with_kwargs=True
            )
        try:
            with torch.inference_mode(), watch.of(self.model), self._tap(watch.by_rows):
                self._call()
        finally:
            if handle is not None:
                handle.remove()
        return {(call.path, call.number): call for call in watch.calls}

    def _nudge(self, stream: Stream, axis: int, index: int) -> Any:  # noqa: ANN401
        """A hook before the first block of the stream's list."""
        flow, call = stream.of.flows[stream.flow], stream.of.blocks.calls[0]
        key = call.keys[flow.name]
        times = [0]

        def change(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            times[0] += 1
            if times[0] > 1:
                return None
            every: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            value = copied(every[key])
            every[key] = with_leaf(value, flow.at, nudged(leaf_at(value, flow.at), flow.dim + axis, index))
            return tuple(every[number] for number in range(len(args))), {name: every[name] for name in kwargs}

        return call.module.register_forward_pre_hook(change, with_kwargs=True)
