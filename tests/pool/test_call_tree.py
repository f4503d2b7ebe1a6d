"""The call of a model as a tree: what goes in comes out, and what cannot travel is refused by its place in the call."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.models.hosted.calls import DEPTH, from_tree, to_tree
from parallel_runtime.wire.protocol import ProtocolError

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def sent(value: object) -> object:
    """The value as the other side gets it."""
    tree, tensors = to_tree(value)
    return from_tree(json.loads(json.dumps(tree, allow_nan=False)), tensors)


@given(plain)
def test_plain_values_come_out_as_they_went_in(value: object) -> None:
    assert repr(sent(value)) == repr(value), "each of its own type, too"


def test_a_float_that_is_no_number_comes_out() -> None:
    for kind in (float, np.float64):
        nan, up, down = sent([kind(each) for each in ("nan", "inf", "-inf")])
        assert math.isnan(nan)
        assert (up, down) == (math.inf, -math.inf)


def test_a_tensor_in_two_places_is_sent_once() -> None:
    one, other = torch.ones(2), torch.ones(2)
    tree, tensors = to_tree({"args": [one, (one, other)], "kwargs": {"again": one}})
    assert [tensor is each for tensor, each in zip(tensors, (one, other), strict=True)] == [True, True]
    got = from_tree(tree, tensors)
    assert got["args"][0] is got["args"][1][0] is got["kwargs"]["again"] is one
    assert got["args"][1][1] is other


class Layout:
    """Something that a node might put into a conditioning."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"args": [1, {"deep": [Layout()]}]}, "Model.args[1].deep[0] is a Layout"),
        ({"args": [torch.ones(2, dtype=torch.complex64)]}, "Model.args[0] is a tensor of complex64"),
        ({"args": [torch.ones(2).to_sparse()]}, "Model.args[0] is a Tensor"),
        ({"args": [torch.ones((1,) * 7)]}, "with 7 dims"),
        ({"kwargs": {"x": torch.ones(2, device="meta")}}, "Model.kwargs.x is computed from the model's weights"),
        ({"kwargs": {3: 1}}, "Model.kwargs has the key 3"),
        ({"args": [lambda x: x]}, "Model.args[0] is a function"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_place(value: object, named: str) -> None:
    with pytest.raises(ValueError, match="cannot be sent|computed from") as error:
        to_tree(value, "Model")
    assert named in str(error.value)


def test_a_list_in_itself_is_refused() -> None:
    endless: list = []
    endless.append(endless)
    with pytest.raises(ValueError, match=f"deeper than {DEPTH}"):
        to_tree(endless)


@pytest.mark.parametrize(
    "tree",
    [
        [1],
        {},
        {"t": 0, "u": []},
        {"x": 1},
        {"t": 1},
        {"t": -1},
        {"t": True},
        {"t": "0"},
        {"f": "1.5"},
        {"f": "__import__('os')"},
        {"l": {}},
        {"u": 3},
        {"d": [1]},
        {"l": [{"d": {"a": {"x": 1}}}]},
    ],
    ids=json.dumps,
)
def test_a_tree_that_nobody_writes_is_refused(tree: object) -> None:
    with pytest.raises(ProtocolError, match="call"):
        from_tree(tree, [torch.ones(1)])
