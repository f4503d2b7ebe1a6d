"""Blocks of ComfyUI's unmodified module as graphs of torch's compiler, below the hooks that share its tokens.

    blocks = blocks_of(model)
    run = CompiledRun(blocks, graphs, watch, forms)
    with run.calling():
        out = model(x, t, context=...)
    run.report()

What is compiled is the block's own forward, as the class has it. Attention is one operator in it (traced_attention.py),
and the lengths of tokens are symbols, so one graph serves all blocks of a kind, every plan, size and length of text. A
block's weights are inputs of its graph, wherever they lie. A kind of block of which no graph can be made runs as usual.

Owns which blocks have a graph and what they are given. Does not own how a graph is made (graphs.py).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...wire.replies import CompiledReport as Report
from ..block_chain import Entrance, Forward
from ..specs import find_spec
from ..specs.spec import ShardingSpec
from .attention import installed
from .closures import held_by, holding
from .graphs import Graphs, NoGraphError, Watch
from .hook_points import find_hook_points
from .lightricks import GuideMask
from .side_branches import Form
from .sites import name_site
from .traced_attention import OPTIONS, GraphAttention, graph_attention

Forms = Callable[[nn.Module], Form]  # of a block, which LoRAs run as side branches of its layers
PATCHES = "patches"
ROWS_KEPT = 8  # rows of tokens: both prompts of a few sizes, for all blocks of a step
# What ComfyUI and its classes say of a call in `transformer_options`.
TOLD = frozenset(("block_index", "block_type", "total_blocks", "cond_or_uncond", "uuids", "sigmas", "sample_sigmas"))
TOLD |= {"minimax_h3_layout"}  # an object, as newer ComfyUIs' MiniMax H3 has it

OURS = __name__.removesuffix("models.hosted.compiled")
CACHED = type(lru_cache(len))
NAMED = (FunctionType, BuiltinFunctionType, ModuleType, type)  # that a function's names may stand for, and are known


@dataclass
class Kind:
    """Blocks of one list and class. `options`: where `transformer_options` stands.

    `with_loras`: `forward` with the form of its LoRAs before all else, so that graphs tell forms apart.
    `unread`: what of `TOLD` no block reads; `reason`: why they have no graph. `ranges`: where an argument of ranges
    stands that may be one range, and its name (ShardingSpec.row_ranges). `unread_within`: as `unread`, of functions
    that they are given, by their code.
    """

    title: str
    forward: Forward
    with_loras: Forward
    options: int | None
    unread: frozenset[str]
    reason: str = ""
    ranges: tuple[int, str] | None = None
    unread_within: dict[CodeType, frozenset[str]] = field(default_factory=dict)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """What the graph is given, and `transformer_options` as the class gave them, which attention gets."""
        if self.ranges is not None:
            place, name = self.ranges
            device = next(each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            if name in kwargs:
                kwargs = {**kwargs, name: _one_range(kwargs[name], device)}
            elif place < len(args):
                args = (*args[:place], _one_range(args[place], device), *args[place + 1 :])
        return self.read(tuple(map(_laid_out, args)), {name: _laid_out(value) for name, value in kwargs.items()})

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments without what no block reads of `transformer_options`, and those as the class gave them.

        What the options tell of a call, and patches of which there are none, are left out for the graph: it would be
        made anew for other ones. A function that a block is given may have them, too.
        """
        by_place = OPTIONS not in kwargs and self.options is not None and self.options < len(args)
        options = args[self.options or 0] if by_place else kwargs.get(OPTIONS)
        if type(options) is dict:
            read = _without(self.unread, options)
            if by_place:
                args = (*args[: self.options], read, *args[(self.options or 0) + 1 :])
            else:
                kwargs = {**kwargs, OPTIONS: read}
        within = list[dict[str, Any]]()
        args = tuple(self._told_less(value, within) for value in args)
        kwargs = {name: self._told_less(value, within) for name, value in kwargs.items()}
        return args, kwargs, within[0] if within and options is None else options

    def _told_less(self, value: Any, within: list[dict[str, Any]]) -> Any:  # noqa: ANN401
        """An argument: a function that has options, with what it reads of them; they are added as they were."""
        if type(value) is not FunctionType or not (held := held_by(value)) or type(held[0].get(OPTIONS)) is not dict:
            return value
        if value.__code__ not in self.unread_within:
            self.unread_within[value.__code__] = _unread_by([value])
        within.append(held[0][OPTIONS])
        return holding(
            value, ({**held[0], OPTIONS: _without(self.unread_within[value.__code__], within[-1])}, *held[1:])
        )


