"""What words do to values: every rank's share, put together, is the whole.

Does not own: gathering over a group and attention, which need ranks (test_hosted_hooks.py, test_hosted_parity.py).
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from parallel_runtime.models.hosted.call import TokenCall
from parallel_runtime.models.hosted.cuts import cut_control
from parallel_runtime.models.hosted.masks import whole_mask, window_mask
from parallel_runtime.models.hosted.word_handlers import cutter, gatherer
from parallel_runtime.models.specs.words import UNPLANNED, parse, parse_attention

PARTS = (1, 2, 3)


@dataclass(frozen=True)
class Part:
    """A group that is only asked which part this is."""

    parts: int
    index: int
    shares: tuple[int, ...] = ()


def calls(parts: int, **totals: int) -> list[TokenCall]:
    """A call on every rank, with streams of these lengths."""
    made = [TokenCall(Part(parts, index), "Tiny") for index in range(parts)]  # type: ignore[arg-type]
    for call in made:
        for stream, total in totals.items():
            call.introduce(stream, total)
    return made


def shares(ranks: list[TokenCall], text: str | tuple[str, ...], value: Any) -> list[Any]:
    """What each rank takes of a value."""
    change = cutter(parse(text))
    return [change(call, value) for call in ranks]


def rows(*shape: int) -> Tensor:
    """Numbers that are all different."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_runs_of_a_stream_put_together_are_the_whole(parts: int, dim: int) -> None:
    value = rows(7, 7, 7)
    cut = shares(calls(parts), f"img@{dim}", value)
    assert torch.equal(torch.cat(cut, dim), value)
    assert max(each.shape[dim] for each in cut) - min(each.shape[dim] for each in cut) <= 1
    assert all(each.data_ptr() != value.data_ptr() for each in cut), "blocks write in place"


@pytest.mark.parametrize("parts", PARTS)
def test_a_rotary_table_of_four_dims_is_cut_behind_its_heads(parts: int) -> None:
    table = (rows(2, 7, 6), rows(2, 7, 7, 6), rows(2, 7, 7, 3, 2, 2), True)
    cut = shares(calls(parts, img=7), "heads:img", table)
    for number, dim in enumerate((1, 2, 1)):
        assert torch.equal(torch.cat([each[number] for each in cut], dim), table[number])
    assert all(each[-1] is True for each in cut)
    with pytest.raises(ValueError, match="cannot be gathered"):
        gatherer(parse("heads:img"))


@pytest.mark.parametrize("parts", PARTS)
def test_what_a_stream_that_every_rank_has_leaves_is_cut(parts: int) -> None:
    value, ranks = rows(1, 4 + 7, 2), calls(parts)
    assert shares(ranks, "every:txt", 4) == [4] * parts
    cut = shares(ranks, "rest:txt+img", value)
    assert all(torch.equal(each[:, :4], value[:, :4]) for each in cut)
    assert torch.equal(torch.cat([value[:, :4], *(each[:, 4:] for each in cut)], 1), value)
    text = value[:, :4]
    assert all(each is text for each in shares(ranks, "rest:txt+img", text)), "a value that ends with the text"
    again = shares(ranks, "rest:txt+img", value * 2)
    assert all(torch.equal(one, 2 * other) for one, other in zip(again, cut, strict=True))
    assert all(call.key_lengths(["txt", "img"])[0] == 4 + call.streams["img"][0] for call in ranks)
    assert all(sum(call.key_lengths(["txt", "img"])) == 11 for call in ranks), "as keys they count once"
    with pytest.raises(ValueError, match="txt\\+img has 11 tokens by the plan and 12 in this call"):
        shares(ranks, "rest:txt+img", rows(1, 12, 2))


@pytest.mark.parametrize("parts", PARTS)
def test_of_two_streams_each_rank_has_its_runs_one_after_another(parts: int) -> None:
    value = rows(1, 5 + 7)
    ranks = calls(parts, txt=5, img=7)
    cut = shares(ranks, "txt+img", value)
    texts = [each[:, : call.streams["txt"][call.index]] for each, call in zip(cut, ranks, strict=True)]
    images = [each[:, call.streams["txt"][call.index] :] for each, call in zip(cut, ranks, strict=True)]
    assert torch.equal(torch.cat([*texts, *images], 1), value)
    for call, each in zip(ranks, cut, strict=True):
        call.group = Mock(gather=Mock(side_effect=[torch.cat(texts, 1), torch.cat(images, 1)]))
        assert torch.equal(gatherer(parse("txt+img"))(call, each), value)
    lengths = [each.shape[1] for each in cut]
    assert max(lengths) - min(lengths) <= 1, "longer runs of one stream lie with shorter ones of the other"
    assert calls(3, a=5, b=7, c=4)[0].streams == {"a": (1, 2, 2), "b": (3, 2, 2), "c": (1, 1, 2)}


