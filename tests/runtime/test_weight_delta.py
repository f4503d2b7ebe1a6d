"""Weight patches as they travel: in messages of a size, none lost, and told from other strengths of the same ones."""

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel_runtime.weight_delta import WeightDelta, WeightDeltas, pack, unpack


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def lora(key: str, rows: int, columns: int, *, seed: int = 1, **more: object) -> WeightDelta:
    up, down = noise(rows, 4, seed=seed, scale=0.3), noise(4, columns, seed=seed + 1, scale=columns**-0.5)
    values = (up, down, 2.0, None)
    return WeightDelta(**{"key": key, "kind": "lora", "strength": 0.8, "values": values, **more})


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'lorra' is unknown"):
        WeightDelta(key="w", kind="lorra", strength=1, values=())


NOT_FINITE = [
    ({"strength": math.nan}, "w: a patch has strength=nan; use a finite number"),
    ({"strength_model": -math.inf}, "w: a patch has strength_model=-inf; use a finite number"),
    ({"values": (noise(3, 4), noise(4, 2), math.inf, None)}, "w: a patch has an alpha of inf; its file is damaged"),
]


@pytest.mark.parametrize(("given", "said"), NOT_FINITE)
def test_a_number_that_no_message_carries_is_refused_where_it_comes_in(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lora("w", 3, 2, **given)


def test_a_batch_ends_where_its_tensors_are_enough_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [WeightDelta(key=f"7/{name}", kind="hook_weight", strength=1, values=(noise(8, 8),)) for name in "abcde"]
    monkeypatch.setattr("parallel_runtime.weight_delta.ENOUGH_BYTES", 2 * 8 * 8 * 4)
    assert [len(batch.records) for batch in pack(weights)] == [2, 2, 1]


def test_patches_travel_in_batches_and_arrive_as_they_were() -> None:
    patches = [lora(f"w{index % 400}", 3, 2, seed=index) for index in range(800)]
    arrived: dict[str, list[WeightDelta]] = {}
    batches = list(pack(patches))
    assert len(batches) > 1
    for batch in batches:
        assert not arrived.keys() & unpack(batch.records, batch.tensors).keys(), "a weight's patches were torn apart"
        arrived |= unpack(batch.records, batch.tensors)
    assert [len(group) for group in arrived.values()] == [2] * 400
    for index in (0, 400):
        assert torch.equal(arrived["w0"][index // 400].values[0], patches[index].values[0])
        assert arrived["w0"][index // 400].values[2:] == patches[index].values[2:]


def test_equal_tensors_are_the_same_change_and_others_never() -> None:
    first = lora("w", 3, 2)
    read_again = replace(first, values=tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in first.values))
    other = replace(first, values=(first.values[0] + 1e-3, *first.values[1:]))
    wider = replace(first, values=(first.values[0].double(), *first.values[1:]))
    without = replace(first, values=(None, *first.values[1:]))
    moved = replace(first, offset=(0, 0, 3))
    for side_branch in (True, False):
        held = WeightDeltas("a", (first,), side_branch=side_branch).applied
        for patch, alike in (
            *((first, True), (read_again, True), (other, False)),
            *((wider, False), (without, False), (moved, False)),
        ):
            for strength in (first.strength, first.strength + 1):
                given = WeightDeltas("b", (replace(patch, strength=strength),), side_branch=side_branch)
                assert given.same_as(held) is (alike and strength == first.strength)
                assert given.differs_in_strength_alone(held) is (alike and side_branch)
        given = WeightDeltas("b", (first,), side_branch=not side_branch)
        assert not given.same_as(held) and not given.differs_in_strength_alone(held)
        assert not WeightDeltas("b", (first, first), side_branch=side_branch).same_as(held)


def test_tensors_of_merged_changes_are_not_held() -> None:
    large = lora("w", 300, 200)
    held, again = WeightDeltas("a", (large,)).applied, lora("w", 300, 200)
    assert WeightDeltas("b", (again,)).same_as(held)
    del large
    gc.collect()
    assert not WeightDeltas("b", (again,)).same_as(held), "whom nobody has cannot be compared"
