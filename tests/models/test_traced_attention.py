"""Attention as an operator of torch's, its shapes, and what it refuses."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_runtime.models.hosted.attention import AttentionSwitch
from parallel_runtime.models.hosted.traced_attention import GraphAttention, attend

SEEN: list[Any] = []


def stock(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **options: Any,
) -> Tensor:
    """As ComfyUI's function."""
    SEEN.append((attn_precision, options))
    if not skip_reshape:
        q, k, v = (each.reshape(*each.shape[:2], heads, -1).transpose(1, 2) for each in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.fixture
def operator() -> Iterator[GraphAttention]:
    made = GraphAttention(AttentionSwitch(stock))
    SEEN.clear()
    yield made
    made._library._destroy()


@pytest.mark.parametrize("by_heads", [True, False])
@pytest.mark.parametrize("out_by_heads", [True, False])
def test_the_operator_is_the_function_and_knows_its_shape(
    operator: GraphAttention, by_heads: bool, out_by_heads: bool
) -> None:
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4 + 2 * by_heads)
    want = stock(q, k, v, 3, mask := torch.randn(2, 1, 5, 7), skip_reshape=True, skip_output_reshape=out_by_heads)
    for flat in (False, True):
        given = [q, k, v] if by_heads else [each.transpose(1, 2) for each in (q, k, v)]
        given = [each.flatten(2) for each in given] if flat and not by_heads else given
        out, shape = (
            attend(*(each.to(device) for each in given), 3, mask.to(device), None, by_heads, out_by_heads, "", {})
            for device in ("cpu", "meta")
        )
        torch.testing.assert_close(out, want)
        assert (shape.shape, shape.stride()) == (out.shape, out.stride())


def test_options_reach_the_function_and_the_module_that_attends_is_told(operator: GraphAttention) -> None:
    switch, options = operator._switch, {"block": 1}
    operator.options, switch.site = options, "before"
    sites: list[str] = []
    around = switch.kernel.stock
    switch.kernel.stock = lambda *given, **named: sites.append(switch.site) or around(*given, **named)
    q = torch.randn(1, 2, 5, 4)
    said = {"scale": 0.25, "enable_gqa": False, "low_precision_attention": True, "transformer_options": {"other": 2}}
    attend(q, q, q, 2, None, torch.float16, True, False, "attn", said | {"preferred_attention": None})
    attend(q, q, q, 2, None, None, True, False, "", {"preferred_attention": SimpleNamespace(function=None)})
    flags = {"enable_gqa": True, "causal": False}
    attend(q, q, q, 2, None, None, True, False, "attn2", flags)
    assert SEEN == [(torch.float16, said | {"transformer_options": options}), (None, {}), (None, flags)]
    assert SEEN[0][1]["transformer_options"] is options
    assert sites == ["attn", "", "attn2"] and switch.site == "before"


@pytest.mark.parametrize(
    ("options", "mask", "said"),
    [
        ({"later": 1}, None, "has no option 'later'"),
        ({"preferred_attention": SimpleNamespace(function=stock)}, None, "has no option 'preferred_attention'"),
        ({}, SimpleNamespace(), "has masks that are tensors"),
    ],
)
def test_what_no_graph_can_hold_is_refused(options: dict[str, Any], mask: Any, said: str) -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match=f"attention in a graph {said}"):
        attend(q, q, q, 2, mask, None, True, False, "", options)