def test_a_stream_that_is_held_and_a_rest_stay() -> None:
    ranks = calls(2, txt=5, img=7)
    for call in ranks:
        text, image, first = call.streams["txt"][call.index], call.streams["img"][call.index], call.start("img")
        held = cutter(parse("-txt+img"))(call, rows(1, text + 7))
        assert held[0].tolist() == [*range(text), *range(text + first, text + first + image)]
        assert torch.equal(cutter(parse("img+*"))(call, rows(1, 9))[:, -2:], rows(1, 9)[:, -2:])


def test_one_row_for_all_tokens_stays() -> None:
    value = rows(2, 1, 3)
    assert all(each is value for each in shares(calls(2, img=7), "img", value))
    assert all(each is value for each in shares(calls(2, img=7), "frames:img", value))


FEW = ((1, 2), (2, 3), (1, 8))


@pytest.mark.parametrize(("total", "parts"), FEW)
def test_fewer_tokens_than_ranks_are_whole_on_every_rank(total: int, parts: int) -> None:
    ranks, value = calls(parts, img=total), rows(1, total, 3)
    words = ("img", "frames:img")
    assert all(torch.equal(each, value) for text in words for each in shares(ranks, text, value))
    assert all(torch.equal(gatherer(parse("img"))(call, value), value) for call in ranks)
    assert shares(ranks, "ranges:img", [(0, None, "a")]) == [[(0, total, "a")]] * parts
    assert shares(ranks, "index:img", 1) == [1] * parts
    mask = rows(1, 1, total, total)
    assert all(each is mask for each in shares(ranks, "order:img", mask))
    grid = rows(1, 2, total, total, 3)
    assert all(torch.equal(each, grid) for each in shares(calls(parts), "grid@1", grid))
    assert all(call.lengths(["img"]) == (total,) * parts and call.total("img") == total for call in ranks)


@pytest.mark.parametrize(("total", "parts"), FEW)
def test_few_tokens_count_once_among_the_keys(total: int, parts: int) -> None:
    """Beside an image that is cut: the text's columns are the first rank's, its rows everybody's."""
    ranks = calls(parts, txt=total, img=20)
    value = rows(1, total + 20)
    cut = shares(ranks, "txt+img", value)
    assert all(torch.equal(each[:, :total], value[:, :total]) for each in cut)
    keys = [call.counted(("txt", "img"), each, 1) for call, each in zip(ranks, cut, strict=True)]
    assert [each.shape[1] for each in keys] == list(ranks[0].key_lengths(("txt", "img")))
    assert sorted(torch.cat(keys, 1).flatten().tolist()) == value.flatten().tolist()
    mask = rows(total + 20, total + 20)
    for ordered in shares(ranks, "order:txt+img", mask):
        assert torch.equal(ordered[:, 0], mask[torch.cat(cut, 1).flatten().long(), 0]), "a row for each query"
        assert torch.equal(ordered[0], mask[0, torch.cat(keys, 1).flatten().long()]), "a column for each key"


@pytest.mark.parametrize("text", [2, 9])
def test_of_alternatives_that_is_chosen_in_which_a_rank_has_so_many_tokens(text: int) -> None:
    joint = parse_attention("txt+img|img")
    for call in calls(3, img=7, txt=text):
        mine = call.streams["img"][call.index]
        both = mine + call.streams["txt"][call.index]
        assert call.chosen(joint, (both, both)) is joint
        assert call.chosen(joint, (mine, mine)) == parse_attention("img")


def test_of_alternatives_the_last_is_of_keys_that_all_have_or_the_first_of_more() -> None:
    joint = parse_attention("img|local")
    for call in calls(2, img=7):
        assert call.introduce_whole("txt", 4) == 4 and (call.start("txt"), call.total("txt")) == (0, 4)
        call.introduce_first("txt", 3)
        mine = call.streams["img"][call.index]
        for keys, local in ((mine, False), (1, True), (4 if mine == 3 else 3, True), (5, False), (50, False)):
            assert call.chosen(joint, (mine, keys)) == (joint.otherwise if local else joint), keys
        assert call.has_all_keys(parse_attention("img<-txt")) and not call.has_all_keys(parse_attention("txt<-img"))
        assert not call.has_all_keys(parse_attention("img<-txt+img")) and not call.has_all_keys(UNPLANNED)


