"""The word of each argument of a block: found by which rows of attention, masks and outputs move with its values.

A text says flows by number (streams.py). Owns the inference of words. Does not own what is run (probe.py).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .blocks import NotFoundError
from .probe import ModuleProbe, Rows, Runs, View
from .streams import Attends, Flow, Layout, tiled
from .values import Address, leaves, moved, tensors

Text = str | tuple[str, ...]
Seen = list[tuple[View, int, Layout]]  # a view, its dim of rows, and whose rows these are
OPTIONS = "transformer_options"


def find_words(probe: ModuleProbe, flows: Sequence[Flow], attends: Sequence[Attends]) -> dict[str, Text]:
    """The words of all arguments that have rows of tokens, flows among them."""
    seen = views_of(flows, attends)
    words: dict[str, Text] = {}
    for name, value in probe.call.args.items():
        if name.removeprefix("**") == OPTIONS:
            continue
        if (ranges := _ranges(probe, name, value, seen)) is not None:
            words[name] = ranges
            continue
        found = {flow.at: flow.word(number) for number, flow in enumerate(flows) if flow.name == name}
        for at, leaf in leaves(value):
            word = found.get(at) or _of_leaf(probe, name, at, leaf, flows, attends)
            if word is not None:
                found[at] = word
        if found:
            words[name] = joined(name, value, found)
    if any(str(text).startswith("ranges:") for text in words.values()):  # they choose among rows that look like frames
        words = {name: text for name, text in words.items() if not str(text).startswith("frames")}
    return words


def _of_leaf(
    probe: ModuleProbe,
    name: str,
    at: Address,
    leaf: Any,  # noqa: ANN401
    flows: Sequence[Flow],
    attends: Sequence[Attends],
) -> str | None:
    seen = views_of(flows, attends)
    if isinstance(leaf, Tensor):
        return _of_tensor(probe, name, at, leaf, flows, attends, seen)
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return _of_number(probe, name, at, leaf, seen, attends)
    return None


def views_of(flows: Sequence[Flow], attends: Sequence[Attends]) -> Seen:
    """Everything whose rows are tokens: queries, outputs, keys."""
    seen: Seen = [(("q", number), 2, each.queries) for number, each in enumerate(attends)]
    seen += [(("out", flow.out), flow.dim, [(number, 0, flow.tokens)]) for number, flow in enumerate(flows)]
    seen += [(("k", number), 2, each.keys) for number, each in enumerate(attends) if each.keys]
    return seen


def joined(name: str, value: Any, found: dict[Address, str]) -> Text:  # noqa: ANN401
    """One word of an argument from those of its leaves. Raises NotFoundError where no word says it."""
    if () in found:
        return found[()]
    if isinstance(value, dict):
        raise NotFoundError(f"its argument {name!r} holds tokens in a dictionary")
    every = [at for at, _ in tensors(value)]
    if len(set(found.values())) == 1 and set(every) == found.keys():
        return next(iter(found.values()))
    texts = []
    for number in range(len(value)):
        inside = {word for at, word in found.items() if at[0] == number}
        if len(inside) > 1:
            raise NotFoundError(f"its argument {name!r} holds tokens of several kinds in one of its values")
        texts.append(next(iter(inside), ""))
    return tuple(texts)


def _of_tensor(
    probe: ModuleProbe,
    name: str,
    at: Address,
    leaf: Tensor,
    flows: Sequence[Flow],
    attends: Sequence[Attends],
    seen: Seen,
) -> str | None:
    if (word := _of_grid(probe, name, at, leaf, flows, seen)) is not None:
        return word or None
    for dim in range(leaf.ndim):
        size = leaf.shape[dim]
        if not 1 < size <= probe.most:
            continue
        for view, view_dim, layout in seen:
            pattern = probe.pattern(name, at, dim, view, view_dim)
            if isinstance(pattern, Rows) and pattern.first is None:
                names = tiled(layout, pattern.start, size)
                if names is None and len(layout) == 1 and dim == 1 and pattern.start + size == _rows(layout):
                    return f"last:{{{layout[0][0]}}}"
                if names is None or any(flows[each].grid for each in names):
                    continue
                return _runs(names) + (f"@{dim}" if dim != 1 else "")
            if isinstance(pattern, Runs):
                names = tiled(layout, pattern.start, min(pattern.each * size, _rows(layout)))
                if names is not None and len(names) == 1 and dim == 1:
                    return f"frames{leaf.ndim}:{{{names[0]}}}"
    return _of_mask(probe, name, at, leaf, attends)


def _of_grid(probe: ModuleProbe, name: str, at: Address, leaf: Tensor, flows: Sequence[Flow], seen: Seen) -> str | None:
    """The word for rows and columns of a grid; "": it has one row for each frame, which stay; None: no grid's."""
    for number, flow in enumerate(flows):
        if not flow.grid:
            continue
        for dim, size in enumerate(leaf.shape):
            if size == flow.tokens and size > 1:
                queries = [view for view, _, layout in seen if view[0] == "q" and [number] == [f for f, *_ in layout]]
                if any(probe.pattern(name, at, dim, view, 2) == Rows(0) for view in queries):
                    return f"flat:grid@{dim}"
        places = [
            dim - axis
            for axis in range(3)
            for dim, size in enumerate(leaf.shape)
            if axis
            and 1 < size <= probe.most
            and probe.pattern(name, at, dim, ("out", flow.out), flow.dim + axis) == Rows(0)
        ]
        if places:
            return f"grid@{places[0]}"
        frames = [
            dim
            for dim, size in enumerate(leaf.shape)
            if 1 < size <= probe.most and probe.pattern(name, at, dim, ("out", flow.out), flow.dim) == Rows(0)
        ]
        if frames:
            return ""
    return None


