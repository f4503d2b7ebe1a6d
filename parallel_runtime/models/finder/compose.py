"""Plans from what was found of lists of blocks: three, of which each cuts less than the one before.

1. Tokens are cut before the first block of all, and whole again as late as rows are still tokens.
2. Tokens are cut before the first block of each list, and whole after its last.
3. Tokens are cut before each block, and whole after it: what runs between blocks has all tokens.

Which of them is right the proof says (proof.py). Owns the names of streams.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..specs.spec import ShardingSpec
from ..specs.words import GRID
from .arguments import Text, find_words, joined
from .between import Between, Stream
from .blocks import NotFoundError
from .lists import ListWords, named
from .probe import ModuleProbe, Rows
from .record import ModuleCall, Tap
from .streams import Flow
from .values import Address, tensors

UNSTAGED = "its plan was found, and is proven for ulysses and ring alone"
AS_BY_HAND, BY_LIST, BY_BLOCK = "cut once", "cut in each list", "cut in each block"
MOST_GATHERS = 3  # places after the last block that are tried, the latest first


Looked = tuple[Between, Sequence[ListWords]]


@dataclass(frozen=True)
class Candidate:
    """A plan to be proven. `cuts`: which of the three."""

    cuts: str
    spec: ShardingSpec


@dataclass
class Names:
    """Streams by list: for each flow the text that stands for it."""

    of: dict[str, list[str]] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    joined_on: set[str] = field(default_factory=set)  # lists whose tokens are those of lists before

    def new(self, each: ListWords, flow: int, rank: int) -> str:
        """A stream that begins at a flow, the list's `rank`-th by tokens."""
        kind, number = ("img", "txt")[min(rank, 1)], 1
        if each.flows[flow].grid:
            kind = GRID
        taken = {stream.name for stream in self.streams if kind != GRID}
        name = kind
        while name in taken:
            number += 1
            name = f"{kind}{number}"
        self.streams.append(Stream(name, each, flow, each.flows[flow].grid))
        return name


def candidates(lists: Sequence[ListWords], betweens: Sequence[Looked], tap: Tap, each_call: str) -> Iterator[Candidate]:
    """Plans, the one that cuts most first. `betweens`: of calls that have all lists, with what each told of them."""
    if betweens:
        between, own = betweens[0]
        names = chained_names(own, between)
        control = between.control(names.streams)
        for ending in _all_endings(betweens, tap)[::-1][:MOST_GATHERS]:
            plain, counted = (_chained(lists, names, ending, each_call, held=held) for held in (False, True))
            for spec in (plain, counted if counted != plain else None):
                if spec is not None:
                    yield Candidate(AS_BY_HAND, replace(spec, control=control))
    for cuts in (BY_LIST, BY_BLOCK):
        yield Candidate(cuts, _apart(lists, cuts, each_call))


def _all_endings(betweens: Sequence[Looked], tap: Tap) -> list["Ending"]:
    """The endings that all calls have, with the words of each."""
    found: list[Ending] = []
    for number, (between, own) in enumerate(betweens):
        here = {repr(each.gather): each for each in _endings(own, chained_names(own, between), between, tap)}
        if not number:
            found = list(here.values())
            continue
        found = [
            Ending(each.gather, _joined_cuts(each.cut, here[repr(each.gather)].cut))
            for each in found
            if repr(each.gather) in here
        ]
    return found


def _joined_cuts(one: Mapping[str, Mapping[str, Text]], other: Mapping[str, Mapping[str, Text]]) -> dict[str, Any]:
    return {path: {**one.get(path, {}), **other.get(path, {})} for path in dict.fromkeys([*one, *other])}


def _by_size(each: ListWords) -> list[int]:
    own = [number for number, flow in enumerate(each.flows) if flow.same_as is None]
    return sorted(own, key=lambda flow: -each.flows[flow].tokens)


