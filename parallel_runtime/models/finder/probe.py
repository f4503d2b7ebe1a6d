"""A module run alone, again and again, with one value of its arguments changed: which rows of what move with it.

Attention gives each query its own row back meanwhile (record.py), so what moves is what depends on that value by
itself. Letters: `S` tokens.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .record import CallWatch, ModuleCall, Tap
from .values import Address, copied, leaf_at, moved, nudged, tensors, with_leaf

View = tuple[str, Any]  # ("q", number of the attention call), "k" and "mask" alike, or ("out", address)
Views = dict[View, Tensor]


@dataclass(frozen=True)
class Rows:
    """Index j of the argument moves row `start` + j, and no other. `first`: only of the first so many indices."""

    start: int
    first: int | None = None


@dataclass(frozen=True)
class Runs:
    """Index j moves `each` rows from `start` + j * `each`."""

    start: int
    each: int


Pattern = Rows | Runs | str  # "none", "all", "other" rows, or "reshaped": the call has other shapes then


class ModuleProbe:
    """One call of a module, to be repeated."""

    def __init__(self, call: ModuleCall, tap: Tap) -> None:
        self.call, self._tap = call, tap
        self._cache: dict[tuple[Any, ...], Views | None] = {}
        self.failed = ""
        self.sites: list[str] = []  # of its attention calls, the module that ran
        self.base = self._run(None) or {}

    def changed(self, name: str, at: Address, leaf: Any) -> Views | None:  # noqa: ANN401
        """What the module makes of another leaf; None where it fails."""
        return self._run((self.call.keys[name], at, leaf))

    def moves(self, name: str, at: Address, dim: int, index: int) -> Views | None:
        """What it makes of other values at an index of a dim of a leaf."""
        known = (name, at, dim, index)
        if known not in self._cache:
            leaf = leaf_at(self.call.args[name], at)
            self._cache[known] = self.changed(name, at, nudged(leaf, dim, index))
        return self._cache[known]

    def pattern(self, name: str, at: Address, dim: int, view: View, view_dim: int) -> Pattern:
        """How the rows of a view move with the indices of a leaf's dim."""
        size = leaf_at(self.call.args[name], at).shape[dim]
        found: list[tuple[int, tuple[int, ...]]] = []
        for index in sorted({0, size // 2, size - 1}):
            views = self.moves(name, at, dim, index)
            if views is None or view not in views:
                return "reshaped"
            rows = moved(self.base[view], views[view], view_dim)
            if rows is None:
                return "reshaped"
            if 1 < len(rows) == self.base[view].shape[view_dim] and size > 1:
                return "all"  # no other index can move rows of its own
            found.append((index, rows))
        return described(found, size, self.base[view].shape[view_dim])

    @property
    def most(self) -> int:
        """The rows of all attention calls inside, with their batch: a dim of more indices holds no tokens."""
        attended = [view for key, view in self.base.items() if key[0] in ("q", "k")]
        return sum(view.shape[0] * view.shape[2] for view in attended) if attended else sys.maxsize

    def apart(self, name: str, at: Address, dim: int, view: View) -> bool:
        """Whether each index of a leaf's dim moves tokens, the dim 2 of `view`, that no other moves."""
        size = leaf_at(self.call.args[name], at).shape[dim]
        seen: set[int] = set()
        for index in sorted({0, size // 2, size - 1}):
            views = self.moves(name, at, dim, index)
            rows = None if views is None or view not in views else moved(self.base[view], views[view], 2)
            if rows is None or seen & set(rows):
                return False
            seen |= set(rows)
        return bool(seen)

    def _run(self, change: tuple[Any, Address, Any] | None) -> Views | None:
        args, kwargs = list(self.call.positional), dict(self.call.named)
        if change is not None:
            key, at, leaf = change
            holder: Any = args if isinstance(key, int) else kwargs
            holder[key] = with_leaf(holder[key], at, leaf)
        watch = CallWatch(keep=lambda path: False)
        with torch.inference_mode(), watch.of(self.call.module), self._tap(watch.by_rows):
            try:
                out = self.call.module(*copied(args), **copied(kwargs))
            except Exception as error:  # noqa: BLE001  a class may raise anything for values that are not its own
                self.failed = f"{type(error).__name__}: {error}"
                return None
        views: Views = {("out", at): tensor for at, tensor in tensors(out)}
        self.sites = [each.path for each in watch.calls[0].attended]
        for number, attended in enumerate(watch.calls[0].attended):
            views |= {("q", number): attended.q, ("k", number): attended.k}
            if isinstance(attended.mask, Tensor):
                views["mask", number] = attended.mask
        return views


def described(found: Sequence[tuple[int, tuple[int, ...]]], size: int, rows: int) -> Pattern:
    """The pattern of which rows of `rows` moved with some indices of `size`."""
    if not any(each for _, each in found):
        return "none"
    start = found[0][1][0] if found[0][1] else -1
    if all(each == (start + index,) for index, each in found):
        return Rows(start)
    if len(found[0][1]) == 1 and all(each == (start + index,) or (index and not each) for index, each in found):
        return Rows(start, first=rows - start)
    if size > 1 and all(len(each) == rows for _, each in found):
        return "all"
    each = len(found[0][1])
    ends = [(index, min(start + (index + 1) * each, rows)) for index, _ in found]  # the last run may be shorter
    runs = all(
        run == tuple(range(start + index * each, end)) for (index, end), (_, run) in zip(ends, found, strict=True)
    )
    if each > 1 and size > 1 and (size - 1) * each < rows - start <= size * each and runs:
        return Runs(start, each)
    return "other"
