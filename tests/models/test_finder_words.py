"""What is found of a block, exactly: its flows, what its attention is over, the word of each argument.

Blocks are functions of a few lines here, whose attention a tap hears. ComfyUI's classes are test_found_plans.py's.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_runtime.models.finder import arguments, compose
from parallel_runtime.models.finder.arguments import find_words
from parallel_runtime.models.finder.blocks import BlockList, NotFoundError
from parallel_runtime.models.finder.lists import ListWords, merge_calls
from parallel_runtime.models.finder.probe import ModuleProbe
from parallel_runtime.models.finder.record import CallWatch
from parallel_runtime.models.finder.streams import Attends, Flow, find_attention, find_flows

from .heard import attended, block, noise, tap

TOKENS, TEXT = 10, 4
IMG, TXT = Flow("img", (), 1, TOKENS, (0,)), Flow("txt", (), 1, TEXT, (1,))
X = Flow("x", (), 1, TOKENS, ())
OF_X = [(0, 0, TOKENS)]
BOTH = [(1, 0, TEXT), (0, TEXT, TOKENS)]
WITH_TWO = [(1, 0, 2), (0, 2, TOKENS)]
FIRST = [(0, 0, TOKENS), (1, TOKENS, 3)]


def probed(module: nn.Module, *args: Any, **kwargs: Any) -> ModuleProbe:
    """Its call, to be repeated."""
    watch = CallWatch()
    with torch.inference_mode(), watch.of(module), tap(watch.real):
        module(*args, **kwargs)
    return ModuleProbe(watch.calls[0], tap)


def two_streams(self: Any, img: Tensor, txt: Tensor, vec: Tensor, pe: Any = None, attn_mask: Any = None) -> Any:
    """As Flux's double blocks."""
    both = torch.cat((txt, img), 1)
    both = both if pe is None else both * pe[:, 0]
    out = attended(both, both, attn_mask)
    return img + out[:, txt.shape[1] :] * vec[:, None], txt + out[:, : txt.shape[1]]


def masked_by_row(self: Any, img: Tensor, txt: Tensor, vec: Tensor, attn_mask: Tensor) -> Any:
    """A row of keys for each image."""
    return two_streams(self, img, txt, vec, attn_mask=attn_mask[:, None, None])


def cross(self: Any, x: Tensor, context: Tensor, freqs: Any, **more: Tensor) -> Tensor:
    """As Wan's."""
    q = x * freqs[0] + freqs[1] * more["rope"][:, None]
    x = x + attended(q, x)
    return x + attended(x, context, width=9)[..., 3:]


def turned(self: Any, x: Tensor, rope: Any) -> Tensor:
    """As by a rope of cosines and sines."""
    q = x * rope[0] + x.flip(-1) * rope[1]
    return x + attended(q, q)


def cropped(self: Any, img: Tensor, txt: Tensor, crop: int) -> Any:
    """As Mochi's: of the text its first tokens attend."""
    out = attended(torch.cat((img, txt[:, :crop]), 1))
    return img + out[:, : img.shape[1]], txt + F.pad(out[:, img.shape[1] :], (0, 0, 0, txt.shape[1] - crop))


def counting(self: Any, x: Tensor, count: int, flag: bool, other: int) -> Tensor:
    """The first tokens are larger."""
    first = torch.arange(x.shape[1]) < count
    return x + F.pad(attended(x * (1 + first[:, None]) * (1 + flag) + other * 0, width=3), (0, 3))


def ranged(self: Any, x: Tensor, ranges: Any, steps: Tensor) -> Tensor:
    """As LTX's: some tokens have a row of a table."""
    table = torch.zeros_like(x)
    for start, end, row in ranges:
        table[:, start:end] = row * steps.repeat_interleave(5, 1)[:, start:end]
    return x + attended(x + table)


def by_frame(self: Any, x: Tensor, e: Tensor, tail: Tensor, transformer_options: Any = None) -> Tensor:
    """A row for each frame of four tokens, the last of fewer; rows for the last tokens."""
    x = x + attended(x * e.flatten(2).repeat_interleave(4, 1)[:, : x.shape[1]])
    return x + F.pad(tail, (0, 0, x.shape[1] - tail.shape[1], 0))


def windowed(self: Any, x: Tensor) -> Tensor:
    """Keys are at most so many tokens away."""
    at = torch.arange(x.shape[1])
    near = (at[:, None] - at).abs() <= self.reach
    low = torch.finfo(x.dtype).min
    return x + attended(x, x, near if self.boolean else torch.zeros(near.shape).masked_fill(~near, low)[None, None])


