"""What is counted of operations, of attention and of exchanges, and the polynomials that follow, in exact numbers.

Of ComfyUI's classes it is families/test_counts.py's.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.models.hosted import count, reference
from parallel_runtime.models.hosted.attention import AttentionSwitch
from parallel_runtime.models.hosted.count import POINTS, CountedSequence, OperationCounter, SilentAxis
from parallel_runtime.models.hosted.valueless import has_values


def test_an_operation_is_counted_by_its_flops_or_by_what_it_moves_and_a_view_by_neither() -> None:
    x, y = torch.ones(2, 3), torch.ones(3, 5)
    with OperationCounter() as counter:
        first = x @ y
        with counter.at("attended"):
            second = first + first
            with counter.at("exchange", off=True):
                third = second * 2
            second.t()
        first.add_(1)
    assert counter.counts == {
        "module.operations": 2,
        "module.matmul_flops": 2 * 2 * 3 * 5,
        "module.moved_bytes": 40,  # each tensor once
        "attended.operations": 2,
        "attended.moved_bytes": 80,
        "held_bytes": 80,
    }
    assert third.sum() == 120 and counter.live == 80
    del first
    assert counter.live == 40
    del second
    assert counter.live == 0 and counter.counts["held_bytes"] == 80


@pytest.mark.parametrize("by_heads", [True, False])
def test_attention_is_one_operation_that_keeps_no_scores(monkeypatch: pytest.MonkeyPatch, by_heads: bool) -> None:
    def stock(q: Tensor, k: Tensor, v: Tensor, heads: int, *given: Any, **options: Any) -> Tensor:
        assert (heads, given, options) == (3, (None, None, by_heads), {"scale": 0.5})
        return torch.zeros(q.shape[0], 3, 5, 6) if by_heads else q + 0

    monkeypatch.setattr(count, "installed", lambda: AttentionSwitch(stock))
    q, k, v = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 7, 4), torch.ones(2, 3, 7, 6 if by_heads else 4)
    q, k, v = (q, k, v) if by_heads else (each.transpose(1, 2).flatten(2) for each in (q, k, v))
    counter = OperationCounter()
    with counter:
        out = counter.attention(stock)(q, k, v, 3, None, None, by_heads, scale=0.5)
    assert counter.counts == {
        "held_bytes": out.nbytes,
        "module.attention_flops": 4 * (2 * 3 * 5 * 7) * 4,
        "module.scores": 2 * 3 * 5 * 7,
        "module.operations": 1,
        "module.moved_bytes": sum(each.nbytes for each in (q, k, v, out)),
        "tokens": 7,
    }
    counter.attention(stock)(q, k[..., :3, :] if by_heads else k[:, :3], v, 3, None, None, by_heads, scale=0.5)
    assert counter.counts["tokens"] == 7 and counter.counts["module.operations"] == 2


def attended(sequence: CountedSequence, heads: int, groups: int) -> None:
    """One call: 5 queries a rank; 2 keys that every rank has, and 7."""

    def kernel(qkv: list[Tensor], heads: int, mask: Tensor | None) -> Tensor:
        assert [each.shape[2] for each in qkv[1:]] == [2 + 7 + 7] * 2, "those of both ranks"
        return qkv[0].new_zeros(*qkv[0].shape[:3], 8)

    qkv = [torch.zeros(1, heads, 5, 4), torch.zeros(1, groups, 9, 4), torch.zeros(1, groups, 9, 8)]
    sequence.attend(kernel, qkv, query_lengths=(5, 5), key_lengths=(7, 7), common=2)


def test_what_an_attention_exchanges_is_counted_apart() -> None:
    counter = OperationCounter()
    sequence = CountedSequence(2, counter)
    attended(sequence, 6, 2)
    counts = {name: value for name, value in counter.counts.items() if "." not in name}
    sent = 3 * 5 * 4 + 7 * (4 + 8) + 3 * 5 * 8  # half of the heads of q, k and v there, and of the output back
    own = {"exchanges": 1, "query_bytes": 4 * 6 * 5 * (4 + 8), "key_bytes": 4 * 2 * 7 * (4 + 8), "key_heads": 2}
    assert counts == own | {"key_bytes": pytest.approx(own["key_bytes"]), "sent_bytes": 4 * sent}
    assert counter.where == "module"
    with counter:
        attended(sequence, 6, 6)
        attended(sequence, 4, 1)  # fewer groups than ranks: keys are gathered, which is part of the attention
    assert counter.counts["exchanges"] == 3 and counter.counts["key_heads"] == 1 and "gathers" not in counter.counts
    assert counter.counts["attended.operations"] > 0 and counter.counts["exchange.operations"] > 0
    assert counter.counts["module.operations"] == 2 * 3, "that make q, k and v"
    with counter:
        assert sequence.gather(torch.zeros(2, 3, 4), dim=1, lengths=(3, 2)).shape == (2, 5, 4)
    assert (counter.counts["gathers"], counter.counts["gathered_bytes"]) == (1, 96)
    assert counter.counts["module.operations"] == 2 * 3 + 1


def test_attention_to_few_keys_is_counted_apart_too() -> None:
    counter = OperationCounter()
    qkv = [torch.zeros(1, 6, 50, 4), torch.zeros(1, 6, 2 + 3, 4), torch.zeros(1, 6, 2 + 3, 8)]
    given = {"query_lengths": (50, 50), "key_lengths": (3, 2), "common": 2}
    CountedSequence(2, counter).attend(lambda qkv, *_: torch.zeros(1, 6, qkv[0].shape[2], 8), qkv, **given)
    queries, keys = 4 * 6 * 50 * (4 + 8), pytest.approx(4 * 6 * 3 * (4 + 8))
    counts = {name: value for name, value in counter.counts.items() if "bytes" in name}
    assert counts.pop("few_keys.query_bytes") == counts["query_bytes"] == queries
    assert counts.pop("few_keys.key_bytes") == counts["key_bytes"] == keys == counts["sent_bytes"]
    assert counter.counts["exchanges"] == 1 and "gathers" not in counter.counts


def test_a_silent_axis_counts_what_all_others_are_sent() -> None:
    axis, whole = SilentAxis("ulysses", size=3), torch.ones(6)
    assert axis.start_all_gather(torch.ones(2), whole).wait() is whole and axis.traffic.num_bytes == 2 * 8
    axis.all_gather(torch.ones(1), whole)
    assert axis.traffic.num_bytes == 16 + 8
    arrived = axis.start_all_to_all(torch.ones(5, 2), send_lengths=(2, 1, 2), receive_lengths=(2, 2, 2)).wait()
    assert arrived.shape == (6, 2) and axis.traffic.num_bytes == 24 + 3 * 8
    assert axis.all_to_all(torch.ones(0, 2), send_lengths=(0, 0, 0), receive_lengths=(0, 1, 0)).shape == (1, 2)
    axis = SilentAxis("ulysses", size=3, index=1)
    axis.all_to_all(torch.ones(5, 2), send_lengths=(2, 1, 2), receive_lengths=(1, 1, 1))
    assert axis.traffic.num_bytes == 4 * 8, "what stays here is this rank's part"


TOKENS = [(point.width * point.height / 256, float(point.text_tokens)) for point in POINTS]


def amounts(*coefficients: float) -> list[float]:
    """A polynomial of 1, n, n n, t, n t, t t at all points."""
    return [
        sum(each * value for each, value in zip(coefficients, (1, n, n * n, t, n * t, t * t), strict=True))
        for n, t in TOKENS
    ]


def test_what_two_ranks_halve_is_shared_and_the_rest_every_ranks() -> None:
    whole, split = amounts(9, 0, 0, 4, 0, 0), amounts(0, 5, 3, 0, 2, 1)
    others = {"module.stays": amounts(1, 2, 0, 0, 0, 0), "residual_bytes": amounts(0, 7, 0, 0, 0, 0)}
    exchanged = {"exchange.operations": amounts(8, 0, 0, 0, 0, 0), "sent_bytes": amounts(0, 0, 0, 6, 0, 0)}
    one, two = [], []
    for place in range(len(POINTS)):
        here = {name: each[place] for name, each in others.items()}
        sent = {name: each[place] for name, each in exchanged.items()}
        held_by_one, held_by_two = (300.0, 200.0) if place == 2 else (9e9, 9e9)
        of_one = {"tokens": 5.0, "module.scores": whole[place] + split[place], "held_bytes": held_by_one}
        one.append([{}, here | of_one])
        two.append([{}, here | sent | {"module.scores": whole[place] + split[place] / 2, "held_bytes": held_by_two}])
    every, shared = count._fitted(TOKENS, one, two, 1, shares=True, real=False)
    held = sum(TOKENS[2])
    assert every == {
        "exchange.operations": pytest.approx((8, 0, 0, 0, 0, 0), abs=1e-6),
        "held_bytes": (0, 100 / held, 0, 100 / held, 0, 0),
        "module.scores": pytest.approx((9, 0, 0, 4, 0, 0), abs=1e-5),
        "module.stays": pytest.approx((1, 2, 0, 0, 0, 0), abs=1e-6),
        "sent_bytes": pytest.approx((0, 0, 0, 6, 0, 0), abs=1e-6),
    }
    assert shared == {
        "held_bytes": (0, 200 / held, 0, 200 / held, 0, 0),
        "module.scores": pytest.approx((0, 5, 3, 0, 2, 1), abs=1e-5),
        "residual_bytes": pytest.approx((0, 7, 0, 0, 0, 0), abs=1e-6),
    }
    alone, nothing = count._fitted(TOKENS, one, one, 1, shares=False, real=False)
    assert alone["module.scores"] == pytest.approx((9, 5, 3, 4, 2, 1), abs=1e-5) and set(nothing) == set(shared) - {
        "module.scores"
    }
    assert count._fitted(TOKENS, one, two, 0, shares=True, real=False) == ({}, {})


@pytest.mark.parametrize(
    ("fails", "gigabytes", "seen"),
    [
        (0, 90, [("meta", False)]),
        (1, 90, [("meta", False), ("cpu", False)]),
        (2, 8, [("meta", False), ("cpu", False), ("cpu", True)]),
        (2, 8.1, [("meta", False), ("cpu", False)]),
    ],
)
def test_weights_have_values_only_where_nothing_else_does_and_they_are_few(
    monkeypatch: pytest.MonkeyPatch, fails: int, gigabytes: float, seen: list[tuple[str, bool]]
) -> None:
    def built(*_: object) -> Any:
        module = torch.nn.Linear(2, 3)
        return SimpleNamespace(module=module, whole=module, round_here=lambda: None)

    def look(module: torch.nn.Module, device: torch.device) -> int:
        looked.append((str(device), has_values(module)))
        if len(looked) <= fails:
            raise RuntimeError("it reads values")
        return 7

    asked, looked = reference.Reference(), list[tuple[str, bool]]()
    weights = {"w": torch.empty(round(gigabytes * 10**9), dtype=torch.uint8, device="meta")}
    monkeypatch.setattr(asked, "_recognise", lambda: SimpleNamespace(weights=weights, config=None, kind=""))
    monkeypatch.setattr(asked, "_planned", lambda made, kind: made)
    monkeypatch.setattr(asked, "_build", lambda dtype: setattr(asked, "_built", built()))
    monkeypatch.setattr(reference, "build", built)
    monkeypatch.setattr(reference, "loaded_dtypes", lambda *_: (torch.float32, ""))
    if len(seen) > fails:
        assert asked._valueless("a", "default", look)[2] == 7
    else:
        with pytest.raises(ValueError, match=r"^Linear needs the values of its weights, and 8\.1 GB of them are "):
            asked._valueless("a", "default", look)
    assert looked == seen


def test_of_real_calls_text_and_picture_count_alike() -> None:
    tokens = [(10.0, 4.0), (20.0, 4.0), (20.0, 12.0)]
    found = count._fit(tokens, [3 + 2 * (n + t) + 5 * (n + t) ** 2 for n, t in tokens], real=True)
    assert found == pytest.approx((3, 2, 5, 2, 10, 5))


@pytest.mark.parametrize(
    ("one", "two", "everywhere", "shared"),
    [(300, 200, 100, 200), (300, 150, 0, 300), (300, 140, 0, 300), (300, 300, 300, 0)],
)
def test_what_is_held_is_in_proportion_to_the_tokens(one: float, two: float, everywhere: float, shared: float) -> None:
    found = [(0, each / 10, 0, each / 10, 0, 0) for each in (everywhere, shared)]
    assert list(count._held(10.0, one, two)) == found


def test_a_numbers_tokens_are_those_of_the_first_two_points() -> None:
    assert count._tokens_a_number([10, 14, 90], [5, 7, 8], channels=16) == 0.5
    assert count._tokens_a_number([10, 14], [0, 0], channels=16) == 1 / 64, "of patches of 2 x 2 where none are counted"
