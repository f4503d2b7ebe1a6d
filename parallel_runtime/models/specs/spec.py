"""A sharding spec: what must be known of one of ComfyUI's classes to share its tokens over ranks. Checked when made.

Owns the fields and their checks against each other. Does not own the words (words.py), nor the check against a class,
which needs ComfyUI (models/hosted/hooks.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .words import (
    FIRST,
    KEPT,
    Attention,
    Index,
    Tokens,
    Word,
    WordText,
    introduced_by,
    parse,
    parse_attention,
    streams_in,
)

Words = Mapping[str, WordText]
LONG_SKIPS = "each block of its second half takes the output of one of the first (long skips), on another stage"
Handed = str | tuple[str, ...]  # one argument by its name, several as a tuple of names


@dataclass(frozen=True, kw_only=True)
class Keeps:
    """What a class keeps on its instance between the calls of one sampling run, by names of the class.

    `reset`: method (enabled: bool) that frees it, and says whether calls may keep any from now on. `decide`: method
    that the class calls once in a call, which returns what is kept, None for a call that uses none, and whether all
    that the call needs is in it. `patcher`: the attribute of which it asks `get_free_memory(device)`. `option`: the
    transformer option in which a node says where and how it is kept: {"device": "auto", "gpu", "cpu" or "off", "dtype":
    "default" or the name of a format}.
    """

    reset: str
    decide: str
    patcher: str
    option: str


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """How one class is shared.

    Paths are names of modules in the class: "blocks.*" is each of the list, "blocks.0" the first, "blocks.-1" the last;
    "" is the class itself. A path names its module's `forward`, or with a colon another method: "blocks.*:forward_gen".
    Blocks with such methods in `cut` are called by these, and by no `forward`.

    `attention`: a module list of blocks -> what attention in them is over, or the same for modules inside a block, by
    their name in the block. `cut`: path -> argument of the module's forward ("#0": by position; "**a": in its
    **kwargs; "return": its output)
    -> word for what becomes this rank's. `gather`: path -> word for the output that becomes whole; or several such
    tables, of which the first that the model has modules for holds. `whole`: as `cut`, for modules that need all
    tokens: arguments become whole, the output this rank's again. `works_where`: path of `whole` -> argument and
    attribute of its module, which returns what it is given where the one is not in the other.
    `control`: list in the argument `control` -> stream.
    `unless`: path -> attribute of a module; a model in which it is set is not what the spec is for, and refused.
    `each_call`: the module that the class calls several times in one call, with other lengths; each is shared alone.

    For PipeFusion, whose stages have some of the blocks each: `hands`: list of blocks -> the arguments that a block
    makes for the next one, in the order of its outputs; left out where it is the one argument that the first block's
    tokens are in. `unstaged`: why blocks cannot be in stages, where these fields do not say it (`one_stage`).

    `keeps`: what the class keeps from call to call, if anything.

    `replaced`: ComfyUI's kind of a block ("double_block") -> the list that it is in, and its arguments by the names
    that a function in its place is given. For a class that calls such a block by these names, which it does not take.

    `row_ranges`: list of blocks -> the argument of theirs with ranges (start, end, row) of all their tokens, where row
    may as well be a tensor with the row of each token. Compiled blocks are given that: a graph is of one number of
    ranges, and that differs by rank and by prompt.
    """

    attention: Mapping[str, str | Mapping[str, str]]
    cut: Mapping[str, Words]
    gather: Words | tuple[Words, ...]
    whole: Mapping[str, Words] = field(default_factory=dict)
    works_where: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    control: Mapping[str, str] = field(default_factory=dict)
    unless: Mapping[str, str] = field(default_factory=dict)
    each_call: str = ""
    hands: Mapping[str, Handed] = field(default_factory=dict)
    unstaged: str = ""
    keeps: Keeps | None = None
    replaced: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    row_ranges: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {stream for word in self._cutting() for stream in introduced_by(word)}
        known |= {f"{FIRST}{word.stream}" for word in self._cutting() if isinstance(word, Index)}
        known |= {f"{KEPT}{stream}" for stream in known} if self.keeps is not None else set()
        unknown = sorted({stream for word in self._all() for stream in streams_in(word)} - known)
        if unknown:
            raise ValueError(f"no word of the plan gives the length of {unknown[0]!r}; cut it alone somewhere")
        for name, text in self.control.items():
            word = parse(text)
            if not (isinstance(word, Tokens) and word.dim == 1 and len(word.runs) == 1):
                raise ValueError(f"control[{name!r}] is {text!r}; use the name of one stream")

    @property
    def one_stage(self) -> str:
        """Why the blocks cannot be in stages of a pipeline; "" where they can."""
        if self.whole and not self.unstaged:
            return f"{next(iter(self.whole))} needs all tokens between blocks, and a stage has those of a patch"
        return self.unchained

    @property
    def unchained(self) -> str:
        """Why it is not known what one block hands to the next; "" where it is."""
        if self.unstaged:
            return self.unstaged
        unknown = [blocks for blocks in self.attention if not self._handed_on(blocks)]
        return f"its plan does not say what blocks of {unknown[0]} hand on" if unknown else ""

    @property
    def before_stages(self) -> tuple[str, ...]:
        """Lists of blocks after which all tokens are needed before others begin: every stage runs all of them."""
        *others, _ = self.attention
        return tuple(blocks for blocks in others if all(f"{blocks}.-1" in table for table in self.gathers))

    @property
    def streams_before(self) -> frozenset[str]:
        """The streams of `before_stages`."""
        words = [word for blocks in self.before_stages for word in self.attention_of(blocks).values()]
        return frozenset(stream for word in words for stream in streams_in(word))

    @property
    def staged(self) -> tuple[str, ...]:
        """The lists whose blocks stages share, in the order in which they run."""
        return tuple(blocks for blocks in self.attention if blocks not in self.before_stages)

    def handed_on(self, blocks: str) -> Handed:
        """The arguments that a block of this list makes for the next. Raises `ValueError` where that is not known."""
        if self.unchained:
            raise ValueError(self.unchained)
        return self._handed_on(blocks)

    def _handed_on(self, blocks: str) -> Handed:
        first = list(self.cut.get(f"{blocks}.0", ()))
        alone = first[0] if len(first) == 1 and (blocks in self.before_stages or len(self.staged) == 1) else ""
        return self.hands.get(blocks, alone)

    @property
    def gathers(self) -> tuple[Words, ...]:
        """The tables of `gather`, one or several."""
        return self.gather if isinstance(self.gather, tuple) else (self.gather,)

    def methods_of(self, blocks: str) -> tuple[str, ...]:
        """The methods by which the class calls the blocks of a list."""
        named = [path.partition(":")[2] for path in self.cut if path.startswith(f"{blocks}.") and ":" in path]
        return tuple(dict.fromkeys(named)) or ("forward",)

    def attention_of(self, blocks: str) -> dict[str, Attention]:
        """Module in a block -> what its attention is over; "" is the block itself."""
        said = self.attention[blocks]
        return {name: parse_attention(text) for name, text in ({"": said} if isinstance(said, str) else said).items()}

    def _cutting(self) -> Iterator[Word]:
        for words in self.cut.values():
            yield from map(parse, words.values())

    def _all(self) -> Iterator[Word | Attention]:
        yield from self._cutting()
        for words in (*self.gathers, *self.whole.values(), self.control):
            yield from map(parse, words.values())
        for blocks in self.attention:
            yield from self.attention_of(blocks).values()