def gridded(self: Any, x: Tensor, rope: Tensor, beside: Tensor, frame: Tensor) -> Tensor:
    """As Cosmos': tokens lie in a grid of frames, rows and columns."""
    flat = (x * frame + beside).flatten(1, 3)
    return x + attended(flat * rope).unflatten(1, x.shape[1:4])


def added(self: Any, x: Tensor, same: Tensor) -> Any:
    """Two arguments of the same tokens."""
    out = attended(x + same)
    return x + out, same + out


Found: TypeAlias = tuple[nn.Module, dict[str, Any], list[Flow], list[Attends], list[str], dict[str, Any]]


def of_x(module: nn.Module, words: dict[str, Any] | None = None, *, within: str = "", **given: Any) -> Found:
    """A block whose tokens are its argument `x`, and attend to each other; what else it is given, and words of that."""
    attends, said = Attends("", OF_X, OF_X, within=within), f"{{0}} within {within}" if within else "{0}"
    return module, {"x": noise(2, 10, 6)} | given, [X], [attends], [said], {"x": "{0}"} | (words or {})


GRID = Flow("x", (), 1, 24, (), grid=True)
FOUND: dict[str, Found] = {
    "two streams": (
        block(two_streams),
        {"img": noise(2, 10, 6), "txt": noise(2, 4, 6), "vec": noise(2, 6), "pe": noise(1, 1, 14, 6)}
        | {"attn_mask": torch.zeros(1, 1, 14, 14)},
        [IMG, TXT],
        [Attends("", BOTH, BOTH)],
        ["{1}+{0}"],
        {"img": "{0}", "txt": "{1}", "pe": "{1}+{0}@2", "attn_mask": "order:{1}+{0}"},
    ),
    "a mask of keys": (
        block(two_streams),
        {"img": noise(2, 10, 6), "txt": noise(2, 4, 6), "vec": noise(2, 6), "attn_mask": noise(2, 1, 1, 14) > 0},
        [IMG, TXT],
        [Attends("", BOTH, BOTH)],
        ["{1}+{0}"],
        {"img": "{0}", "txt": "{1}", "attn_mask": "{1}+{0}@3"},
    ),
    "a mask of keys of as many images as tokens": (
        block(masked_by_row),
        {"img": noise(14, 10, 6), "txt": noise(14, 4, 6), "vec": noise(14, 6), "attn_mask": noise(14, 14) > 0},
        [IMG, TXT],
        [Attends("", BOTH, BOTH)],
        ["{1}+{0}"],
        {"img": "{0}", "txt": "{1}", "attn_mask": "{1}+{0}"},
    ),
    "a text of two tokens": (
        block(two_streams),
        {"img": noise(2, 10, 6), "txt": noise(2, 2, 6), "vec": noise(2, 6)},
        [IMG, replace(TXT, tokens=2)],
        [Attends("", WITH_TWO, WITH_TWO)],
        ["{1}+{0}"],
        {"img": "{0}", "txt": "{1}"},
    ),
    "keys of a text that all have": (
        block(cross),
        {
            "x": noise(2, 10, 6),
            "context": noise(2, 7, 9),
            "freqs": (noise(1, 10, 6), noise(1, 1, 6)),
            "rope": noise(10, 6)[None, 0],
        },
        [X],
        [Attends("", OF_X, OF_X), Attends("", OF_X, [])],
        ["{0}", "local"],
        {"x": "{0}", "freqs": ("{0}", "")},
    ),
    "a rope in two tables": of_x(block(turned), {"rope": "{0}"}, rope=(noise(1, 10, 6), noise(1, 10, 6))),
    "text that is cropped": (
        block(cropped),
        {"img": noise(2, 10, 6), "txt": noise(2, 4, 6), "crop": 3},
        [IMG, TXT],
        [Attends("", FIRST, FIRST, frozenset({1}))],
        ["{0}+index:{1}"],
        {"img": "{0}", "txt": "{1}", "crop": "index:{1}"},
    ),
    "a number of tokens": of_x(block(counting), {"count": "index:{0}"}, count=7, flag=True, other=3),
    "all tokens by their number": of_x(block(counting), {"count": "index:{0}"}, count=10, flag=True, other=11),
    "ranges": of_x(
        block(ranged),
        {"ranges": "ranges:{0}"},
        ranges=[(0, 3, noise(1)), (3, None, noise(6))],
        steps=noise(2, 2, 6),
    ),
    "a row for each frame": of_x(
        block(by_frame),
        {"e": "frames4:{0}", "tail": "last:{0}"},
        e=noise(2, 3, 1, 6),
        tail=noise(2, 4, 6),
        transformer_options={"a": noise(2, 10, 6)},
    ),
    "a window": of_x(block(windowed, wide=True, reach=1, boolean=True), within="reach"),
    "a window that is added": of_x(block(windowed, reach=8, boolean=False), within="reach"),
    "a window of all": of_x(block(windowed, reach=9, boolean=True)),
    "a window of no attribute": of_x(block(windowed, reach=2.5, boolean=True)),
    "a grid": (
        block(gridded),
        {
            "x": noise(2, 2, 3, 4, 6),
            "rope": noise(24, 6),
            "beside": noise(1, 2, 3, 4, 6),
            "frame": noise(2, 2, 1, 1, 6),
        },
        [GRID],
        [Attends("", [(0, 0, 24)], [(0, 0, 24)])],
        ["{0}"],
        {"x": "grid@1", "rope": "flat:grid@0", "beside": "grid@1"},
    ),
    "two arguments of the same tokens": (
        block(added),
        {"x": noise(2, 10, 6), "same": noise(2, 10, 6)},
        [Flow("x", (), 1, 10, (0,)), Flow("same", (), 1, 10, (1,), same_as=0)],
        [Attends("", OF_X, OF_X)],
        ["{0}"],
        {"x": "{0}", "same": "{1}"},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_block_has_these_flows_this_attention_and_these_words(name: str) -> None:
    module, given, flows, attends, said, words = FOUND[name]
    probe = probed(module, **given)
    assert find_flows(probe) == flows
    assert find_attention(probe, flows) == attends
    assert [each.word() for each in attends] == said
    assert find_words(probe, flows, attends) == words


def in_batch(self: Any, x: Tensor) -> Tensor:
    """Each frame of five tokens is a row of the batch."""
    return x + attended(x) + attended(x.unflatten(1, (2, 5)).flatten(0, 1)).unflatten(0, (2, 2)).flatten(1, 2)


def spread(self: Any, x: Tensor) -> Tensor:
    """Each token is in two queries."""
    return x + attended(x) + attended(torch.cat((x, x.roll(1, 1)), 1))[:, :10]


def backwards(self: Any, x: Tensor) -> Tensor:
    """The tokens are in an order of their own."""
    return x + attended(x) + attended(x.flip(1)).flip(1)


def halved(self: Any, x: Tensor) -> Tensor:
    """Every second token attends."""
    half = attended(x[:, 1::2])
    return x + attended(x) + torch.stack((torch.zeros_like(half), half), 2).flatten(1, 2)


def beside(self: Any, x: Tensor) -> Tensor:
    """Before the tokens are three of its own."""
    return x + attended(torch.cat((torch.ones(2, 3, 6), x), 1))[:, 3:]


def between(self: Any, x: Tensor) -> Tensor:
    """The last of the tokens are there once more."""
    return x + attended(x) + attended(torch.cat((x, torch.ones(2, 2, 6)), 1), x)[:, :10]


def foreign(self: Any, x: Tensor) -> Tensor:
    """The second call's queries are no tokens."""
    return x + attended(x) + attended(torch.ones(2, 10, 6), x)


def part_of_grid(self: Any, x: Tensor) -> Tensor:
    """Half of a grid attends."""
    flat = x.flatten(1, 3)
    return (
        x
        + attended(flat).unflatten(1, x.shape[1:4])
        + attended(flat[:, :12]).repeat(1, 2, 1).unflatten(1, x.shape[1:4])
    )


def line_of_grid(self: Any, x: Tensor) -> Tensor:
    """A line of a grid attends, which no frame nor row that is looked at moves."""
    flat = x.flatten(1, 3)
    return x + attended(flat).unflatten(1, x.shape[1:4]) + attended(x[:, 1, 1])[:, None, None]


def pair_of_grid(self: Any, x: Tensor) -> Tensor:
    """Two tokens of a grid attend, which move with their numbers, and with no index of a token that is looked at."""
    flat = x.flatten(1, 3)
    return x + attended(flat).unflatten(1, x.shape[1:4]) + attended(x[:, 1, 1, 1:3]).mean(1)[:, None, None, None]


GRIDS = {part_of_grid: (2, 2, 3, 4, 6), line_of_grid: (2, 4, 4, 3, 6), pair_of_grid: (2, 4, 4, 6, 6)}


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (in_batch, "has tokens as rows of its batch: 4 rows of 5 queries where its block has 2 of 10 tokens"),
        (spread, "mixes tokens: one of x moves 2 of its 20 queries"),
        (backwards, "takes the tokens of x in an order of its own"),
        (halved, "takes some of the 10 tokens of x alone, as 5 queries"),
        (beside, "has 3 queries beside the 10 that are tokens of its block's streams"),
        (between, "has 2 queries beside the 10 that are tokens of its block's streams"),
        (foreign, "has queries that are no tokens of its block's streams"),
        (part_of_grid, "attends over 12 of the 24 tokens of a grid"),
        (line_of_grid, "attends over 3 of the 48 tokens of a grid"),
        (pair_of_grid, "has queries that are no tokens of its block's streams"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_attention_that_streams_do_not_explain_is_named(forward: Callable[..., Tensor], said: str) -> None:
    probe = probed(block(forward), noise(*GRIDS.get(forward, (2, 10, 6))))
    with pytest.raises(NotFoundError) as error:
        find_attention(probe, find_flows(probe))
    assert str(error.value).strip() == said


def test_a_dim_of_more_indices_than_attention_has_rows_holds_no_tokens() -> None:
    module, given, *_ = FOUND["keys of a text that all have"]
    assert probed(module, **given).most == 2 * (10 + 10 + 10 + 7)
    assert probed(nn.Linear(6, 6), noise(2, 10, 6)).most == sys.maxsize


def test_a_dim_of_one_row_is_no_stream_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between lists: as of one image a call, whose rows other rows would explain."""
    monkeypatch.setattr(compose, "_rows_of", lambda streams, between, place, name, at, dim, rows: f"rows {rows}")
    call: Any = SimpleNamespace(path="final", number=0)
    names: Any = SimpleNamespace(streams=[])
    for shape, word in (((1, 5, 3), "rows 5"), ((1, 1, 3), "rows 3@2"), ((2, 5), "rows 2@0"), ((1, 1), None)):
        assert compose._word_of(call, "x", (), shape, names, SimpleNamespace()) == word  # type: ignore[arg-type]


def test_lists_behind_the_second_by_their_tokens_are_named_for_text_too() -> None:
    each: Any = SimpleNamespace(flows={0: SimpleNamespace(grid=False)})
    names = compose.Names()
    assert [names.new(each, 0, rank) for rank in (0, 1, 2, 3)] == ["img", "txt", "txt2", "txt3"]


def test_a_range_is_a_first_row_and_an_end_and_may_have_more_behind() -> None:
    ranges: list[object] = [(0, 3), [2, None], (0, 3, "a row of a table")]
    assert all(map(arguments._is_range, ranges))
    assert not any(map(arguments._is_range, [(0,), ("x", 3), (0, "x"), 3, None]))


def test_calls_are_noted_in_their_order_until_the_watch_ends() -> None:
    twice = block(lambda self, x: self.inner(self.inner(x)), inner=nn.Linear(6, 6))
    watch = CallWatch()
    with watch.of(twice):
        twice(noise(2, 10, 6))
    twice(noise(2, 10, 6))
    assert [(each.path, each.number, each.within) for each in watch.calls] == [
        ("", 0, ()),
        ("inner", 0, ("",)),
        ("inner", 1, ("",)),
    ]


def test_rows_that_one_block_shows_to_be_of_frames_and_another_of_tokens_are_of_frames() -> None:
    def said(text: Any, *sites: str) -> dict[str, ListWords]:
        return {"b": ListWords(BlockList("b"), [], {"s": list(sites)}, {"x": "{0}", "t": text})}

    for one, other in (("{0}", "frames:{0}"), ("frames:{0}", "{0}"), ("frames:{0}", "frames:{0}")):
        found = merge_calls(said(one, "{0}"), said(other, "{0}", "{1}"))["b"]
        assert (found.words, found.attention) == ({"x": "{0}", "t": "frames:{0}"}, {"s": ["{0}", "{1}"]})
    for one, other in (("{0}", "{1}"), ("{1}", "frames:{0}"), ("frames:{0}", ["{0}"])):
        with pytest.raises(NotFoundError) as error:
            merge_calls(said(one), said(other))
        assert str(error.value) == f"b: its argument 't' is {other!r} here and {one!r} in other blocks"