def _texts(each: ListWords, said: Mapping[int, str]) -> list[str]:
    """For each flow its stream, by the flow whose tokens it has."""
    return [said[number if flow.same_as is None else flow.same_as] for number, flow in enumerate(each.flows)]


def fresh_names(lists: Sequence[ListWords]) -> Names:
    """Streams of their own for each list."""
    names = Names()
    for each in lists:
        said = {flow: names.new(each, flow, rank) for rank, flow in enumerate(_by_size(each))}
        names.of[each.path] = _texts(each, said)
    return names


def chained_names(lists: Sequence[ListWords], between: Between) -> Names:
    """Streams that go on from list to list where each row of the next is a row of one before."""
    names = Names()
    for each in lists:
        known = [_from_before(each, flow, names.streams, between) for flow in range(len(each.flows))]
        if names.streams and all(text is not None for text in known):
            names.of[each.path] = [text or "" for text in known]
            names.joined_on.add(each.path)
            continue
        said = {flow: names.new(each, flow, rank) for rank, flow in enumerate(_by_size(each))}
        names.of[each.path] = _texts(each, said)
    return names


def _from_before(each: ListWords, number: int, streams: Sequence[Stream], between: Between) -> str | None:
    """The streams whose tokens are all rows of a flow, in their order."""
    flow, first = each.flows[number], each.blocks.calls[0]
    place = (first.path, first.number)
    if flow.grid:
        return None
    return _rows_of(streams, between, place, flow.name, flow.at, flow.dim, flow.tokens)


def _rows_of(
    streams: Sequence[Stream],
    between: Between,
    place: tuple[str, int],
    name: str | None,
    at: Address,
    dim: int,
    rows: int,
) -> str | None:
    found = []
    for stream in streams:
        if stream.grid:
            continue
        pattern = between.pattern(stream, 0, place, name, at, dim)
        if pattern in ("none", "reshaped"):
            continue
        if not isinstance(pattern, Rows) or pattern.first is not None:
            return None
        found.append((pattern.start, between.size(stream, 0), stream.name))
    found.sort()
    end = 0
    for start, length, _ in found:
        if start != end:
            return None
        end += length
    return "+".join(name for *_, name in found) if end == rows and found else None


@dataclass(frozen=True)
class Ending:
    """Where tokens become whole, and what the modules up to there are given that has rows of them."""

    gather: Mapping[str, Text]
    cut: Mapping[str, Mapping[str, Text]]


def _endings(lists: Sequence[ListWords], names: Names, between: Between, tap: Tap) -> Iterator[Ending]:
    """From the last block on, module by module, as long as rows are tokens."""
    last = lists[-1]
    yield Ending({f"{last.path}.-1": named(last.out, names.of[last.path])}, {})
    cut: dict[str, Mapping[str, Text]] = {}
    for call in between.after:
        words = _words_after(call, names, between, tap)
        gather = _gather_of(call, names, between)
        if words is None or gather is None:
            return
        if words:
            cut[call.path] = words
        yield Ending({call.path: gather}, dict(cut))


def _gather_of(call: ModuleCall, names: Names, between: Between) -> Text | None:
    """The word of a module's output, where every row of it is a token's."""
    found: dict[Address, str] = {}
    for at, leaf in tensors(call.out):
        word = _word_of(call, None, at, leaf.shape, names, between)
        if word is not None:
            found[at] = word
    try:
        return joined("return", call.out, found) if found else None
    except NotFoundError:
        return None


def _word_of(
    call: ModuleCall, name: str | None, at: Address, shape: Sequence[int], names: Names, between: Between
) -> str | None:
    place = (call.path, call.number)
    for stream in (each for each in names.streams if each.grid):
        for dim in range(len(shape) - 2):
            if all(
                shape[dim + axis] == between.size(stream, axis)
                and (shape[dim + axis] == 1 or between.pattern(stream, axis, place, name, at, dim + axis) == Rows(0))
                for axis in range(3)
            ):
                return f"grid@{dim}"
    for dim, rows in enumerate(shape):
        if rows > 1 and (text := _rows_of(names.streams, between, place, name, at, dim, rows)) is not None:
            return text + (f"@{dim}" if dim != 1 else "")
    return None


