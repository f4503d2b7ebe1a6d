"""What tokens a block has: the arguments that it returns changed, and where their rows lie in its attention.

A flow is such an argument. Its tokens lie in one dim, or in three of a grid of frames, rows and columns. Texts of words
say flows by number, "{0}+{1}", since streams get their names where lists are put together (compose.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .blocks import NotFoundError
from .probe import ModuleProbe, Rows, View
from .values import Address, moved, tensors

Layout = list[tuple[int, int, int]]  # (flow, start, rows), one after another
SIDES = {"q": "queries", "k": "keys"}


@dataclass(frozen=True)
class Flow:
    """An argument of a block whose rows are tokens. `dim`: of the tokens, or the first of a grid's three."""

    name: str
    at: Address
    dim: int
    tokens: int
    out: Address
    grid: bool = False
    same_as: int | None = None  # an earlier flow whose tokens are the same ones: what both have is added up

    def word(self, number: int) -> str:
        """What cuts it, or makes it whole."""
        return f"grid@{self.dim}" if self.grid else f"{{{number}}}" + (f"@{self.dim}" if self.dim != 1 else "")


@dataclass(frozen=True)
class Attends:
    """One attention call of a block: which flows are its queries and keys; no keys: they are no flow's.

    `first`: flows of which only the first tokens are there.
    """

    site: str
    queries: Layout
    keys: Layout
    first: frozenset[int] = frozenset()
    within: str = ""  # the attribute of its module that says how far away keys are

    def word(self) -> str:
        """What a plan says of it."""
        if self.within:
            return f"{{{self.queries[0][0]}}} within {self.within}"
        queries = "+".join(f"{'index:' if flow in self.first else ''}{{{flow}}}" for flow, *_ in self.queries)
        if not self.keys:
            return "local"
        keys = "+".join(f"{'index:' if flow in self.first else ''}{{{flow}}}" for flow, *_ in self.keys)
        return queries if queries == keys else f"{queries}<-{keys}"


def find_flows(probe: ModuleProbe) -> list[Flow]:
    """The flows of a block. Raises NotFoundError where it has none, naming what mixes its tokens."""
    found = []
    outs = {view: tensor for view, tensor in probe.base.items() if view[0] == "out"}
    taken: set[Address] = set()
    for name, value in probe.call.args.items():
        for at, leaf in tensors(value):
            for view, out in outs.items():
                if out.shape != leaf.shape or view[1] in taken:
                    continue
                dims = _token_dims(probe, name, at, view)
                if not dims:
                    continue
                taken.add(view[1])
                if len(dims) == 1:
                    found.append(Flow(name, at, dims[0], leaf.shape[dims[0]], view[1]))
                else:
                    first = dims[-1] - 2
                    found.append(Flow(name, at, first, math.prod(leaf.shape[first : first + 3]), view[1], grid=True))
                break
    return [replace(each, same_as=_same(probe, found[:number], each)) for number, each in enumerate(found)]


def _same(probe: ModuleProbe, before: Sequence[Flow], flow: Flow) -> int | None:
    """The earlier flow that moves the same queries, row by row."""
    for view in (view for view in probe.base if view[0] == "q"):
        mine = probe.pattern(flow.name, flow.at, flow.dim, view, 2)
        for number, other in enumerate(before):
            alike = other.tokens == flow.tokens and isinstance(mine, Rows)
            if alike and mine == probe.pattern(other.name, other.at, other.dim, view, 2):
                return number
    return None


def _token_dims(probe: ModuleProbe, name: str, at: Address, out: View) -> list[int]:
    """The dims of an argument of which each index moves the same index of the output, and some queries only."""
    leaf = dict(tensors(probe.call.args[name]))[at]
    dims = []
    for dim, size in enumerate(leaf.shape):
        if not 1 < size <= probe.most or probe.pattern(name, at, dim, out, dim) != Rows(0):
            continue
        views = [view for view in probe.base if view[0] == "q"]
        if any(probe.apart(name, at, dim, view) for view in views):
            dims.append(dim)
    return dims


def find_attention(probe: ModuleProbe, flows: Sequence[Flow]) -> list[Attends]:
    """What each attention call of a block is over. Raises NotFoundError for one that streams do not explain."""
    found = []
    for number, site in enumerate(probe.sites):
        queries, first = _layout(probe, flows, ("q", number), site)
        keys, _ = _layout(probe, flows, ("k", number), site, none=True)
        within = _window(probe, number, site) if len(queries) == 1 and queries == keys else ""
        found.append(Attends(site, queries, keys, first, within))
    return found


