"""What is found of one list of blocks: its flows, its attention, and the words of its blocks' arguments.

Blocks that are given alike are looked at once. Texts say flows by number; `named` fills in streams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .arguments import Text, find_words, joined
from .blocks import BlockList, NotFoundError
from .probe import ModuleProbe
from .record import ModuleCall, Tap
from .streams import Flow, find_attention, find_flows
from .values import Address, leaves, tensors


@dataclass
class ListWords:
    """One list. `attention`: site -> its words, in the order in which they were met."""

    blocks: BlockList
    flows: list[Flow]
    attention: dict[str, list[str]] = field(default_factory=dict)
    words: dict[str, Text] = field(default_factory=dict)  # of all arguments
    out: Text = ""

    @property
    def path(self) -> str:
        """Of the list."""
        return self.blocks.path

    @property
    def keys(self) -> list[tuple[object, ...]]:
        """What tells its flows from others."""
        return [(each.name, each.at, each.dim, each.grid) for each in self.flows]

    @property
    def tokens(self) -> dict[str, Text]:
        """The words of the flows' arguments."""
        names = {flow.name for flow in self.flows}
        return {name: text for name, text in self.words.items() if name in names}

    @property
    def others(self) -> dict[str, Text]:
        """The words of all other arguments."""
        names = {flow.name for flow in self.flows}
        return {name: text for name, text in self.words.items() if name not in names}

    def attention_words(self, streams: Sequence[str]) -> str | dict[str, str]:
        """As a plan has them: one word where all sites have the same."""
        said = {}
        for site, texts in self.attention.items():
            texts = [text for text in texts if not any(each.startswith(f"{text} within") for each in texts)]
            texts = sorted(texts, key=lambda text: text == "local")
            said[site] = "|".join(text.format(*streams) for text in texts)
        return next(iter(said.values())) if len(set(said.values())) == 1 else said


def named(text: Text, streams: Sequence[str]) -> Text:
    """The text with streams in the places of flows. A stream that takes several together stands for them."""
    if isinstance(text, tuple):
        return tuple(named(each, streams) for each in text)  # type: ignore[misc]
    return text.format(*streams)


def find_list(blocks: BlockList, tap: Tap) -> ListWords:
    """All of one list. Raises NotFoundError, with the module that no words describe."""
    found: ListWords | None = None
    for call in _kinds([call for call in blocks.calls if not call.number]):
        one = _find_block(call, blocks, tap, found.flows if found else None)
        found = one if found is None else _merged(found, one, call.path)
    if found is None:
        raise NotFoundError(f"{blocks.path} has no blocks")
    return found


def _kinds(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """A call of each kind of block: by class, arguments, and attention inside."""
    kinds: dict[object, ModuleCall] = {}
    for call in calls:
        given = tuple(
            (name, at, type(leaf), getattr(leaf, "shape", None))
            for name, value in call.args.items()
            if name != "transformer_options"
            for at, leaf in leaves(value)
        )
        attended = tuple((each.path.removeprefix(call.path), each.q.shape, each.k.shape) for each in call.attended)
        kinds.setdefault((type(call.module), given, attended), call)
    return list(kinds.values())


def _find_block(call: ModuleCall, blocks: BlockList, tap: Tap, known: Sequence[Flow] | None) -> ListWords:
    probe = ModuleProbe(call, tap)
    if not probe.base:
        raise NotFoundError(f"{call.path} does not run alone: {probe.failed}")
    if len(probe.sites) != len(call.attended):
        raise NotFoundError(f"{call.path} attends otherwise when it runs again: it keeps state between calls")
    flows = find_flows(probe)
    if known is not None:  # a last block may return fewer of them
        for one in flows:
            other = next((each for each in known if (each.name, each.at) == (one.name, one.at)), one)
            if other.tokens != one.tokens:
                raise NotFoundError(f"{call.path} has {one.tokens} tokens where blocks before have {other.tokens}")
        flows = [replace(each, out=_out_of(each, flows)) for each in known if _is_given(call, each)]
    if not flows:
        raise NotFoundError(f"{call.path} returns none of its arguments row by row: {_mixes(probe, tap)}")
    attends = find_attention(probe, flows)
    words = find_words(probe, flows, attends)
    attention: dict[str, list[str]] = {}
    for each in attends:
        texts = attention.setdefault(each.site, [])
        if each.word() not in texts:
            texts.append(each.word())
    out = _out_word(call, flows)
    return ListWords(blocks, list(flows), attention, words, out)


def _is_given(call: ModuleCall, flow: Flow) -> bool:
    return any(at == flow.at for at, _ in tensors(call.args.get(flow.name)))


def _out_of(flow: Flow, found: Sequence[Flow]) -> Address:
    return next((each.out for each in found if (each.name, each.at) == (flow.name, flow.at)), flow.out)


def _out_word(call: ModuleCall, flows: Sequence[Flow]) -> Text:
    found = {flow.out: flow.word(number) for number, flow in enumerate(flows)}
    return joined("return", call.out, found)


def _merged(one: ListWords, other: ListWords, path: str) -> ListWords:
    """Both of the same list. Raises NotFoundError where they say different things."""
    for site, texts in other.attention.items():
        mine = one.attention.setdefault(site, [])
        mine += [text for text in texts if text not in mine]
    for name, text in other.words.items():
        mine_said = one.words.setdefault(name, text)
        if mine_said == text:
            continue
        agreed = _agreed(mine_said, text)
        if agreed is None:
            raise NotFoundError(f"{path}: its argument {name!r} is {text!r} here and {mine_said!r} in other blocks")
        one.words[name] = agreed
    return one


def _agreed(one: Text, other: Text) -> Text | None:
    """A row for each token may be told from a row for each frame by its values alone: "frames" is both."""
    for frames, tokens in ((one, other), (other, one)):
        if isinstance(frames, str) and isinstance(tokens, str) and frames.startswith("frames"):
            if frames.partition(":")[2] == tokens:
                return frames
    return None


def _mixes(probe: ModuleProbe, tap: Tap) -> str:
    """The first module inside a block of whose input one row moves several rows of its output."""
    from .mixing import first_mixing

    return first_mixing(probe, tap)


def merge_calls(first: Mapping[str, ListWords], second: Mapping[str, ListWords]) -> dict[str, ListWords]:
    """What several calls of a model tell of its lists; what each of them told stays as it is."""
    found = dict(first)
    for path, other in second.items():
        if path not in found:
            found[path] = other
        else:
            mine = found[path]
            attention = {site: list(texts) for site, texts in mine.attention.items()}
            found[path] = _merged(replace(mine, attention=attention, words=dict(mine.words)), other, path)
    return found
