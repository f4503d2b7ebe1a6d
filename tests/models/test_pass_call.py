"""Passes of a pipeline: which tokens each has, and that of all tokens is kept what came last.

The ranks of a stage run one after another here, each told what the others send. What passes compute is
test_hosted_pipelines.py's.
"""

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.models.hosted.first_keys import attend_again
from parallel_runtime.models.hosted.pass_call import PassCall, PassEndsError
from parallel_runtime.models.hosted.word_handlers import cutter
from parallel_runtime.models.specs.words import parse, parse_attention
from parallel_runtime.parallel.kept_keys import HeldRows

IMAGE = 11
CUTS = [(1, 3), (2, 2), (3, 2)]


class Group:
    """One of several ranks. `sent`: what all of them send."""

    shares = ()

    def __init__(self, parts: int, index: int) -> None:
        self.parts, self.index, self.sent = parts, index, list[Tensor]()

    def gather(self, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        assert torch.equal(tensor, self.sent[self.index])
        assert [each.shape[dim] for each in self.sent] == list(lengths)
        return torch.cat(self.sent, dim)

    def whole_keys(self, k: Tensor, v: Tensor, *, lengths: Sequence[int], exact: bool) -> tuple[Tensor, Tensor]:
        assert exact
        return self.gather(k, dim=2, lengths=lengths), -torch.cat(self.sent, 2)

    def attend(self, _: object, __: object, *, kept: object = None, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(kept=kept, **given)


def a_pass(
    held: Sequence[HeldRows], patches: int, patch: int | None, *, before: Sequence[str] = (), ends: bool = False
) -> list[PassCall]:
    """The pass on each rank."""
    given: dict[str, Any] = {"patches": patches, "patch": patch, "before": frozenset(before), "ends": ends}
    return [PassCall(Group(len(held), rank), "Tiny", held=each, **given) for rank, each in enumerate(held)]  # type: ignore[arg-type]


def sending(calls: Sequence[PassCall], tensors: list[Tensor]) -> list[tuple[PassCall, Tensor]]:
    """Each rank and what it sends, which all are told."""
    for call in calls:
        call.group.sent = tensors  # type: ignore[attr-defined]
    return list(zip(calls, tensors, strict=True))


def asked(call: PassCall, attention: Any, k: Tensor, queries: Sequence[int], keys: Sequence[int], mask: Any) -> Any:
    """What a pass asks of its ranks for an attention over `k`."""
    return call.attend(None, [k, k, k], attention, query_lengths=queries, key_lengths=keys, mask=mask)  # type: ignore[arg-type]


def passes(patches: int) -> list[int | None]:
    """One of all tokens, two rounds of patches, and another of all."""
    return [None, *range(patches), *range(patches), None, patches - 1]


@pytest.mark.parametrize(("text", "warm_up"), [(7, True), (7, False), (4, True), (1, True)])
@pytest.mark.parametrize(("ranks", "patches"), CUTS)
def test_keys_and_their_mask_are_those_that_came_last(ranks: int, patches: int, text: int, warm_up: bool) -> None:
    """Each token is its place, and a hundred more in every pass. Text of fewer tokens than parts is everybody's."""
    streams, total, held = ("txt", "img"), text + IMAGE, [HeldRows() for _ in range(ranks)]
    attention, newest = parse_attention("img<-txt+img"), torch.zeros(total)
    for number, patch in enumerate(passes(patches)[not warm_up :], 1):
        calls, tokens = a_pass(held, patches, patch), torch.arange(100.0 * number, 100 * number + total)[None]
        for call in calls:
            call.introduce("txt", text)
            call.introduce("img", IMAGE)
        mine = [cutter(parse("txt+img"))(call, tokens) for call in calls]
        counted = [call.counted(streams, each, 1) for call, each in zip(calls, mine, strict=True)]
        assert [each.shape[1] for each in counted] == list(calls[0].of_chunk(calls[0].key_lengths(streams)))
        came = torch.cat(counted, 1)
        places = (came[0] % 100).long()
        assert len(set(places.tolist())) == len(places), "each of them once"
        newest[places] = came[0]
        for call, own in sending(calls, [each[:, None, None] for each in counted]):
            queries, keys = call.lengths(["img"]), call.key_lengths(streams)
            mask = call.gather_keys(attention, own, dim=3, lengths=keys)
            k = came[:, None, :, None].expand(1, 2, -1, 3)
            there = asked(call, attention, k, queries, keys, mask)
            assert list(there.query_lengths) == [each.streams["img"][each.index] for each in calls]
            assert list(there.key_lengths) == [each.shape[1] for each in counted]
            assert there.kept is not None and there.mask is mask
            found, values = there.kept.seen(k, -k)
            assert torch.equal(found, found[:, :1, :, :1].expand(1, 2, -1, 3)) and torch.equal(values, -found)
            assert torch.equal(mask[0, 0, 0], found[0, 0, :, 0]), "a column for each key"
            whole = came[0] if patch is None else newest
            assert torch.equal(mask.flatten().sort()[0], whole.sort()[0])
            again = asked(call, attention, k, queries, keys, None)
            other = asked(call, attention, k.clone(), queries, keys, None)
            assert again.kept is not None and other.kept is not None
            sites = [each.site.removeprefix(f"{id(attention)}.") for each in (there.kept, again.kept, other.kept)]
            assert sites == ["0", "0", "1"], "the second is over the same keys"


def test_the_keys_of_an_attention_are_let_go_with_it() -> None:
    """The module frees them before what comes next, which may be its largest tensors."""
    (call,) = a_pass([HeldRows()], 2, 0)
    call.introduce("img", IMAGE)
    attention, lengths, sites = parse_attention("img"), call.lengths(["img"]), list[str]()
    for _ in range(2):
        keys = torch.zeros(1, 1, IMAGE, 1)
        for _ in range(2):
            there = asked(call, attention, keys, lengths, lengths, None)
            sites.append(there.kept.site)
        left = weakref.ref(keys)
        del keys, there
        assert left() is None
    assert sites[0] == sites[1] != sites[2] == sites[3]


@pytest.mark.parametrize(("ranks", "patches"), CUTS)
@pytest.mark.parametrize("grid", [(2, 7, 8), (3, 8, 7)])
def test_keys_of_a_grid_are_those_that_came_last(ranks: int, patches: int, grid: tuple[int, int, int]) -> None:
    total, held, attention = torch.Size(grid).numel(), [HeldRows() for _ in range(ranks)], parse_attention("grid")
    newest = torch.zeros(total)
    for number, patch in enumerate(passes(patches), 1):
        calls, tokens = a_pass(held, patches, patch), torch.arange(1e3 * number, 1e3 * number + total)
        mine = [cutter(parse("grid@0"))(call, tokens.view(grid)).flatten() for call in calls]
        came = torch.cat(mine)
        newest[(came % 1000).long()] = came
        for call in calls:
            lengths = call.lengths(["grid"])
            there = asked(call, attention, came, lengths, lengths, None)
            assert there.kept is not None
            found, _ = there.kept.seen(came.view(1, 1, -1, 1), came.view(1, 1, -1, 1))
            assert torch.equal(found.flatten().sort()[0], (came if patch is None else newest).sort()[0])


@pytest.mark.parametrize(("ranks", "patches", "image"), [(1, 3, 11), (2, 2, 11), (3, 2, 11), (1, 2, 2)])
def test_of_a_mask_of_all_queries_a_pass_has_its_own(ranks: int, patches: int, image: int) -> None:
    attention, mask = parse_attention("img<-txt+img"), torch.randn(2, 3, image, 7 + image)
    held, seen = [HeldRows() for _ in range(ranks)], []
    for patch in (*range(patches), None):
        call = a_pass(held, patches, patch)[0]
        call.introduce("txt", 7)
        call.introduce("img", image)
        given = call.lengths(["img"]), call.key_lengths(["txt", "img"])
        seen.append(asked(call, attention, mask, *given, mask).mask)
        one_row = mask[:, :, :1]
        assert asked(call, attention, mask, *given, one_row).mask is one_row
    *parts, whole = seen
    assert whole is mask and torch.equal(torch.cat(parts, 2), mask)
    assert max(each.shape[2] for each in parts) - min(each.shape[2] for each in parts) <= ranks


@pytest.mark.parametrize(("ranks", "patches"), CUTS)
def test_rows_of_other_patches_are_gathered_as_they_came_last(ranks: int, patches: int) -> None:
    """Twice in a pass, which ends where a rank has all rows that it is there for. Text that no patch cuts stays."""
    held, few, newest = [HeldRows() for _ in range(ranks)], ranks * patches - 1, torch.zeros(2, IMAGE, 3)
    for number, patch in enumerate(passes(patches), 1):
        for ends in (False, True):
            calls, rows = a_pass(held, patches, patch, ends=ends), torch.arange(66.0).view(2, IMAGE, 3) + 100 * number
            for call in calls:
                call.introduce("img", IMAGE)
                call.introduce("few", few)
            if patch is None:
                text = rows[:, :few]
                for call, own in sending(calls, [cutter(parse("few"))(call, text) for call in calls]):
                    assert torch.equal(call.gather("few", own, dim=1), text)
            for sign in (1, -1):
                mine = [cutter(parse("img"))(call, rows * sign) for call in calls]
                first = calls[0].start("img")
                last = first + sum(each.shape[1] for each in mine)
                newest[:, first:last] = rows[:, first:last]
                for call, own in sending(calls, mine):
                    if ends and patch is not None and sign < 0:
                        with pytest.raises(PassEndsError):
                            call.gather("img", own, dim=1)
                        continue
                    whole = call.gather("img", own, dim=1)
                    assert whole.is_contiguous() and torch.equal(whole, newest * sign)
                    whole += patch is not None  # a module may write to it
    assert held[0].count("") == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_runs_before_the_blocks_has_all_tokens_in_the_first_patch_which_gives_them_to_the_others(
    ranks: int,
) -> None:
    held, word, text = [HeldRows() for _ in range(ranks)], parse_attention("txt"), torch.arange(10.0).view(1, 5, 2)
    for patch in (None, 0, 1):
        calls = a_pass(held, 2, patch, before=["txt"])
        mine = [cutter(parse("txt"))(call, text) for call in calls]
        assert torch.equal(torch.cat(mine, 1), text), "on the ranks of the stage"
        for call, own in sending(calls, mine):
            lengths = call.streams["txt"]
            assert call.of_chunk(lengths) is lengths
            there = asked(call, word, text, lengths, lengths, text)
            assert vars(there) == {"query_lengths": lengths, "key_lengths": lengths, "mask": text, "kept": None}
            assert torch.equal(call.gather_keys(word, own, dim=1, lengths=lengths), text)
            if patch:
                call.group.sent = []  # type: ignore[attr-defined]  it is not sent again
            whole = call.gather("txt", own, dim=1)
            assert torch.equal(whole, text) and held[0].count("before.") == 1
            whole.zero_()
            call.introduce("img", IMAGE)
            parts = ranks if patch is None else 2 * ranks
            assert len(call.streams["img"]) == call.parts == parts
            assert call.index == call.group.index + ranks * (patch or 0)


def test_numbers_of_tokens_are_counted_in_a_pass_as_in_all() -> None:
    for patch, image, first in ((None, (4, 4), (4, 1)), (1, (2, 2, 2, 2), (2, 2, 1, 0))):
        for call in a_pass([HeldRows(), HeldRows()], 2, patch):
            assert call.introduce_whole("all", 9) == 9 and call.streams["all"] == (9,) * len(image)
            assert (call.introduce("img", 8), call.introduce_first("img", 5)) == (image, first)
            assert call._parts.streams == {"all": (9,) * 4, "img": (2,) * 4, "index:img": (2, 2, 1, 0)}


@pytest.mark.parametrize(
    ("ranks", "patches", "said"),
    [(1, 4, "patches=4 is more"), (2, 2, "patches=2 on 2 ranks each is more"), (2, 1, ""), (1, 3, "")],
)
def test_more_patches_than_tokens_are_refused(ranks: int, patches: int, said: str) -> None:
    (call, *_) = a_pass([HeldRows() for _ in range(ranks)], patches, 0, before=["refined"])
    for stream, total in (("refined", 50), ("txt", 1), ("img", 3)):
        call.introduce(stream, total)
    given = torch.zeros(1), call.lengths(["img"]), call.key_lengths(["img"]), None
    if not said:
        assert asked(call, parse_attention("img"), *given).kept is not None
        return
    with pytest.raises(ValueError) as error:
        asked(call, parse_attention("img"), *given)
    assert str(error.value) == (
        f"{said} than the tokens of this call, 3 of img, 1 of txt; use fewer patches, or a bigger image"
    )


def test_what_is_kept_is_counted() -> None:
    held = HeldRows()
    held.put("a.k", torch.ones(2, 3, 4), slice(1, 4), dim=1, total=7)
    assert held.put("a.v", torch.ones(1, 2, dtype=torch.half), torch.tensor([3, 0]), dim=1, total=5).tolist() == [
        [1, 0, 0, 1, 0]
    ]
    assert held.get("a.k").shape == (2, 7, 4) and held.get("a.k")[:, 1:4].sum() == held.get("a.k").sum() == 24
    assert (held.count("a."), held.count("a.k")) == (2, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_keys_of_a_modules_first_call_are_sent_once_and_come_first_in_all_later_ones(rank: int) -> None:
    call, first = SimpleNamespace(index=rank, group=Group(2, rank), first_keys=None), (3, 2)
    own, rooms = [torch.randn(1, 2, length, 4) for length in first], []
    for new in ((0, 0), (4, 1), (1, 1), (4, 1), (5, 6)):
        more = [torch.randn(1, 2, length, 4) for length in new]
        call.group.sent = own if call.first_keys is None else more
        k = torch.cat((own[rank], more[rank]), 2)
        seen: list[Any] = []
        qkv = [torch.randn(1, 2, 5, 4), k, -k]
        q = qkv[0]
        lengths = [one + other for one, other in zip(first, new, strict=True)]
        attend_again(call, lambda *given, seen=seen: seen.append(given), qkv, lengths, exact=True)  # type: ignore
        (((queries, keys, values), heads, mask),) = seen
        assert not qkv and queries is q and (heads, mask) == (2, None)
        assert torch.equal(keys, torch.cat((*own, *more), 2)) and torch.equal(values, -keys)
        rooms.append(keys.data_ptr())
    assert rooms[1] == rooms[2] == rooms[3] != rooms[4], "room for as many is used again"