def test_keys_that_were_kept_are_those_that_others_leave_and_come_first() -> None:
    kept = parse_attention("img<-kept:txt+img|img")
    for call in calls(2, img=7):
        mine = call.streams["img"][call.index]
        assert call.chosen(kept, (mine, mine)) == kept.otherwise and call.common_keys(kept.otherwise, masked=True) == 0
        for more in (6, 2):
            assert call.chosen(kept, (mine, mine + more)) is kept
            assert call.attended(kept) == (
                ((4, 3)[:: 1 if call.streams["img"][0] == 4 else -1],) * 2,
                (mine, mine + more),
            )
            assert call.common_keys(kept, masked=False) == more
        with pytest.raises(ValueError, match="Tiny: a mask over keys that were kept; use a ComfyUI"):
            call.common_keys(kept, masked=True)
        assert call.common_keys(parse_attention("local"), masked=True) == 0
        value = rows(1, 2 + mine)
        assert call.counted(("kept:txt", "img"), value, 1) is value, "kept keys count wherever they are"


def test_no_keys_were_kept_of_a_stream_that_the_call_has_tokens_of() -> None:
    """A reference in the prefix may have as many tokens as a rank has of the picture."""
    joint = parse_attention("img<-txt+img|img<-kept:txt+img|local")
    assert joint.otherwise is not None
    for call in calls(2, img=7):
        mine = call.streams["img"][call.index]
        reference, behind = (mine, 5 + mine), (mine, 21 + mine)
        call.introduce_whole("txt", 21)
        assert call.chosen(joint, reference) == parse_attention("local")
        assert call.chosen(joint, behind) is joint
        call.introduce_whole("txt", 0)  # the class has kept it
        assert call.chosen(joint, behind) is joint.otherwise and call.common_keys(joint.otherwise, masked=False) == 21


@pytest.mark.parametrize("first", [0, 1, 4, 9])
@pytest.mark.parametrize("text", [2, 9])
def test_the_first_tokens_of_a_stream_are_a_stream(text: int, first: int) -> None:
    first = min(first, text)
    ranks, value, streams = calls(3, img=7, txt=text), rows(1, 7 + text), ("img", "index:txt")
    held = [call.streams["img"][call.index] + cutter(parse("index:txt"))(call, first) for call in ranks]
    assert list(ranks[0].lengths(streams)) == held
    mine = [each[:, :count] for each, count in zip(shares(ranks, "img+txt", value), held, strict=True)]
    kept = [call.counted(streams, each, 1) for call, each in zip(ranks, mine, strict=True)]
    assert [each.shape[1] for each in kept] == list(ranks[0].key_lengths(streams))
    assert sorted(torch.cat(kept, 1).flatten().tolist()) == list(range(7 + first))


def test_another_number_of_first_tokens_gives_attention_other_lengths() -> None:
    attention = parse_attention("img+index:txt")
    (call,) = calls(1, img=7, txt=5)
    for first in (3, 1, 1):
        call.introduce_first("txt", first)
        assert call.attended(attention) == (((7 + first,), (7 + first,)), (7 + first, 7 + first))


def test_a_stream_without_any_token_is_there_on_no_rank() -> None:
    assert [each.shape for each in shares(calls(2), "aud", rows(1, 0, 4))] == [(1, 0, 4)] * 2


def test_a_length_that_is_not_the_streams_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Tiny: img has 7 tokens by the plan and 8 in this call"):
        shares(calls(2, img=7), "img", rows(1, 8))
    with pytest.raises(ValueError, match=r"Tiny: img has 7 tokens by the plan and 6 in this call"):
        shares(calls(2, img=7), "order:img", torch.zeros(6, 6))


@pytest.mark.parametrize("parts", PARTS)
def test_a_row_a_frame_becomes_a_row_a_token(parts: int) -> None:
    """As ComfyUI's Wan: where frames do not divide tokens, each has as many as the first, and the last has fewer."""
    for tokens, frames in ((12, 3), (11, 3), (7, 7)):
        value = rows(1, frames, 2)
        each = -(-tokens // frames)
        whole = value.repeat_interleave(each, 1)[:, :tokens]
        assert torch.equal(torch.cat(shares(calls(parts, x=tokens), "frames:x", value), 1), whole)
    with_other_dims = rows(1, 3)
    assert all(each is with_other_dims for each in shares(calls(parts, x=12), "frames4:x", with_other_dims))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 4, 5)])