@dataclass
class CompiledBlocks:
    """The blocks of a model, each with what stands for its forward, and their kind; `reason`: why there are none."""

    entrances: list[tuple[Entrance, Kind, nn.Module]] = field(default_factory=list)
    reason: str = ""


class CompiledRun:
    """One request by graphs: what ran without, and why. `watch` is told when one is made."""

    def __init__(self, blocks: CompiledBlocks, graphs: Graphs, watch: Watch, forms: Forms) -> None:
        self._blocks, self._graphs, self._watch, self._forms = blocks, graphs, watch, forms
        known = [blocks.reason, *(kind.reason for _, kind, _ in blocks.entrances)]
        self._uncompiled, self._reasons = 0, dict.fromkeys(filter(None, known))

    @contextmanager
    def calling(self, *sharing: object) -> Iterator[None]:
        """Around a call of the model, however it is shared. Outside of it the blocks run as they are."""
        attention = graph_attention(installed())
        for entrance, kind, block in self._blocks.entrances:
            entrance.instead = partial(self.block, kind, block, entrance.inner, attention)
        try:
            yield
        finally:
            for entrance, *_ in self._blocks.entrances:
                entrance.instead = None

    def block(
        self,
        kind: Kind,
        block: nn.Module,
        inner: Forward,
        attention: GraphAttention,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """A block's output; `inner` computes it without a graph."""
        reason = kind.reason
        if any(isinstance(value, GuideMask) for value in (*args, *kwargs.values())):
            reason = f"{kind.title} attends by masks of guide frames, which are no tensor"
        if not reason:
            mine, named, attention.options = kind.given(args, kwargs)
            form = (kind.title, *map(_form, mine), *((name, _form(value)) for name, value in named.items()))
            loras = self._forms(block)
            function, first = (kind.with_loras, (loras, block)) if loras else (kind.forward, (block,))
            try:
                return self._graphs.whole(function, (loras, *form), self._watch, *first, *mine, **named)
            except NoGraphError as error:
                reason = f"torch's compiler can make no graph of {kind.title}: {error}"
        self._uncompiled += 1
        self._reasons[reason] = None
        return inner(*args, **kwargs)

    def report(self) -> Report:
        """What graphs there are, and what this request's took."""
        return Report(
            graphs=self._graphs.made,
            uncompiled_blocks=self._uncompiled,
            compile_s=self._watch.compile_s,
            reason="; ".join(self._reasons),
        )


def blocks_of(model: nn.Module) -> CompiledBlocks:
    """The blocks of a model, each with a link in its chain (block_chain.py)."""
    spec = find_spec(model)
    if spec is None:
        return CompiledBlocks(reason=f"this pack has no plan of {type(model).__name__}, which would name its blocks")
    try:
        points = find_hook_points(model, spec)
    except ValueError as error:  # a plan for another ComfyUI
        return CompiledBlocks(reason=str(error))
    inner, switch = {point.module for point in points if point.arguments or point.results}, installed()
    modules, found = dict(model.named_modules()), CompiledBlocks()
    for path in spec.attention:
        kinds: dict[type, Kind] = {}
        for block in modules[path].children() if path in modules else ():
            kind = kinds.setdefault(type(block), _kind_of(block, spec, path))
            within = next((each for each in block.modules() if each is not block and each in inner), None)
            if within is not None:
                kind.reason = f"{kind.title} shares tokens inside, at {type(within).__name__}"
            found.entrances.append((Entrance(block), kind, block))
    for site in (site for point in points for site in point.sites):
        name_site(switch, *site)
    return found


def _kind_of(block: nn.Module, spec: ShardingSpec, path: str) -> Kind:
    taken = list(inspect.signature(type(block).forward).parameters)[1:]
    others = [method for method in spec.methods_of(path) if method != "forward"]
    reason = (
        f"the model calls its blocks by {' and '.join(others)}, and their forward alone is compiled" if others else ""
    )
    options = taken.index(OPTIONS) if OPTIONS in taken else None
    classes = {base for each in block.modules() for base in type(each).__mro__ if issubclass(base, nn.Module)}
    functions = [value for each in classes for value in vars(each).values() if isinstance(value, FunctionType)]
    forward = type(block).forward

    def with_loras(form: Form, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return forward(*args, **kwargs)

    named = spec.row_ranges.get(path)
    ranges = (taken.index(named), named) if named in taken else None
    return Kind(type(block).__name__, forward, with_loras, options, _unread_by(functions), reason, ranges)


def _without(unread: frozenset[str], options: dict[str, Any]) -> dict[str, Any]:
    """What a block reads of its options."""
    left_out = unread if options.get(PATCHES) else {*unread, PATCHES}
    return {name: value for name, value in options.items() if name not in left_out}


def _unread_by(functions: Iterable[FunctionType]) -> frozenset[str]:
    """What of `TOLD` neither functions nor those that they name read."""
    read = _with_helpers(functions)
    return frozenset() if read is None else TOLD - {word for each in read for word in _words(each.__code__)}


def _with_helpers(functions: Iterable[FunctionType]) -> set[FunctionType] | None:
    """Functions, and those of modules that they name, and so on; None where one is not known.

    Not those of torch, which read no options of ComfyUI's.
    """
    found, left = set[FunctionType](), list[Any](functions)
    while left:
        each = left.pop()
        if isinstance(each, partial):
            left += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, CACHED):
            left.append(each.__wrapped__)
        elif isinstance(each, FunctionType) and not _reads_nothing(each) and each not in found:
            found.add(each)
            left += _named_by(each)
        elif not isinstance(each, NAMED) and callable(each) and not _reads_nothing(type(each)):
            return None
    return found


def _named_by(function: FunctionType) -> Iterator[Any]:
    """What a function finds in its module, in those that its module names, and around itself."""
    names, known = set(_names(function.__code__)), function.__globals__
    for place in (known, *(vars(each) for each in map(known.get, names) if isinstance(each, ModuleType))):
        yield from (place[name] for name in names & place.keys())
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != CellType())
    yield vars(function).get("__wrapped__")


