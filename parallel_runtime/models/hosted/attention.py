"""ComfyUI's attention function, replaced: inside planned blocks its calls go through the group.

Model files take the function by name when they are imported (`from ... import optimized_attention`), so `install` runs
before any of them is. ComfyUI's own function stays the kernel: it attends with some of the heads to whole keys.

Letters: `B` batch, `H` heads, `S` tokens of this rank, `D` head size.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..plans.words import UNPLANNED, Attention
from .call import Lengths, TokenCall
from .group import Kernel
from .lightricks import GuideMask
from .masks import whole_mask, window_mask

NAMES = ("optimized_attention", "optimized_attention_masked")


class AttentionSwitch:
    """Called as ComfyUI's attention function. `call`: the shared call under way, which hooks set; None: as in stock."""

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        self.stock = stock
        self.call: TokenCall | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | GuideMask | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> Tensor:
        """As ComfyUI's function: q, k, v (B, H, S, D) with `skip_reshape`, else (B, S, H * D); the output alike."""
        call = self.call
        attention = None if call is None else call.attention
        if call is not None and attention is not None and attention.otherwise is not None:
            dim = 2 if skip_reshape else 1
            attention = call.chosen(attention, (q.shape[dim], k.shape[dim]))
        if call is None or attention is None or attention.local or (call.uncut and call.has_all_keys(attention)):
            return self.stock(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options)
        if not skip_reshape:
            width = q.shape[-1] // heads
            q, k, v = _by_heads(q, width), _by_heads(k, width), _by_heads(v, width)
        queries, keys = self._lengths(call, attention, q.shape[2], k.shape[2])
        call.tokens = max(call.tokens, sum(keys))
        held = k.shape[2]
        if call.uncut:
            k, v = (call.counted(attention.keys, tensor, 2) for tensor in (k, v))
        if isinstance(mask, GuideMask):
            out = self._guided(call, attention, q, k, v, mask, queries, keys, attn_precision, options)
        else:
            if mask is not None and attention.window is not None:
                mask = window_mask(mask, attention.window, sum(keys))
            elif mask is not None:
                mask = whole_mask(call, attention, mask, queries, keys, held)
            kernel, scale = self._kernel(attn_precision, options), options.get("scale")
            out = call.attend(
                attention, kernel, q, k, v, query_lengths=queries, key_lengths=keys, mask=mask, scale=scale
            )
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    def _guided(
        self,
        call: TokenCall,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: GuideMask,
        queries: tuple[int, ...],
        keys: tuple[int, ...],
        attn_precision: torch.dtype | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attention of all queries under one mask, then of some of them under their own."""
        options = {**options, "low_precision_attention": False}  # as ComfyUI: such kernels' masks are unreliable
        attend = partial(
            call.attend,
            attention,
            self._kernel(attn_precision, options),
            k=k,
            v=v,
            key_lengths=keys,
            scale=options.get("scale"),
        )
        out = attend(q=q, query_lengths=queries, mask=mask.all)
        for each in mask.segments:
            part = attend(q=q[:, :, each.first : each.last], query_lengths=each.lengths, mask=each.mask)
            out[:, :, each.first : each.last] = part
        return out

    def _kernel(self, attn_precision: torch.dtype | None, options: dict[str, Any]) -> Kernel:
        """ComfyUI's function with the options of this call, for the heads that the group hands it."""

        def kernel(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None) -> Tensor:
            given = {**options, "enable_gqa": True} if k.shape[1] != q.shape[1] else options
            out = self.stock(q, k, v, heads, mask, attn_precision, True, True, **given)
            if not isinstance(out, Tensor):
                raise TypeError(f"ComfyUI's attention function returned a {type(out).__name__} instead of a tensor")
            return out

        return kernel

    def _lengths(self, call: TokenCall, attention: Attention, queries: int, keys: int) -> Lengths:
        """Queries and keys of each rank in this call, by the plan."""
        known = call.lengths_of.get(id(attention))
        if known is not None and known[1] == (queries, keys):
            return known[0]
        if attention is UNPLANNED:
            raise ValueError(
                f"{call.name}: attention in a block, outside of the modules that the plan names; "
                "use a ComfyUI that the plan was made for"
            )
        lengths, planned = call.attended(attention)
        if (queries, keys) != planned:
            raise ValueError(
                f"{call.name}: attention over {'+'.join(attention.queries)} has {queries} queries and {keys} keys "
                f"on this rank and {planned[0]} and {planned[1]} by the plan; use a ComfyUI that the plan was made for"
            )
        return lengths


def _by_heads(tensor: Tensor, width: int) -> Tensor:
    """(B, S, H * D) or (B, S, H, D) to (B, H, S, D)."""
    return tensor.reshape(*tensor.shape[:2], -1, width).transpose(1, 2)


def install() -> AttentionSwitch:
    """Put a switch where ComfyUI's attention function stands, once a process, and return it.

    Raises RuntimeError when a model's file was imported before: it holds the stock function already.
    """
    import comfy.ldm.modules.attention as module

    stock = module.optimized_attention
    if isinstance(stock, AttentionSwitch):
        return stock
    early = sorted(
        name
        for name, loaded in sys.modules.items()
        if loaded is not module and any(vars(loaded).get(each) is stock for each in NAMES)
    )
    if early:
        raise RuntimeError(f"{early[0]} was imported before attention could be replaced; install the switch first")
    switch = AttentionSwitch(stock)
    for name in NAMES:
        setattr(module, name, switch)
    return switch


def installed() -> AttentionSwitch:
    """The switch of this process. Raises RuntimeError when there is none."""
    import comfy.ldm.modules.attention as module

    switch = module.optimized_attention
    if not isinstance(switch, AttentionSwitch):
        raise RuntimeError("ComfyUI's attention is still its own; call install() before a model's file is imported")
    return switch