def test_a_grid_is_cut_along_its_longer_side(parts: int, shape: tuple[int, int, int]) -> None:
    value, ranks = rows(1, *shape, 3), calls(parts)
    cut = shares(ranks, "grid@1", value)
    flat = shares(ranks, "flat:grid@1", value.flatten(1, 3))
    dim = 2 if shape[1] > shape[2] else 3
    assert torch.equal(torch.cat(cut, dim), value)
    assert all(torch.equal(one.flatten(1, 3), other) for one, other in zip(cut, flat, strict=True))
    assert [call.lengths(("grid",))[call.index] for call in ranks] == [each.shape[1] for each in flat]
    broadcast = rows(1, 2, 1, 1, 3)
    assert all(each is broadcast for each in shares(ranks, "grid@1", broadcast))


@pytest.mark.parametrize("parts", PARTS)
def test_a_mask_is_in_the_order_of_the_ranks(parts: int) -> None:
    ranks = calls(parts, txt=5, img=7)
    order = torch.cat(shares(ranks, "txt+img", torch.arange(12)[None]), 1)[0]
    mask = rows(1, 12, 12)
    for each in shares(ranks, "order:txt+img", mask):
        assert torch.equal(each, mask[:, order][:, :, order])
    for each in shares(ranks, "order:txt+img", rows(1, 1, 12)):
        assert torch.equal(each, rows(1, 1, 12)[..., order])


@pytest.mark.parametrize("parts", PARTS)
def test_ranges_name_the_same_tokens(parts: int) -> None:
    ranges = [(0, 3, "a", torch.arange(3)), (3, 8, "b", torch.arange(3, 8)), (8, None, "c", torch.arange(8, 12))]
    ranks = calls(parts, txt=5, img=7)
    named = [name for start, end, name, _ in ranges for _ in range(start, end or 12)]
    for call, cut in zip(ranks, shares(ranks, "ranges:txt+img", ranges), strict=True):
        mine = cutter(parse("txt+img"))(call, torch.arange(12)[None])[0].tolist()
        found = {token: name for start, end, name, _ in cut for token in mine[start:end]}
        assert [found[token] for token in mine] == [named[token] for token in mine]
        assert all(rows.tolist() == mine[start:end] for start, end, _, rows in cut)
        assert sum(end - start for start, end, *_ in cut) == len(mine)


@pytest.mark.parametrize("parts", PARTS)
def test_ranges_behind_a_stream_that_is_held_are_counted_from_there(parts: int) -> None:
    for call in calls(parts, txt=5, img=7):
        text, image = call.streams["txt"][call.index], call.streams["img"][call.index]
        cut = cutter(parse("ranges:-txt+img"))(call, [(0, 1, 0), (1, text + 4, 1), (text + 4, text + 7, 2)])
        first = min(max(4 - call.start("img"), 0), image)
        tokens = [value for start, end, value in cut for _ in range(start, end)]
        assert tokens == [0] + [1] * (text - 1 + first) + [2] * (image - first)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("index", [0, 1, 4, 7])
def test_an_index_counts_this_ranks_tokens_before_it(parts: int, index: int) -> None:
    assert sum(shares(calls(parts, img=7), "index:img", index)) == index


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("count", [9, 7, 4, 1, 0])
def test_rows_for_the_last_tokens_are_those_of_the_last_ranks(parts: int, count: int) -> None:
    """As ComfyUI's Stable Audio: fewer rows are padded in front, of more the last count."""
    value, ranks = rows(1, count, 2) + 1, calls(parts, x=7)
    tokens = [call.streams["x"][call.index] for call in ranks]
    cut = shares(ranks, "last:x", value)
    pairs = zip(cut, tokens, strict=True)
    padded = [torch.nn.functional.pad(each, (0, 0, total - each.shape[1], 0)) for each, total in pairs]
    assert torch.equal(torch.cat(padded, 1), torch.nn.functional.pad(value, (0, 0, 7 - count, 0)))