def _of_mask(probe: ModuleProbe, name: str, at: Address, leaf: Tensor, attends: Sequence[Attends]) -> str | None:
    """The word of what reaches attention as its mask alone."""
    for number, each in enumerate(attends):
        view = ("mask", number)
        if view not in probe.base or not each.keys:
            continue
        rows = _rows(each.keys)
        if probe.base[view].shape[-1] != rows:
            continue
        for dim in range(leaf.ndim):
            if not 1 < leaf.shape[dim] <= probe.most:
                continue
            pattern = probe.pattern(name, at, dim, view, probe.base[view].ndim - 1)
            if not isinstance(pattern, Rows) or pattern.first is not None:
                continue
            names = tiled(each.keys, pattern.start, leaf.shape[dim])
            if names is None:
                continue
            queries = probe.base["q", number].shape[2]
            if dim == leaf.ndim - 1 and leaf.shape[dim] == rows and leaf.ndim > 2 and leaf.shape[-2] == queries:
                return f"order:{_runs(names)}"
            return _runs(names) + (f"@{dim}" if dim != 1 else "")
    return None


def _of_number(
    probe: ModuleProbe, name: str, at: Address, number: int, seen: Seen, attends: Sequence[Attends]
) -> str | None:
    """The word of a number that counts tokens: one less moves just the last of them, or the queries' number."""
    if not 0 < number <= max(_rows(layout) for _, _, layout in seen):
        return None
    views = probe.changed(name, at, number - 1)
    if views is None:
        return None
    for view, dim, layout in seen:
        if view not in views:
            continue
        rows = moved(probe.base[view], views[view], dim)
        if rows is None:
            cropped = [flow for each in attends for flow in each.first]
            return f"index:{{{cropped[0]}}}" if cropped else None
        for flow, start, length in layout:
            if rows == (start + number - 1,) and number <= length:
                return f"index:{{{flow}}}"
    return None


def _ranges(probe: ModuleProbe, name: str, value: Any, seen: Seen) -> Text | None:  # noqa: ANN401
    """The word of a list of (start, end, ...): one token less in a range moves that token's row."""
    if not (isinstance(value, (list, tuple)) and value and all(_is_range(each) for each in value)):
        return None
    for number, entry in enumerate(value):
        start, end = entry[:2]
        for view, dim, layout in seen:
            total = _rows(layout)
            last = total if end is None else end
            if last <= (start or 0) or last > total:
                continue
            views = probe.changed(name, (number, 1), last - 1)
            rows = moved(probe.base[view], views[view], dim) if views is not None and view in views else None
            if rows == (last - 1,):
                return f"ranges:{_runs([flow for flow, *_ in layout])}"
    return None


def _is_range(entry: object) -> bool:
    return (
        isinstance(entry, (tuple, list))
        and len(entry) >= 2
        and isinstance(entry[0], int)
        and (entry[1] is None or isinstance(entry[1], int))
    )


def _rows(layout: Layout) -> int:
    return sum(length for *_, length in layout)


def _runs(flows: Sequence[int]) -> str:
    return "+".join(f"{{{flow}}}" for flow in flows)
