"""The plans that are found of small models' calls, exactly, from the one that cuts most to the one that cuts least.

That a plan equals one process is test_found_plans.py's, for ComfyUI's classes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.models.finder import NotFoundError, look, plans
from parallel_runtime.models.specs.written import to_data

from .heard import WIDTH, attended, block, noise, tap

IMG, TXT = {"img": noise(2, 10, WIDTH)}, {"txt": noise(2, 4, WIDTH)}


def pair(self: Any, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> Any:
    """Two streams."""
    out = attended(torch.cat((txt, img), 1) * pe[:, 0])
    return img + out[:, txt.shape[1] :] * vec[:, None], txt + out[:, : txt.shape[1]]


def single(self: Any, x: Tensor, pe: Tensor) -> Tensor:
    """One stream, and a table."""
    return x + attended(x * pe[:, 0])


def plain(self: Any, x: Tensor, *more: Any) -> Tensor:
    """One stream."""
    return x + attended(x)


def ranged(self: Any, x: Tensor, ranges: list[tuple[int, int, float]], pe: Tensor) -> Tensor:
    """Some tokens are larger."""
    table = torch.zeros_like(x)
    for start, end, row in ranges:
        table[:, start:end] = row
    return x + attended(x * pe[:, 0] + table)


def framed(self: Any, x: Tensor, e: Tensor) -> Tensor:
    """A row for each frame, or for each token."""
    return x + attended(x * (e if e.shape[1] == x.shape[1] else e.repeat_interleave(5, 1)))


def on_context(self: Any, x: Tensor, context: Tensor) -> Tensor:
    """Attention to a text that all have."""
    return x + attended(x) * 0 + attended(x, context)


def of_grid(self: Any, x: Tensor, rope: Tensor) -> Tensor:
    """Tokens lie in a grid."""
    return x + attended(x.flatten(1, 3) * rope).unflatten(1, x.shape[1:4])


def of_rows(self: Any, x: Tensor, e: Tensor | None = None) -> Tensor:
    """A head: a row of a table for each token."""
    return x if e is None else x * e


def pool(self: Any, x: Tensor) -> Tensor:
    """One row of all tokens."""
    return x.sum(1)


def blocks(*forwards: Callable[..., Any]) -> nn.ModuleList:
    """A list of them."""
    return nn.ModuleList(map(block, forwards))


def two_lists(self: Any, img: Tensor, txt: Tensor, control: Any = None) -> Tensor:
    """As Flux.1. A ControlNet's residuals are added to the image; "output" is asked for and not used."""
    pe, vec = noise(1, 1, 14, WIDTH), noise(2, WIDTH)
    left, _ = (control or {}).get("input", []), (control or {}).get("output", [])
    for number, each in enumerate(self.joint):
        img, txt = each(img, txt, vec=vec, pe=pe)
        img = img + left[number] if number < len(left) else img
    x = torch.cat((txt, img), 1)
    for each in self.single:
        x = each(x, pe)
    return self.pool(self.head(self.norm(x[:, 4:]), noise(2, 10, WIDTH)))


def pooled(self: Any, img: Tensor) -> Tensor:
    """The second list has a token for two of the first's."""
    for each in self.fine:
        img = each(img)
    img = img.unflatten(1, (5, 2)).sum(2)
    for each in self.coarse:
        img = each(img)
    return img


def tagged(self: Any, img: Tensor, txt: Tensor) -> Tensor:
    """Ranges of text and image, in a list behind one of two streams."""
    for each in self.joint:
        img, txt = each(img, txt, vec=noise(2, WIDTH), pe=noise(1, 1, 14, WIDTH))
    x = torch.cat((txt, img), 1)
    for each in self.single:
        x = each(x, [(0, 4, 1.5), (4, 14, 0.5)], noise(1, 1, 14, WIDTH))
    return x[:, 4:]


def gridded(self: Any, x: Tensor) -> Tensor:
    """A grid of 2 x 3 x 4, from the first block to the head."""
    for each in self.blocks:
        x = each(x, noise(24, WIDTH))
    return self.head(x, noise(2, 2, 3, 4, 1)).flatten(1)


