"""The vocabulary of sharding specs: what a word says of the tokens in an argument, parsed once into a frozen object.

A *stream* is a run of tokens that ranks share: `img`, `txt`. The first word that names one stream alone (`"img"`) takes
its length from the tensor; from then on the stream's length is known.

Words for a tensor, or for each tensor in a tuple or list:

    "img"             dim 1 holds the tokens of img: this rank's are taken, or those of all ranks put together
    "img@2"           the same in dim 2
    "heads:img"       the same in dim 1; of a tensor of 4 dims in dim 2, behind its heads
    "txt+img"         two streams, one after another; "-txt+img": of txt, only this rank's are there already
    "img+*"           tokens of img first; what follows stays as it is
    "rest:txt+img"    the same as "txt+img"; img is new, and is all that txt leaves. A value that ends with txt stays
                      as it is
    "order:txt+img"   a mask over all tokens in its last two dims: into the order in which the ranks hold them
    "frames:img"      one row for each frame: becomes one row for each token, then cut; "frames4:img" if it has 4 dims
    "grid@1"          dims 1, 2, 3 are time, height and width: cut along the longer of the last two
    "flat:grid@1"     the same, flattened into dim 1

A dim of size 1 holds for all tokens and stays as it is. Words for other values:

    "ranges:txt+img"  a list of (start, end, ...) over these tokens; a range without tokens of this rank is left out
    "guides:vid"      LTX's attention mask of guide frames, over these tokens
    "index:img"       a number of tokens of img, counted from the first
    "last:img"        rows in dim 1 for the last tokens of img; those before have none
    "every:txt"       a number of tokens, which all ranks have: the length of txt, which is never cut; another one in a
                      later call of a module is its length from there on
    ("img", "")       a tuple of words, for a tuple or list of as many values; "" leaves a value as it is

Words for attention, of the queries and keys in an attention call:

    "txt+img"         both are these streams, one after another
    "vid<-aud"        queries are vid, keys are aud
    "local"           keys are whole on every rank (cross attention): nothing is exchanged
    "vid+index:txt"   of txt only the first tokens, as many as the last "index:txt" said
    "txt+img|img"     the first of them in which there are as many queries and keys as in the call
    "img|local"       the same; keys are whole where they are no more than the tokens that every rank has
    "kept:txt+img"    before the keys of img those of txt that the class kept of a call before (`keeps`), whole on
                      every rank, so none sends them: all keys that img leaves. First of the keys, and only where
                      this call has no tokens of txt
    "frames"          queries and keys are whole frames of the grid, as many as the call has
    "frames again"    the same, in a module that attends several times in a run: the keys of its first call come first
                      in all later ones, and are sent once
    "x within w"      keys at most as many tokens away as the attention's module says in its attribute `w`; it makes a
                      mask of that itself, from its own tokens. Where `w` is None they are all of x

Owns the text of words. Does not own what a word does to a tensor (models/hosted/cuts.py, places.py).
"""

import re
from dataclasses import dataclass
from typing import Union