def _window(probe: ModuleProbe, number: int, site: str) -> str:
    """The attribute by which an attention's module makes a mask of a window, from its own tokens; "" for none."""
    mask = probe.base.get(("mask", number))
    rows = probe.base["q", number].shape[2]
    if mask is None or mask.ndim < 2 or tuple(mask.shape[-2:]) != (rows, rows):
        return ""
    seen = mask.reshape(-1, rows, rows)[0]
    seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    width = int(seen[0].sum()) - 1
    at = torch.arange(rows)
    if width >= rows - 1 or not torch.equal(seen, (at[:, None] - at).abs() <= width):
        return ""
    module = probe.call.module.get_submodule(site)
    return next((name for name, value in vars(module).items() if type(value) is int and value == width), "")


def _layout(
    probe: ModuleProbe, flows: Sequence[Flow], view: View, site: str, *, none: bool = False
) -> tuple[Layout, frozenset[int]]:
    """Where the tokens of flows lie in the queries or keys of an attention call; `none`: they may be no flow's."""
    where = f"{probe.call.path}.{site}".rstrip(".")
    rows = probe.base[view].shape[2]
    found: Layout = []
    first: set[int] = set()
    for number, flow in enumerate(flows):
        if flow.same_as is not None:
            continue
        place = _in_grid(probe, flow, view, where) if flow.grid else _in_rows(probe, flow, view, where)
        if place is not None:
            found.append((number, place.start, place.first or flow.tokens))
            first |= {number} if place.first is not None else set()
    found.sort(key=lambda each: each[1])
    if not found and not none:
        raise NotFoundError(f"{where} has {SIDES[view[0]]} that are no tokens of its block's streams")
    if found and tiled(found, 0, rows) is None:
        beside = rows - sum(length for *_, length in found)
        raise NotFoundError(
            f"{where} has {beside} {SIDES[view[0]]} beside the {rows - beside} that are tokens of its block's streams"
            if beside > 0
            else f"{where} has {rows} {SIDES[view[0]]} that are not its streams' tokens one after another"
        )
    return found, frozenset(first)


def _in_rows(probe: ModuleProbe, flow: Flow, view: View, where: str) -> Rows | None:
    """Where a flow's tokens lie; None for nowhere."""
    pattern = probe.pattern(flow.name, flow.at, flow.dim, view, 2)
    if pattern == "none":
        return None
    if not isinstance(pattern, Rows):
        raise NotFoundError(f"{where} {_misfit(probe, flow, view)}")
    return pattern


def _misfit(probe: ModuleProbe, flow: Flow, view: View) -> str:
    """What an attention call does with a flow's tokens, which are none of its rows one after another."""
    seen, leaf = probe.base[view], dict(tensors(probe.call.args[flow.name]))[flow.at]
    rows, side = seen.shape[2], SIDES[view[0]]
    if flow.dim and seen.shape[0] > leaf.shape[0]:
        return (
            f"has tokens as rows of its batch: {seen.shape[0]} rows of {rows} {side} where its block has "
            f"{leaf.shape[0]} of {flow.tokens} tokens"
        )
    found = []
    for index in sorted({0, flow.tokens // 2, flow.tokens - 1}):
        views = probe.moves(flow.name, flow.at, flow.dim, index)
        found.append(len((moved(seen, views[view], 2) if views is not None and view in views else None) or ()))
    if max(found) > 1:
        return f"mixes tokens: one of {flow.name} moves {max(found)} of its {rows} {side}"
    if min(found):
        return f"takes the tokens of {flow.name} in an order of its own"
    return f"takes some of the {flow.tokens} tokens of {flow.name} alone, as {rows} {side}"


def _in_grid(probe: ModuleProbe, flow: Flow, view: View, where: str) -> Rows | None:
    """The same of a grid's tokens, which are all or none."""
    patterns = [probe.pattern(flow.name, flow.at, dim, view, 2) for dim in range(flow.dim, flow.dim + 3)]
    if all(each in ("none", "reshaped") for each in patterns):
        return None
    rows = probe.base[view].shape[2]
    if rows != flow.tokens:
        raise NotFoundError(f"{where} attends over {rows} of the {flow.tokens} tokens of a grid")
    return Rows(0)


def tiled(layout: Layout, start: int, rows: int) -> list[int] | None:
    """The flows whose tokens are just these rows, in their order; None where there are none."""
    found, at = [], start
    for flow, first, length in layout:
        if first == at and at + length <= start + rows:
            found.append(flow)
            at += length
    return found if found and at == start + rows else None