@pytest.mark.parametrize("tokens", [7, 4, 1])
def test_residuals_are_for_the_first_tokens(tokens: int) -> None:
    given = rows(1, tokens, 2)
    cut = [cut_control(call, [given, None, given], "img", {}, None) for call in calls(3, img=7)]
    assert torch.equal(torch.cat([each[0] for each in cut], 1), given)
    assert all(each[1] is None and each[2] is each[0] for each in cut)


def test_tuples_have_a_word_for_each_value_and_words_reach_into_them() -> None:
    (call,) = calls(1, img=3)
    given = (rows(1, 3), rows(1, 9))
    cut = cutter(parse(("img", "")))(call, given)
    assert isinstance(cut, tuple) and cut[1] is given[1]
    rotation, split = cutter(parse("img"))(call, (rows(1, 3), True))
    assert torch.equal(rotation, rows(1, 3)) and split is True


def test_nothing_stays_nothing() -> None:
    (call,) = calls(1, img=3)
    for text in ("img", "frames:img", "order:img", "ranges:img", "index:img", "last:img", "guides:img", ("img", "")):
        assert cutter(parse(text))(call, None) is None


@pytest.mark.parametrize("text", ["img+*", "order:img", "frames:img", "flat:grid@1", "index:img", "last:img"])
def test_what_has_no_way_back_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be gathered"):
        gatherer(parse(text))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("tracked", [3, 6])
def test_a_mask_of_guides_has_the_queries_of_each_rank(parts: int, tracked: int) -> None:
    """Of 13 tokens, 7 and on are guides; where not all of them are tracked, the others attend to everything."""
    mask = SimpleNamespace(
        guide_start=7, tracked_count=tracked, noisy_mask=rows(1, 1, 1, 13), tracked_mask=rows(1, 1, tracked, 13)
    )
    queries: dict[int, list[int]] = {0: [], 1: []}
    for call in calls(parts, vid=13):
        cut = cutter(parse("guides:vid"))(call, mask)
        assert cut.all is mask.noisy_mask
        assert [each.mask for each in cut.segments] == [mask.tracked_mask, None][: len(cut.segments)]
        for number, each in enumerate(cut.segments):
            assert each.lengths[call.index] == each.last - each.first
            queries[number] += range(call.start("vid") + each.first, call.start("vid") + each.last)
    assert queries == {0: list(range(7, 7 + tracked)), 1: list(range(7 + tracked, 13))}


class Compressed:
    """As LTX's `CompressedTimestep`: a row for each frame, of which blocks ask for those of all tokens."""

    __slots__ = ("data", "batch_size", "num_frames", "patches_per_frame", "feature_dim")

    def __init__(self, data: Tensor, patches_per_frame: int) -> None:
        self.batch_size, self.num_frames, self.feature_dim = data.shape
        self.data, self.patches_per_frame = data, patches_per_frame

    def expand(self) -> Tensor:
        return self.data.repeat_interleave(self.patches_per_frame, 1)

    def expand_for_computation(self, table: Tensor, *, batch_size: int) -> tuple[Tensor, ...]:
        assert batch_size == self.batch_size and self.data.shape == (batch_size, self.num_frames, self.feature_dim)
        return tuple(self.data.repeat_interleave(self.patches_per_frame, 1) * each for each in table)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("frames", "patches"), [(2, 1), (1, 2), (3, 4)])
def test_a_timestep_of_frames_makes_the_rows_of_this_ranks_tokens(parts: int, frames: int, patches: int) -> None:
    whole, table = Compressed(rows(2, frames, 5), patches), torch.tensor([2.0, 3.0])
    cut = shares(calls(parts, vid=frames * patches), "frames:vid", whole)
    for number, want in enumerate((whole.expand(), *whole.expand_for_computation(table, batch_size=2))):
        made = [(each.expand(), *each.expand_for_computation(table, batch_size=2))[number] for each in cut]
        assert torch.equal(made[0] if frames * patches < parts else torch.cat(made, 1), want)
    assert all(isinstance(each, Compressed) for each in cut) and whole.patches_per_frame == patches
    one = Compressed(rows(2, 1, 5), 1)
    assert shares(calls(2, vid=7), "frames:vid", one) == [one, one]


class Others(Part):
    """A group that knows what the other parts send."""

    sent: list[Tensor]

    def gather(self, tensor: Tensor, *, dim: int, lengths: tuple[int, ...]) -> Tensor:
        assert torch.equal(tensor, self.sent[self.index])
        assert [each.shape[dim] for each in self.sent] == list(lengths)
        return torch.cat(self.sent, dim)