GRID = "grid"
FIRST = "index:"  # before the name of a stream: its first tokens, as many as the word "index:" said
KEPT = "kept:"  # the same: its tokens in a call before, whose keys the class kept
FORM = re.compile(r"(?:(?P<kind>[a-z]+)(?P<ndim>\d*):)?(?P<runs>[a-z0-9_+*-]+)(?:@(?P<dim>\d+))?")
RUN = re.compile(r"-?[a-z][a-z0-9_]*")
WITHIN = re.compile(r"([a-z][a-z0-9_]*) within ([a-z][a-z0-9_]*)")
ATTENDED = re.compile(r"(?:index:|kept:)?[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class StreamTokens:
    """The tokens of one stream. `held`: only this rank's are there."""

    stream: str
    held: bool = False


@dataclass(frozen=True)
class Tokens:
    """Dim `dim` holds these runs, one after another; `rest`: and more, which stays as it is.

    `opens`: the last run is of a stream that is new, whose length is what the others leave.
    `heads`: a tensor of 4 dims has heads in dim 1 and the tokens in dim 2.
    """

    runs: tuple[StreamTokens, ...]
    dim: int = 1
    rest: bool = False
    opens: bool = False
    heads: bool = False


@dataclass(frozen=True)
class Frames:
    """A row for each frame of `stream` in dim 1. `ndim`: only where the tensor has as many dims."""

    stream: str
    ndim: int | None = None


@dataclass(frozen=True)
class Grid:
    """Time, height and width in dims `dim`, `dim + 1`, `dim + 2`; `flat`: flattened into `dim`."""

    dim: int
    flat: bool = False


@dataclass(frozen=True)
class Order:
    """A mask over all tokens of these runs."""

    runs: tuple[StreamTokens, ...]


@dataclass(frozen=True)
class Ranges:
    """A list of (start, end, ...) over the tokens of these runs."""

    runs: tuple[StreamTokens, ...]


@dataclass(frozen=True)
class Index:
    """A number of tokens of a stream."""

    stream: str


@dataclass(frozen=True)
class Last:
    """Rows for the last tokens of a stream."""

    stream: str


@dataclass(frozen=True)
class Every:
    """How many tokens of a stream all ranks have."""

    stream: str


@dataclass(frozen=True)
class Guides:
    """LTX's `GuideAttentionMask` over the tokens of a stream."""

    stream: str


@dataclass(frozen=True)
class Each:
    """A tuple of words, one for each value of a tuple or list. None: the value stays as it is."""

    words: tuple[Union["Word", None], ...]


Word = Tokens | Frames | Grid | Order | Ranges | Index | Last | Every | Guides | Each
WordText = str | tuple[str, ...]


@dataclass(frozen=True)
class Attention:
    """The streams of an attention call's queries and keys. `local`: keys are whole.

    `within`: the module's attribute that says how many tokens away keys may be; `window`: what it says.
    `frames`: they are any number of whole frames of the grid; `again`: later calls begin with the first one's keys.
    `otherwise`: what it is over where a call's lengths are not those of these streams.
    """

    queries: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    local: bool = False
    within: str = ""
    window: int | None = None
    frames: bool = False
    again: bool = False
    otherwise: Union["Attention", None] = None


UNPLANNED = Attention(queries=("unplanned",))  # in a block, but in none of the modules that its spec names


def parse(text: WordText) -> Word:
    """The word that `text` writes. Raises ValueError, with the text, for what no word is."""
    if isinstance(text, tuple):
        return Each(tuple(parse(part) if part else None for part in text))
    form = FORM.fullmatch(text)
    if form is None:
        raise ValueError(f"{text!r} is no word of a plan; write it as 'img', 'txt+img@2' or 'ranges:img'")
    kind, ndim, dim = form["kind"], form["ndim"], int(form["dim"] or 1)
    if (form["dim"] and kind not in (None, "flat")) or (ndim and kind != "frames"):
        raise ValueError(f"{text!r}: {kind!r} takes no such number; leave it out")
    if form["runs"] == GRID:
        if kind not in (None, "flat"):
            raise ValueError(f"{text!r}: 'grid' stands alone or as 'flat:grid'; use one of them")
        return Grid(dim, flat=kind == "flat")
    names = form["runs"].split("+")
    rest = kind is None and len(names) > 1 and names[-1] == "*"
    runs = _runs(names[:-1] if rest else names, text)
    if kind is None:
        return Tokens(runs, dim, rest)
    return _of_kind(kind, runs, ndim, text)


def _of_kind(kind: str, runs: tuple[StreamTokens, ...], ndim: str, text: str) -> Word:
    if kind == "order":
        return Order(runs)
    if kind == "ranges":
        return Ranges(runs)
    if kind == "rest":
        if len(runs) < 2 or runs[-1].held:
            raise ValueError(f"{text!r}: 'rest' takes streams, and last the one that is new; name two")
        return Tokens(runs, opens=True)
    kinds: dict[str, type[Index | Last | Every | Guides]]
    kinds = {"index": Index, "last": Last, "every": Every, "guides": Guides}
    if kind not in ("frames", "heads", *kinds):
        known = ", ".join(sorted(("flat", "frames", "heads", "order", "ranges", "rest", *kinds)))
        raise ValueError(f"{text!r}: {kind!r} is none of {known}; use one of them")
    if len(runs) != 1 or runs[0].held:
        raise ValueError(f"{text!r}: {kind!r} takes one stream; name one")
    stream = runs[0].stream
    if kind == "heads":
        return Tokens(runs, heads=True)
    if kind == "frames":
        return Frames(stream, int(ndim) if ndim else None)
    return kinds[kind](stream)


def parse_attention(text: str) -> Attention:
    """What `text` says of an attention call. Raises ValueError, with the text, for what it cannot be."""
    if text == "local":
        return Attention(local=True)
    if text in ("frames", "frames again"):
        return Attention((GRID,), (GRID,), frames=True, again=text != "frames")
    windowed = WITHIN.fullmatch(text)
    if windowed:
        return Attention((windowed[1],), (windowed[1],), within=windowed[2])
    first, *others = text.split("|")
    sides = [side.split("+") for side in first.split("<-")]
    names = [name for side in sides for name in side]
    misplaced = any(name.startswith(KEPT) for number, name in enumerate(names) if number != len(sides[0]))
    if len(sides) > 2 or "local" in others[:-1] or misplaced or not all(map(ATTENDED.fullmatch, names)):
        raise ValueError(
            f"{text!r} says nothing of attention; use 'txt+img', 'vid<-aud', 'local', 'frames', 'x within w' or "
            "'txt+img|img'"
        )
    otherwise = parse_attention("|".join(others)) if others else None
    return Attention(tuple(sides[0]), tuple(sides[-1]), otherwise=otherwise)


def _runs(names: list[str], text: str) -> tuple[StreamTokens, ...]:
    wrong = [name for name in names if not RUN.fullmatch(name) or name == GRID]
    if wrong:
        raise ValueError(f"{text!r}: {wrong[0]!r} is no stream here; use names like img, or -img")
    return tuple(StreamTokens(name.removeprefix("-"), held=name.startswith("-")) for name in names)


def streams_in(word: Word | Attention) -> set[str]:
    """The streams that a word names."""
    if isinstance(word, Attention):
        return {*word.queries, *word.keys} | (streams_in(word.otherwise) if word.otherwise else set())
    if isinstance(word, Each):
        return {name for each in word.words if each is not None for name in streams_in(each)}
    if isinstance(word, Grid):
        return {GRID}
    if isinstance(word, (Frames, Guides, Index, Last, Every)):
        return {word.stream}
    return {run.stream for run in word.runs}


def introduced_by(word: Word) -> set[str]:
    """The streams whose length can be read from the value that `word` is for."""
    if isinstance(word, Each):
        return {name for each in word.words if each is not None for name in introduced_by(each)}
    if isinstance(word, Grid) and not word.flat:
        return {GRID}
    if isinstance(word, Every):
        return {word.stream}
    if isinstance(word, Tokens) and word.opens:
        return {word.runs[-1].stream}
    if isinstance(word, Tokens) and len(word.runs) == 1 and not (word.rest or word.heads or word.runs[0].held):
        return streams_in(word)
    return set()
