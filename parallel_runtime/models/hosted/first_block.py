"""A first-block cache over ComfyUI's unmodified module: while its first block changes little, the others are skipped.

    cached = CachedBlocks(model, spec_of(model))
    with cached.calling(residuals, threshold=0.1, total=sum_over_ranks, call_of=call_under_way) as seen:
        out = model(x, t, context=...)          # ComfyUI's forward as it is
    seen.skips                                  # whether its blocks but the first were skipped

What the first block adds to its tokens is compared with what it added in the last call that ran all blocks: the mean of
their difference's absolute values over that of the older one. Below the threshold each other block hands back what it
was given, and the last one of each list adds what the blocks of that list had added. What a model does between blocks
(a ControlNet's residuals) is computed anew. Source: the first-block cache of ParaAttention
(github.com/chengzeyi/ParaAttention), after TeaCache (arXiv 2411.19108).

Sums of all ranks that have rows of the call decide, so every rank decides the same. Owns one call. Does not own which
call's residuals are given (worker/hosted.py), nor which blocks follow one another (specs/spec.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.attention import SequenceParallelAttention
from ..block_chain import CACHE, Forward, chain_at
from ..specs import find_spec, why_without
from ..specs.spec import ShardingSpec
from ..specs.words import Each, Tokens, Word, parse, streams_in
from .call import TokenCall
from .stage import HandedOn

Total = Callable[[Tensor], Tensor]  # numbers of this rank to their sums over all ranks of the call
INSTEAD = "set step_cache to 0, or use the nodes EasyCache or LazyCache"


def refuse_step_cache(model: nn.Module, threshold: float) -> None:
    """Raise `ValueError` when blocks of a model cannot be skipped; nothing at a threshold of 0."""
    if not threshold:
        return
    spec = find_spec(model)
    reason = why_without(model) if spec is None else spec.unchained
    if spec is not None and spec.whole:
        reason = f"{next(iter(spec.whole))} computes between blocks with what those before it made"
    if reason:
        raise ValueError(f"step_cache={threshold:g}: {type(model).__name__} cannot skip blocks: {reason}; {INSTEAD}")


def refuse_stages_with_cache(stages: int, threshold: float) -> None:
    """Raise `ValueError` for a step cache with a pipeline, whose stages have some of the blocks each."""
    if threshold and stages > 1:
        raise ValueError(
            f"step_cache={threshold:g} needs all blocks on one rank, and pipefusion={stages} gives each some; "
            "set step_cache to 0, or pipefusion to 1 and raise ulysses or ring"
        )


@dataclass
class Residuals:
    """What blocks added in the last call of one conditioning that ran all of them, on this rank.

    `first`: of the first block, by tensor. `others`: of the other blocks by list of blocks, their sums in fp32; None
    for what the last block does not return.
    """

    first: list[Tensor] | None = None
    others: dict[str, list[Tensor | None]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        others = [each for added in self.others.values() for each in added if each is not None]
        return sum(each.nbytes for each in [*(self.first or ()), *others])


@dataclass
class CachedCall:
    """A call under way: how far it is, what it decided, and what its blocks add."""

    residuals: Residuals
    threshold: float
    total: Total
    call_of: Callable[[], TokenCall | None]
    next: int = 0
    change: float = math.inf  # what the first block added, compared with what it had added
    skips: bool = False
    new: Residuals = field(default_factory=Residuals)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a block stands: its number among all, its list, whether it is the last of that, and what it hands on."""

    number: int
    blocks: str
    last: bool
    handed: HandedOn


