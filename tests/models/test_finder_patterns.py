"""What is said of the rows that moved: patterns as exact figures, at the edges where one becomes another; and trees."""

from collections.abc import Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel_runtime.models.finder.probe import Pattern, Rows, Runs, described
from parallel_runtime.models.finder.values import copied, leaf_at, leaves, moved, nudged, tensors, with_leaf

# Which rows moved with the first, the middle and the last index; of how many indices; of how many rows; the pattern.
PATTERNS: list[tuple[Sequence[Sequence[int]], int, int, Pattern]] = [
    ([(), (), ()], 5, 9, "none"),
    ([(3,), (5,), (7,)], 5, 9, Rows(3)),
    ([(0,), (2,), (4,)], 5, 5, Rows(0)),
    ([(3,), (5,), ()], 5, 6, Rows(3, first=3)),
    ([(), (5,), (7,)], 5, 9, "other"),
    ([(3,), (6,), (7,)], 5, 9, "other"),
    ([(0, 1), (0, 1)], 2, 2, "all"),
    ([(0, 1)], 1, 2, "other"),
    ([(1, 2), (3, 4), (5, 6)], 3, 7, Runs(1, 2)),
    ([(1, 2), (3, 4), (5,)], 3, 6, Runs(1, 2)),
    ([(0, 1), (2, 3)], 2, 4, Runs(0, 2)),
    ([(0, 1), (2, 3), ()], 3, 4, "other"),
    ([(0, 1), (2, 3), (4, 5)], 3, 7, "other"),
    ([(0, 1, 2), (3, 4, 5), ()], 3, 6, "other"),
    ([(0, 1), (2, 4), (4, 5)], 3, 6, "other"),
    ([(0, 1, 2), (1, 2, 3)], 2, 5, "other"),
]


@pytest.mark.parametrize(("moved", "size", "rows", "pattern"), PATTERNS)
def test_rows_that_move_with_an_index(moved: Sequence[Sequence[int]], size: int, rows: int, pattern: Pattern) -> None:
    indices = sorted({0, size // 2, size - 1})
    found = [(index, tuple(each)) for index, each in zip(indices, moved, strict=True)]
    assert described(found, size, rows) == pattern


class Pair(NamedTuple):
    """As a class may return."""

    one: Any
    two: Any


class Heard:
    """Called, so no value."""

    def __call__(self) -> None:
        """Nothing."""


def test_a_tree_has_leaves_by_address_and_is_changed_at_one_of_them() -> None:
    ones, twos = torch.ones(2), torch.zeros(3)
    tree = [{"a": (ones, 5)}, Pair(twos, None)]
    assert [at for at, _ in leaves(tree)] == [(0, "a", 0), (0, "a", 1), (1, 0), (1, 1)]
    assert [at for at, _ in tensors(tree)] == [(0, "a", 0), (1, 0)]
    assert leaf_at(tree, (0, "a", 0)) is ones and leaf_at(tree, (1,)) is tree[1] and leaf_at(tree, ()) is tree
    assert with_leaf(tree, (0, "a", 1), 6) == [{"a": (ones, 6)}, tree[1]] and tree[0] == {"a": (ones, 5)}
    changed = with_leaf(tree, (1, 1), 7)
    assert changed[0] is tree[0] and changed[1] == Pair(twos, 7) and type(changed[1]) is Pair
    assert with_leaf(tree, (), 8) == 8 and with_leaf({"a": 1, "b": 2}, ("b",), 3) == {"a": 1, "b": 3}


def test_a_copy_has_tensors_of_its_own_and_shares_what_no_module_writes_to() -> None:
    heard, table, text = Heard(), MappingProxyType({"a": 1}), SimpleNamespace(a=torch.ones(1))
    tree = {"a": [torch.ones(2)], "b": Pair(torch.zeros(1), 4), "c": heard, "d": table, "e": text, "f": None}
    other = copied(tree)
    assert other["a"][0] is not tree["a"][0] and torch.equal(other["a"][0], tree["a"][0])
    assert type(other["b"]) is Pair and other["b"][0] is not tree["b"][0] and other["b"][1] == 4
    assert other["c"] is heard and other["d"] is table and other["f"] is None
    assert other["e"] is not text and other["e"].a is text.a


@pytest.mark.parametrize(
    ("tensor", "dim", "index", "rows"),
    [
        (torch.arange(6).view(2, 3), 1, 2, [[0, 1, 3], [3, 4, 6]]),
        (torch.zeros(3, 2), 0, 1, [[0, 0], [0.5, 1], [0, 0]]),
        (torch.tensor([[-1e30, 2.0]]), 1, 0, [[0.5, 2]]),
        (torch.tensor([[True, False], [True, True]]), 1, 0, [[False, False], [False, True]]),
        (torch.zeros(2, 0), 0, 1, [[], []]),
        (torch.zeros(1, 2, dtype=torch.complex64), 1, 1, [[0, 0.5]]),
    ],
    ids=str,
)
def test_an_index_has_other_values_and_all_others_their_own(tensor: Tensor, dim: int, index: int, rows: Any) -> None:
    before = tensor.clone()
    assert nudged(tensor, dim, index).tolist() == rows and torch.equal(tensor, before)
    assert moved(before, nudged(tensor, dim, index), dim) == ((index,) if tensor.numel() else ())


def test_rows_that_moved_are_those_with_another_number() -> None:
    before = torch.zeros(2, 3, 4)
    before[0, 1, 2] = torch.nan
    after = before.clone()
    assert moved(before, after, 1) == () and moved(before, after[:, :2], 1) is None
    assert moved(before[:, :0], after[:, :0], 1) == (), "a call may have no keys"
    after[1, 2, 0], after[0, 0, 3] = 1, torch.nan
    assert moved(before, after, 0) == (0, 1) and moved(before, after, 1) == (0, 2) and moved(before, after, 2) == (0, 3)
    after[0, 1, 2] = 0
    assert moved(before, after, 1) == (0, 1, 2)
