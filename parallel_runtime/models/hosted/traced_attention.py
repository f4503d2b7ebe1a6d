"""ComfyUI's attention function as one operator of torch, so that a graph of a whole block has it inside.

What the operator runs is the switch (attention.py), with the call that is under way then: which ranks share the tokens,
with which keys and which kernel, is no part of the graph. The graph knows the name of the module that attends
(sites.py).

Owns the operator, and which arguments of ComfyUI's function it can take. `B` batch, `H` heads, `S` tokens, `D` head
size.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import AttentionSwitch

NAMESPACE = "parallel_dit"
SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, SymInt heads, Tensor? mask, ScalarType? attn_precision, bool by_heads, "
    "float? scale, str site, str flags) -> Tensor"
)
FLAGS = ("enable_gqa", "low_precision_attention", "causal")  # options of ComfyUI's function that are true or false
OPTIONS = "transformer_options"
PREFERRED = "preferred_attention"


class GraphAttention:
    """The operator, there for as long as this, once a process. `options`: those of the block whose graph runs."""

    def __init__(self, switch: "AttentionSwitch") -> None:
        self.options: Any = None  # its `transformer_options`
        self._switch = switch
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self._library.define(SCHEMA, tags=(torch.Tag.needs_fixed_stride_order,))
        self._library.impl("attention", self._attend, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::attention", _shape, lib=self._library)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None,
        attn_precision: torch.dtype | None,
        by_heads: bool,
        scale: float | None,
        site: str,
        flags: str,
    ) -> Tensor:
        options = _options_of(flags, scale)
        if OPTIONS in options:
            options[OPTIONS] = self.options
        around, self._switch.site = self._switch.site, site
        try:
            return self._switch(q, k, v, heads, mask, attn_precision, by_heads, **options).contiguous()
        finally:
            self._switch.site = around


@cache
def graph_attention(switch: "AttentionSwitch") -> GraphAttention:
    """The operator that calls this switch."""
    return GraphAttention(switch)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Any,  # noqa: ANN401  a tensor, or what a class has in its place
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    site: str,
    options: Mapping[str, Any],
) -> Tensor:
    """ComfyUI's function while a graph is made: as `AttentionSwitch.__call__`. Raises `TypeError` for other options."""
    scale, flags = None, ""
    for name, value in options.items():
        if name == "scale":
            scale = value
        elif name in FLAGS:
            flags += f"{name}={1 if value else 0},"
        elif name == OPTIONS:
            flags += f"{OPTIONS},"
        elif name != PREFERRED or (value is not None and value.function is not None):
            raise TypeError(f"attention in a graph has no option {name!r}")
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError("attention in a graph has masks that are tensors")
    out: Tensor = torch.ops.parallel_dit.attention(
        q, k, v, heads, mask, attn_precision, skip_reshape, scale, site, flags
    )
    return out.unflatten(2, (heads, -1)).transpose(1, 2) if skip_output_reshape else out


def _options_of(flags: str, scale: float | None) -> dict[str, Any]:
    """The keyword arguments that `attend` wrote; of `transformer_options`, that they were given."""
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    for flag in flags.split(",")[:-1]:
        name, _, value = flag.partition("=")
        options[name] = value == "1"
    return options


def _shape(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any, precision: Any, by_heads: bool, *_: Any) -> Tensor:  # noqa: ANN401
    """(B, S, H * D) for q (B, H, S, D) with `by_heads`, else (B, S, H * D) or (B, S, H, D)."""
    if by_heads:
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1] * v.shape[3])
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] if q.ndim == 3 else q.shape[2] * q.shape[3])