class CachedBlocks:
    """The blocks of `model`, hooked. Outside of `calling` they run as they are.

    What a block is given here is this rank's: the links are inside those that share tokens. The model is one that
    `refuse_step_cache` lets pass.
    """

    def __init__(self, model: nn.Module, spec: ShardingSpec) -> None:
        self._name = type(model).__name__
        self._seen: CachedCall | None = None
        modules = dict(model.named_modules())
        lists = {path: list(modules[path].children()) for path in spec.staged if path in modules}
        lists = {path: blocks for path, blocks in lists.items() if blocks}
        self._words = list(_words_of(spec, next(iter(lists))))
        self._blocks = 0
        for path, blocks in lists.items():
            for block in blocks:
                handed = HandedOn(spec.handed_on(path), block)
                place = Place(number=self._blocks, blocks=path, last=block is blocks[-1], handed=handed)
                chain_at(block).put(CACHE, partial(partial, self._placed, place))
                self._blocks += 1

    @contextmanager
    def calling(
        self, residuals: Residuals, *, threshold: float, total: Total, call_of: Callable[[], TokenCall | None]
    ) -> Iterator[CachedCall]:
        """Around one call of the model; `call_of`: which ranks share its tokens. `residuals` are renewed if it ends."""
        self._seen = seen = CachedCall(residuals, threshold, total, call_of)
        try:
            yield seen
        finally:
            self._seen = None
        if seen.next != self._blocks:
            raise ValueError(f"{self._name} ran {seen.next} of its {self._blocks} blocks in a call; {INSTEAD}")
        if not seen.skips:
            residuals.first, residuals.others = seen.new.first, seen.new.others

    def _placed(self, place: Place, inner: Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        seen = self._seen
        if seen is None:
            return inner(*args, **kwargs)
        if place.number != seen.next:
            raise ValueError(
                f"{self._name} runs block {place.number + 1} of {self._blocks} where its plan has block "
                f"{seen.next + 1}; {INSTEAD}"
            )
        seen.next += 1
        given, path = place.handed.read(args, kwargs), place.blocks
        if place.number == 0:
            before = [_copied(each) for each in _leaves(given)]  # a block may write to what it is given
            out = inner(*args, **kwargs)
            self._decide(seen, before, list(_leaves(out)))
            return out
        if seen.skips:
            return (
                _put(given, [_plus(*each) for each in _pairs(given, seen.residuals.others[path])])
                if place.last
                else given
            )
        sums = seen.new.others.get(path) or [None] * len(list(_leaves(given)))
        sums = [_minus(*each) for each in _pairs(given, sums)]
        out = inner(*args, **kwargs)
        seen.new.others[path] = [
            None if each is None or total is None else total.add_(each)
            for each, total in zip(_leaves(out), sums, strict=True)
        ]
        return out

    def _decide(self, seen: CachedCall, before: list[Any], after: list[Any]) -> None:
        """Whether the other blocks are skipped: one answer on all ranks."""
        pairs = list(zip(before, after, strict=True))
        added = [new.float() - old.float() for old, new in pairs if isinstance(new, Tensor)]
        kept, call = seen.residuals.first, seen.call_of()
        known = kept is not None and [each.shape for each in kept] == [each.shape for each in added]
        sums = torch.zeros(3, dtype=torch.float64, device=added[0].device)
        sums[2] = 0.0 if known else 1.0
        words = self._words if len(self._words) == len(added) else [None] * len(added)
        for new, old, word in zip(added, kept if known and kept is not None else added, words, strict=True):
            mine, older = _counted(call, new, word), _counted(call, old, word)
            sums[0] += (mine - older).abs().sum(dtype=torch.float64)
            sums[1] += older.abs().sum(dtype=torch.float64)
        difference, whole, unknown = seen.total(sums).tolist()
        seen.change = difference / whole if whole and not unknown else math.inf
        seen.skips = seen.change < seen.threshold
        seen.new.first = added
        if not seen.skips:  # before the new ones stand: they take as much
            seen.residuals.first, seen.residuals.others = None, {}


def total_over(sharing: Sequence[SequenceParallelAttention]) -> Total:
    """What sums up numbers over all ranks of these groups, in the order of ranks and on the CPU.

    Devices of two kinds may add in another order, and ranks that decide apart wait for each other for ever.
    """

    def total(sums: Tensor) -> Tensor:
        for group in sharing:
            sums = group.gather(sums[None], dim=0, lengths=[1] * group.parts).cpu().sum(0).to(sums.device)
        return sums

    return total


def _words_of(spec: ShardingSpec, blocks: str) -> Iterator[Word | None]:
    """What the plan says of each tensor that the first block hands on; None for one that is cut elsewhere."""
    said: Mapping[str, Any] = spec.cut.get(f"{blocks}.0", {})
    names = spec.handed_on(blocks)
    for name in [names] if isinstance(names, str) else names:
        word = parse(said[name]) if name in said else None
        yield from word.words if isinstance(word, Each) else [word]


def _counted(call: TokenCall | None, tensor: Tensor, word: Word | None) -> Tensor:
    """The rows that count on this rank: those of a stream that every rank has count on the first."""
    if call is None or word is None or not call.index or call.uncut.isdisjoint(streams_in(word)):
        return tensor
    if call.uncut.issuperset(streams_in(word)):
        return tensor[:0]
    return call.counted([run.stream for run in word.runs], tensor, word.dim) if isinstance(word, Tokens) else tensor


def _leaves(value: Any) -> Iterator[Any]:  # noqa: ANN401
    """What is in a value, tuples and lists as well, in order."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _put(value: Any, leaves: list[Any]) -> Any:  # noqa: ANN401
    """The value with these for its leaves, which are taken off the list."""
    return type(value)([_put(each, leaves) for each in value]) if isinstance(value, tuple | list) else leaves.pop(0)


def _pairs(value: Any, sums: list[Tensor | None]) -> Iterator[tuple[Any, Tensor | None]]:  # noqa: ANN401
    return zip(_leaves(value), sums, strict=True)


def _copied(leaf: Any) -> Any:  # noqa: ANN401
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _plus(leaf: Any, total: Tensor | None) -> Any:  # noqa: ANN401
    """A skipped list's result: what the last block does not return is None."""
    return None if total is None or not isinstance(leaf, Tensor) else (leaf.float() + total).to(leaf.dtype)


def _minus(leaf: Any, total: Tensor | None) -> Tensor | None:  # noqa: ANN401
    """The sum before a block: what it is given is taken off, as what it makes is added."""
    if not isinstance(leaf, Tensor):
        return None
    return -leaf.float() if total is None else total.sub_(leaf)