def _words_after(call: ModuleCall, names: Names, between: Between, tap: Tap) -> Mapping[str, Text] | None:
    """The words of a later module's arguments that are not tokens themselves; None where it takes no tokens."""
    flows: list[Flow] = []
    texts: list[str] = []
    outs = list(tensors(call.out))
    if len(outs) != 1:
        return None
    for name, value in call.args.items():
        for at, leaf in tensors(value):
            word = _word_of(call, name, at, leaf.shape, names, between)
            if word is None:
                continue
            dim = int(word.partition("@")[2] or 1)
            grid = word.startswith("grid")
            flows.append(Flow(name, at, dim, leaf.shape[dim], outs[0][0], grid))
            texts.append(word.partition("@")[0])
    if not flows:
        return None
    probe = ModuleProbe(call, tap)
    words = find_words(probe, flows, [])
    held = {flow.name for flow in flows}
    return {name: named(text, texts) for name, text in words.items() if name not in held}


def _chained(
    lists: Sequence[ListWords], names: Names, ending: Ending, each_call: str, *, held: bool
) -> ShardingSpec | None:
    """The first plan. `held`: ranges are counted by the model, of text that is cut already."""
    cut: dict[str, dict[str, Any]] = {}
    gather: dict[str, Any] = dict(ending.gather)
    before: ListWords | None = None
    for each in lists:
        streams = names.of[each.path]
        if each.path not in names.joined_on:
            cut[f"{each.path}.0"] = {name: named(text, streams) for name, text in each.tokens.items()}
            if before is not None:
                gather.setdefault(f"{before.path}.-1", named(before.out, names.of[before.path]))
        others = {name: named(text, streams) for name, text in each.others.items()}
        if held and each.path in names.joined_on:
            others = {name: _held(text) for name, text in others.items()}
        if others:
            cut[f"{each.path}.*"] = others
        before = each
    for path, words in ending.cut.items():
        cut[path] = dict(words)
    return _spec(lists, names, cut, gather, each_call)


def _held(text: Any) -> Any:  # noqa: ANN401
    """Ranges of which the model counted all but the last stream as it is cut."""
    if not isinstance(text, str) or not text.startswith("ranges:") or "+" not in text:
        return text
    *others, last = text.removeprefix("ranges:").split("+")
    return "ranges:" + "+".join([*(f"-{each}" for each in others), last])


def _apart(lists: Sequence[ListWords], cuts: str, each_call: str) -> ShardingSpec:
    """The second and the third plan."""
    names = fresh_names(lists)
    cut: dict[str, dict[str, Any]] = {}
    gather: dict[str, Any] = {}
    for each in lists:
        streams = names.of[each.path]
        tokens = {name: named(text, streams) for name, text in each.tokens.items()}
        others = {name: named(text, streams) for name, text in each.others.items()}
        if cuts == BY_BLOCK:
            cut[f"{each.path}.*"] = tokens | others
            gather[f"{each.path}.*"] = named(each.out, streams)
        else:
            cut[f"{each.path}.0"] = tokens
            if others:
                cut[f"{each.path}.*"] = others
            gather[f"{each.path}.-1"] = named(each.out, streams)
    spec = _spec(lists, names, cut, gather, each_call)
    if spec is None:
        raise NotFoundError(f"{lists[-1].path}: no words say how its blocks hand on their tokens")
    return spec


def _spec(
    lists: Sequence[ListWords], names: Names, cut: Mapping[str, Any], gather: Mapping[str, Any], each_call: str
) -> ShardingSpec | None:
    attention = {each.path: each.attention_words(names.of[each.path]) for each in lists}
    try:
        return ShardingSpec(attention=attention, cut=cut, gather=gather, each_call=each_call, unstaged=UNSTAGED)
    except ValueError:
        return None