def masked(parts: int) -> list[TokenCall]:
    """Ranks of 7 queries and 11 keys, 2 of them in a text that all have."""
    return calls(parts, q=7, txt=2, k=9)


def test_a_mask_of_this_ranks_tokens_becomes_that_of_all() -> None:
    """Of keys where it has this rank's; of queries where it has this rank's, who all say so."""
    attention, mask = parse_attention("q<-txt+k"), rows(2, 3, 7, 11)
    ranks = masked(3)
    queries, keys = ranks[0].lengths(["q"]), ranks[0].key_lengths(["txt", "k"])
    own = [cutter(parse("txt+k@3"))(call, mask[:, :, :1]) for call in ranks]
    counted = [call.counted(("txt", "k"), each, 3) for call, each in zip(ranks, own, strict=True)]
    order = torch.cat(counted, 3)[0, 0, 0].long()
    for call, held in zip(ranks, own, strict=True):
        call.group = Others(3, call.index)  # type: ignore[assignment]
        call.group.sent = counted  # type: ignore[attr-defined]
        whole = whole_mask(call, attention, held, queries, keys, held.shape[3])
        assert torch.equal(whole, mask[:, :, :1, order]), "a column for each key"
        with pytest.raises(ValueError, match="Tiny: a mask of 2 queries x 5 keys holds this rank's keys alone"):
            whole_mask(call, attention, rows(2, 5), queries, keys, 5)
    mine = [cutter(parse("q@2"))(call, mask) for call in ranks]
    for call, held in zip(ranks, mine, strict=True):
        call.group.sent = mine  # type: ignore[attr-defined]
        assert torch.equal(whole_mask(call, attention, held, queries, keys, 4), mask)
        for given in (mask, mask[:, :, :1], mask[:, :, :3] if held.shape[2] != 3 else mask):
            assert whole_mask(call, attention, given, queries, keys, 4) is given
        assert whole_mask(call, attention, mask[0, 0], queries, keys, 4).shape == (1, 1, 7, 11)
        assert torch.equal(whole_mask(call, attention, mask[:, 0], queries, keys, 4), mask[:, :1])


@pytest.mark.parametrize("window", [0, 2, 9])
def test_a_window_of_all_tokens_hides_what_is_farther_away(window: int) -> None:
    made = window_mask(torch.zeros(1, dtype=torch.half), window, 5)
    assert made.shape == (1, 1, 5, 5) and made.dtype == torch.half
    lowest = torch.finfo(torch.half).min
    assert made[0, 0].tolist() == [[0.0 if abs(a - b) <= window else lowest for a in range(5)] for b in range(5)]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("height", "width"), [(5, 7), (7, 5)])
def test_pixels_of_a_grid_of_patches_become_whole(parts: int, height: int, width: int) -> None:
    ranks, axis = calls(parts), 3 if height >= width else 4
    patches = shares(ranks, "grid@2", rows(1, 2, 3, height, width))
    pixels = [each.repeat_interleave(2, 3).repeat_interleave(2, 4) for each in patches]
    for call in ranks:
        call.group = Others(parts, call.index)  # type: ignore[assignment]
        call.group.sent = [each.unflatten(axis, (-1, 2)) for each in pixels]  # type: ignore[attr-defined]
        whole = gatherer(parse("grid@2"))(call, pixels[call.index])
        assert torch.equal(whole[..., ::2, ::2], rows(1, 2, 3, height, width))


@pytest.mark.parametrize("parts", PARTS)
def test_rows_of_frames_are_counted_in_frames_of_any_number(parts: int) -> None:
    ranks = calls(parts)
    shares(ranks, "grid@2", rows(1, 2, 3, 5, 7))
    fewer = shares(ranks, "flat:grid@1", rows(1, 2 * 35, 4))  # two frames, of which the grid had three
    assert [each.shape[1] for each in fewer] == list(ranks[0].frame_lengths(fewer[0].shape[1]))
    assert sum(each.shape[1] for each in fewer) == 70
    assert all(
        call.frame_lengths(each.shape[1]) == ranks[0].frame_lengths(fewer[0].shape[1])
        for call, each in zip(ranks, fewer, strict=True)
    )
    with pytest.raises(ValueError, match="is not over whole frames, of which it has"):
        ranks[0].frame_lengths(fewer[0].shape[1] + 1)