def _reads_nothing(value: Any) -> bool:  # noqa: ANN401  a function or a class
    """Whether it is torch's, or ours: attention, which gets the options as they are."""
    module = value.__module__ or ""
    return module.partition(".")[0] in ("torch", "builtins", "typing") or module.startswith(OURS)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function asks its module for, and those inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _words(code: CodeType) -> Iterator[str]:
    """The texts in a function, and in those inside it."""
    for each in code.co_consts:
        if isinstance(each, str):
            yield each
        elif isinstance(each, CodeType):
            yield from _words(each)


def _one_range(ranges: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Ranges (start, end, row) as one with the row of each token; as they are if they leave a token out."""
    if not ranges or [start for start, *_ in ranges] != [0, *(end for _, end, *_ in ranges[:-1])]:
        return ranges
    runs = tuple((end - start, row) for start, end, row in ranges)
    kept = not any(isinstance(row, Tensor) for _, row in runs)
    return [(0, ranges[-1][1], (_rows if kept else _rows.__wrapped__)(runs, device))]


@lru_cache(ROWS_KEPT)
def _rows(runs: tuple[tuple[int, Any], ...], device: torch.device) -> Tensor:
    """The row of each token, (S,): of runs of so many tokens, each of one row or with a row for each of its tokens."""
    rows = (row if isinstance(row, Tensor) else torch.full((number,), row, device=device) for number, row in runs)
    return torch.cat(list(rows))


def _laid_out(value: Any) -> Any:  # noqa: ANN401
    """An argument with the strides that every block gives it: the first is often given views. As it is if expanded."""
    if isinstance(value, tuple | list):
        return type(value)(map(_laid_out, value))
    if not isinstance(value, Tensor) or 0 in value.stride():
        return value
    value = value.contiguous()
    return value.flatten().view(value.shape) if 1 in value.shape else value  # dims of one may have any stride


def _form(value: Any) -> object:  # noqa: ANN401
    """What of an argument a graph is made for: kinds and dtypes; of lengths, whether it is one."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(size == 1 for size in value.shape)
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return value.__code__ if isinstance(value, FunctionType) else type(value)
