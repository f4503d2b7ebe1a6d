"""What a rank keeps of ComfyUI's step caches, and which calls are skipped by it, in numbers that are easy to add up."""

import pytest
import torch

from parallel_runtime.stock_caches import CachedRows, SkipDecision, StockCache, cached_rows_bytes

LOOKED_AT = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # (S, C): two of six numbers are compared
X = torch.arange(12.0).view(2, 2, 3)
ONES = torch.ones(2, 2, 3)


def cache(calls: str = "-nmm", **more: object) -> StockCache:
    return StockCache(**{"easy": True, "threshold": 0.3, "calls": calls, "together": True, "first": 1} | more)


def test_bytes_are_of_what_was_added_and_of_each_64th_number_twice() -> None:
    assert [cached_rows_bytes(numbers) for numbers in (0, 64, 65)] == [0, 4 * (64 + 2), 4 * (65 + 4)]
    with pytest.raises(ValueError, match="calls 'nx' of a step cache; use '-', 'n' and 'm'"):
        cache("nx")
    assert (StockCache(easy=False, threshold=0.1, calls="m").first, cache().first) == (0, 1)


def test_a_rank_notes_what_a_computed_call_changed_and_gives_it_again() -> None:
    rows = CachedRows(cache(), LOOKED_AT, sides=(1, 0))
    rows.note(0, X, [X, X])
    assert rows.again(X) == [] and rows.nbytes == 0 and rows.change(X).tolist() == [0.0, 0.0]
    assert rows.noted.tolist() == [0.0] * 4
    rows.note(1, X, [2 * ONES, -3 * ONES])
    assert rows.noted.tolist() == [0.0, 0.0, 12 * 2 + 12 * 3, 24.0], "of both sides, as one call has them"
    assert rows.nbytes == 4 * (12 + 12 + 4 + 4)
    assert rows.change(X - 0.5).tolist() == [2.0, 4.0]
    first, second = rows.again(X + 1)
    assert torch.equal(first, 3 * ONES) and torch.equal(second, -2 * ONES)
    rows.note(2, X + 1, [5 * ONES, ONES])
    assert rows.noted.tolist() == [3.0 * 4, 4.0, 12 * 5 + 12, 24.0] and rows.change(X + 1).tolist() == [0.0, 4.0]
    rows.drop()
    assert rows.again(X) == []


@pytest.mark.parametrize(
    ("given", "sides", "counts", "noted"),
    [
        ({}, (0,), True, [0.0, 0.0, 36.0, 12.0]),  # the side that is compared is another rank's
        ({"together": False}, (0,), True, [0.0, 0.0, 0.0, 0.0]),
        ({"together": False, "first": 0}, (0,), True, [12.0, 4.0, 36.0, 12.0]),
        ({"first": 0}, (0,), False, [0.0, 0.0, 0.0, 0.0]),  # another rank has the same rows
    ],
)
def test_each_number_counts_on_one_rank_alone(given: dict, sides: tuple, counts: bool, noted: list[float]) -> None:
    rows = CachedRows(cache(**given), LOOKED_AT, sides=sides, counts=counts)
    rows.note(1, X, [0 * ONES])
    rows.note(2, X, [3 * ONES])
    assert rows.noted.tolist() == noted
    assert rows.change(X + 1).tolist() == ([4.0, 4.0] if noted[1] else [0.0, 0.0])


def test_calls_are_skipped_while_the_sum_of_the_estimates_is_below_the_threshold() -> None:
    """What comes out changes as much as what goes in, so an estimate is that change over the size of what came out."""
    calls = "-nmmmmm-"
    rows, sums = CachedRows(cache(calls, first=0, together=False), LOOKED_AT, sides=(0,)), []
    decision = SkipDecision(rows.cache, lambda each: sums.append(each.tolist()) or each)
    skipped = []
    for call, moved in enumerate((0.0, 0.0, 0.1, 0.2, 0.3, 0.39, 0.5, 0.6)):
        x = ONES * moved
        skipped.append(decision.skips(call, rows, x))
        if not skipped[-1]:
            rows.note(call, x, [ONES + moved])
    # Since call 2, which made 1.1: 0.1 / 1.1, then 0.2 / 1.1 more, then 0.29 / 1.1, together 0.54. Then 0.11 / 1.39.
    assert skipped == [False, False, False, True, True, False, True, False]
    assert decision.skipped == 3 and rows.again(ONES) == [], "nothing is kept where nothing may be skipped any more"
    assert [len(each) for each in sums] == [6] * 5 and sums[0][:2] == pytest.approx([0.4, 4.0])