def in_turns(self: Any, img: Tensor) -> Tensor:
    """A module that runs twice in a call."""
    return torch.cat([self.inner(part) for part in img.chunk(2, 1)], 1)


def wrapped(self: Any, img: Tensor) -> Tensor:
    """Around it one that runs once."""
    return self.wrap(img)


def one_after_another(self: Any, x: Tensor) -> Tensor:
    for each in self.blocks:
        x = each(x)
    return x


def refined(self: Any, img: Tensor, txt: Tensor) -> Tensor:
    """A short list before the long one."""
    for each in self.refiner:
        txt = each(txt)
    for each in self.blocks:
        img = each(img, txt)
    return img


def by_frames(self: Any, img: Tensor, e: Tensor) -> Tensor:
    for each in self.blocks:
        img = each(img, e)
    return img


def spec(attention: dict[str, str], cut: dict[str, Any], gather: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A plan as `to_data` has it."""
    return {"attention": attention, "cut": cut, "gather": gather} | more


TOGETHER, APART = {"joint": "txt+img", "single": "txt+img"}, {"joint": "txt+img", "single": "img2"}
CUT = {"joint.0": {"img": "img", "txt": "txt"}, "joint.*": {"pe": "txt+img@2"}, "single.*": {"pe": "txt+img@2"}}
CONTROL = {"input": "img"}
OF_ALL, OF_IMAGE = {"pe": "txt+img@2"}, {"pe": "img2@2"}
OF_BOTH = {"img": "img", "txt": "txt", "pe": "txt+img@2"}
LASTS, ALL = {"joint.-1": ["img", "txt"], "single.-1": "img2"}, {"joint.*": ["img", "txt"], "single.*": "img2"}
TAGGED = {name: words for name, words in CUT.items() if name != "single.*"}
TWO_SIZES, GRID = {"fine": "img", "coarse": "img2"}, {"blocks": "grid"}
FIRSTS = {"fine.0": {"x": "img"}, "coarse.0": {"x": "img2"}}
ROPE = {"blocks.0": {"x": "grid@1"}, "blocks.*": {"rope": "flat:grid@0"}}
INNER, REFINED, ALONE = {"wrap.inner.blocks": "img"}, {"blocks": "img|local"}, {"blocks": "img"}
FRAMES = {"blocks.0": {"x": "img"}, "blocks.*": {"e": "frames3:img"}}
FOUND: dict[str, tuple[nn.Module, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "two lists and a head": (
        block(
            two_lists,
            joint=blocks(pair, pair),
            single=blocks(single, single),
            norm=nn.LayerNorm(WIDTH),
            head=block(of_rows),
            pool=block(pool),
        ),
        [IMG | TXT],
        [
            spec(TOGETHER, CUT | {"head": {"e": "img"}}, {"head": "img"}, control=CONTROL),
            spec(TOGETHER, CUT, {"norm": "img"}, control=CONTROL),
            spec(TOGETHER, CUT, {"single.-1": "txt+img"}, control=CONTROL),
            spec(APART, CUT | {"single.0": {"x": "img2"}, "single.*": OF_IMAGE}, LASTS),
            spec(APART, {"joint.*": OF_BOTH, "single.*": OF_IMAGE | {"x": "img2"}}, ALL),
        ],
    ),
    "tokens that are others in the second list": (
        block(pooled, fine=blocks(plain, plain), coarse=blocks(plain)),
        [IMG],
        [
            spec(TWO_SIZES, FIRSTS, {"coarse.-1": "img2", "fine.-1": "img"}),
            spec(TWO_SIZES, FIRSTS, {"coarse.-1": "img2", "fine.-1": "img"}),
            spec(TWO_SIZES, {"fine.*": {"x": "img"}, "coarse.*": {"x": "img2"}}, {"fine.*": "img", "coarse.*": "img2"}),
        ],
    ),
    "ranges that a model may have counted": (
        block(tagged, joint=blocks(pair), single=blocks(ranged)),
        [IMG | TXT],
        [
            spec(TOGETHER, TAGGED | {"single.*": OF_ALL | {"ranges": "ranges:txt+img"}}, {"single.-1": "txt+img"}),
            spec(TOGETHER, TAGGED | {"single.*": OF_ALL | {"ranges": "ranges:-txt+img"}}, {"single.-1": "txt+img"}),
            spec(APART, TAGGED | {"single.0": {"x": "img2"}, "single.*": OF_IMAGE | {"ranges": "ranges:img2"}}, LASTS),
            spec(APART, {"joint.*": OF_BOTH, "single.*": OF_IMAGE | {"x": "img2", "ranges": "ranges:img2"}}, ALL),
        ],
    ),
    "a grid": (
        block(gridded, blocks=blocks(of_grid, of_grid), head=block(of_rows)),
        [{"x": noise(2, 2, 3, 4, WIDTH)}],
        [
            spec(GRID, ROPE | {"head": {"e": "grid@1"}}, {"head": "grid@1"}),
            spec(GRID, ROPE, {"blocks.-1": "grid@1"}),
            spec(GRID, ROPE, {"blocks.-1": "grid@1"}),
            spec(GRID, {"blocks.*": {"x": "grid@1", "rope": "flat:grid@0"}}, {"blocks.*": "grid@1"}),
        ],
    ),
    "a module that runs twice": (
        block(wrapped, wrap=block(in_turns, inner=block(one_after_another, blocks=blocks(plain, plain)))),
        [IMG],
        [
            spec(INNER, {"wrap.inner.blocks.0": {"x": "img"}}, {"wrap.inner.blocks.-1": "img"}, each_call="wrap.inner"),
            spec(INNER, {"wrap.inner.blocks.*": {"x": "img"}}, {"wrap.inner.blocks.*": "img"}, each_call="wrap.inner"),
        ],
    ),
    "a short list, which all ranks compute, and keys of the text": (
        block(refined, refiner=blocks(plain), blocks=blocks(plain, on_context)),
        [IMG | TXT],
        [
            spec(REFINED, {"blocks.0": {"x": "img"}}, {"blocks.-1": "img"}),
            spec(REFINED, {"blocks.0": {"x": "img"}}, {"blocks.-1": "img"}),
            spec(REFINED, {"blocks.*": {"x": "img"}}, {"blocks.*": "img"}),
        ],
    ),
    "of two calls, one with a row for each token": (
        block(by_frames, blocks=blocks(framed)),
        [IMG | {"e": noise(2, 2, WIDTH)}, IMG | {"e": noise(2, 10, WIDTH)}],
        [
            spec(ALONE, FRAMES, {"blocks.-1": "img"}),
            spec(ALONE, FRAMES, {"blocks.-1": "img"}),
            spec(ALONE, {"blocks.*": {"x": "img", "e": "frames3:img"}}, {"blocks.*": "img"}),
        ],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_these_plans_are_found(name: str) -> None:
    model, calls, expected = FOUND[name]
    found = [to_data(each.spec) for each in plans([look(model, partial(model, **given), tap) for given in calls])]
    said = "its plan was found, and is proven for ulysses and ring alone"
    assert [each.pop("unstaged") for each in found] == [said] * len(found)
    assert found == expected


def test_what_a_call_told_stays_where_it_was_put_beside_another() -> None:
    """A plan for both may be refused, and then the search goes on with the first alone."""
    model, calls, _ = FOUND["of two calls, one with a row for each token"]
    by_frame, by_token = (look(model, partial(model, **given), tap) for given in calls)
    found = list(plans([by_token]))
    assert list(plans([by_token, by_frame])) != found
    assert list(plans([by_token])) == found


def with_state(self: Any, x: Tensor) -> Tensor:
    """Attends once more in its second call."""
    self.calls = getattr(self, "calls", 0) + 1
    return x + attended(x) if self.calls < 3 else x + attended(x) + attended(x)


def alone_fails(self: Any, x: Tensor) -> Tensor:
    """It runs in its model alone."""
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 2:
        raise KeyError("state")
    return x + attended(x)


def by_table(self: Any, x: Tensor, pe: Tensor) -> Tensor:
    """Another thing is done with the same argument."""
    return x + attended(x, mask=pe[:, None])


def by_row(self: Any, x: Tensor, pe: Tensor) -> Tensor:
    """The same argument has a row for each token."""
    return x + attended(x) * pe[:, :, :WIDTH]


def in_dictionary(self: Any, x: Tensor, pe: dict[str, Tensor]) -> Tensor:
    return x + attended(x) * pe["rows"]


def in_parts(self: Any, x: Tensor, pe: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
    (first, second), third = pe
    return x + attended(x) * first * second.transpose(1, 2) * third


def mixes(self: Any, x: Tensor) -> Tensor:
    """Rows are mixed by a layer inside."""
    return self.out(attended(self.norm(x)).transpose(1, 2)).transpose(1, 2)


def rolled(self: Any, x: Tensor) -> Tensor:
    return attended(x) + x.roll(1, 1)


def half_as_many(self: Any, x: Tensor) -> Tensor:
    """The second block has half of the tokens."""
    return self.blocks[1](self.blocks[0](x)[:, ::2])


def with_table(self: Any, x: Tensor, pe: Any) -> Tensor:
    for each in self.blocks:
        x = each(x, pe)
    return x


def alone(self: Any, x: Tensor) -> Tensor:
    """Most tokens attend outside of lists."""
    return self.blocks[0](x[:, :3]) + self.apart(x)[:, :3]


def in_another_order(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    for each in list(self.blocks)[:: 1 if self.calls % 2 else -1]:
        x = each(x)
    return x


def layered(forward: Callable[..., Any]) -> nn.ModuleList:
    """A block with a layer over tokens."""
    return nn.ModuleList([block(forward, norm=nn.LayerNorm(WIDTH), out=nn.Linear(10, 10))])


X, SQUARE = {"x": noise(2, 10, WIDTH)}, noise(2, 10, 10)
PARTS = ((noise(2, 10, 1), noise(2, 1, 10)), noise(2, 10, 1))
REFUSED: list[tuple[nn.Module, dict[str, Any], str]] = [
    (block(of_rows), X, "Block calls no attention function of ComfyUI's in this call"),
    (
        block(alone, blocks=blocks(plain), apart=block(plain)),
        X,
        "apart attends to most tokens, and is in no list of blocks",
    ),
    (block(in_another_order, blocks=blocks(plain, plain)), X, "its blocks run in another order in each call"),
    (
        block(one_after_another, blocks=blocks(with_state)),
        X,
        "blocks.0 attends otherwise when it runs again: it keeps state between calls",
    ),
    (block(one_after_another, blocks=blocks(alone_fails)), X, "blocks.0 does not run alone: KeyError: 'state'"),
    (block(half_as_many, blocks=blocks(plain, plain)), X, "blocks.1 has 5 tokens where blocks before have 10"),
    (
        block(with_table, blocks=blocks(by_table, by_row)),
        X | {"pe": SQUARE},
        "blocks.1: its argument 'pe' is '{0}' here and 'order:{0}' in other blocks",
    ),
    (
        block(with_table, blocks=blocks(in_dictionary)),
        X | {"pe": {"rows": noise(2, 10, 1)}},
        "its argument 'pe' holds tokens in a dictionary",
    ),
    (
        block(with_table, blocks=blocks(in_parts)),
        X | {"pe": PARTS},
        "its argument 'pe' holds tokens of several kinds in one of its values",
    ),
    (
        block(one_after_another, blocks=layered(mixes)),
        X,
        "blocks.0 returns none of its arguments row by row: blocks.0.out (Linear) mixes tokens",
    ),
    (
        block(one_after_another, blocks=blocks(rolled)),
        X,
        "blocks.0 returns none of its arguments row by row: blocks.0 (Block) mixes tokens",
    ),
    (
        block(one_after_another, blocks=layered(rolled)),
        X,
        "blocks.0 returns none of its arguments row by row: tokens are mixed in code of its own",
    ),
]


@pytest.mark.parametrize(("model", "given", "said"), REFUSED, ids=[said[:40] for *_, said in REFUSED])
def test_what_no_words_describe_is_named(model: nn.Module, given: dict[str, Any], said: str) -> None:
    with pytest.raises(NotFoundError) as error:
        look(model, partial(model, **given), tap)
    assert str(error.value) == said
