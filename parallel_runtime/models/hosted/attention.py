"""ComfyUI's attention function, replaced: inside planned blocks its calls are shared by the ranks.

Model files take the function by name when they are imported (`from ... import optimized_attention`), so `install` runs
before they are. ComfyUI's own function stays the kernel (stock_attention.py).

Letters: `B` batch, `H` heads, `S` tokens of this rank, `D` head size.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...parallel.attention import QKV, AttentionFunction
from ..specs.words import UNPLANNED, Attention
from .call import Lengths, TokenCall
from .first_keys import attend_again
from .lightricks import GuideMask
from .masks import whole_mask, window_mask
from .stock_attention import StockAttention, is_exact, split_heads
from .traced_attention import attend

NAMES = ("optimized_attention", "optimized_attention_masked")
CHOOSER = "optimized_attention_for_device"


class AttentionSwitch:
    """Called as ComfyUI's attention function. `call`: the shared call under way, which hooks set; None: as in stock."""

    def __init__(self, stock: Callable[..., Tensor], container: type | None = None) -> None:
        self.kernel = StockAttention(stock, container)
        self.call: TokenCall | None = None
        self.handed_on = False  # whether all calls go to a function that looks at them (finding.py)
        self.site = ""  # of a block, the module that runs; "": none that its spec names (sites.py)

    def __call__(
        self,
        q: Any,  # noqa: ANN401  a tensor, or a container of one; k and v too
        k: Any,  # noqa: ANN401
        v: Any,  # noqa: ANN401
        heads: int,
        mask: Tensor | GuideMask | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> Tensor:
        """As ComfyUI's function: q, k, v (B, H, S, D) with `skip_reshape`, else (B, S, H * D); the output alike.

        Each may be in a container of ComfyUI's, whose tensor belongs to the function that takes it: a call that is not
        shared is given the containers as they are. Raises `ValueError` for one that was taken already.
        """
        if torch.compiler.is_compiling():
            taken = self.kernel.take(q), self.kernel.take(k), self.kernel.take(v)
            return attend(*taken, heads, mask, attn_precision, skip_reshape, skip_output_reshape, self.site, options)
        call = self.call
        attention = None if call is None else self._attention(call, q, k, 2 if skip_reshape else 1)
        if call is None or attention is None or attention.local or (call.uncut and call.has_all_keys(attention)):
            return self.kernel(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, options)
        owned = isinstance(q, self.kernel.container)
        qkv = [self.kernel.take(each, f"{call.name}: attention") for each in (q, k, v)]
        del q, k, v
        if not skip_reshape:
            width = qkv[0].shape[-1] // heads
            qkv = [split_heads(tensor, width) for tensor in qkv]
        held = qkv[1].shape[2]
        if attention.frames:
            queries, keys = call.frame_lengths(qkv[0].shape[2]), call.frame_lengths(held)
        else:
            queries, keys = self._lengths(call, attention, qkv[0].shape[2], held)
        common = call.common_keys(attention, masked=mask is not None)
        call.group.most_keys = max(call.group.most_keys, common + sum(keys))
        if call.uncut:
            qkv[1:] = [call.counted(attention.keys, tensor, 2) for tensor in qkv[1:]]
        if attention.again:
            kernel = self._kernel(call, attn_precision, options, owned=owned)
            out = attend_again(call, kernel, qkv, keys, exact=is_exact(options))
        elif isinstance(mask, GuideMask):
            out = self._guided(call, attention, qkv, mask, queries, keys, attn_precision, options)
        else:
            if mask is not None and attention.window is not None:
                mask = window_mask(mask, attention.window, sum(keys))
            elif mask is not None:
                mask = whole_mask(call, attention, mask, queries, keys, held)
            out = call.attend(
                self._kernel(call, attn_precision, options, owned=owned),
                qkv,
                attention,
                query_lengths=queries,
                key_lengths=keys,
                mask=mask,
                scale=options.get("scale"),
                common=common,
                each_head_alone=self.kernel.each_head_alone(options),
                exact=is_exact(options),
            )
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    def _attention(self, call: TokenCall, q: Any, k: Any, dim: int) -> Attention | None:  # noqa: ANN401
        """What this attention is over: by the module that runs, and of alternatives by the tokens in `dim`."""
        attention = call.inside.get(self.site, call.attention)
        if attention is None or attention.otherwise is None:
            return attention
        title = f"{call.name}: attention"
        tokens = self.kernel.peek(q, title).shape[dim], self.kernel.peek(k, title).shape[dim]
        return call.chosen(attention, tokens)

    def for_device(self, stock: Callable[..., Callable[..., Tensor]]) -> Callable[..., Callable[..., Tensor]]:
        """As ComfyUI's function that chooses attention for a device, `stock`; in a shared call, this."""

        def choose(*args: Any, **options: Any) -> Callable[..., Tensor]:  # noqa: ANN401
            inside = self.handed_on or (self.call is not None and self.call.attention is not None)
            return self if inside else stock(*args, **options)

        return choose

    def _guided(
        self,
        call: TokenCall,
        attention: Attention,
        qkv: QKV,
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
            self._kernel(call, attn_precision, options, owned=False),
            attention=attention,
            key_lengths=keys,
            scale=options.get("scale"),
            each_head_alone=self.kernel.each_head_alone(options),
            exact=True,
        )
        q, k, v = qkv
        out = attend(qkv, query_lengths=queries, mask=mask.all)
        for each in mask.segments:
            some = slice(each.first, each.last)
            out[:, :, some] = attend([q[:, :, some], k, v], query_lengths=each.lengths, mask=each.mask)
        return out

    def _kernel(
        self, call: TokenCall, attn_precision: torch.dtype | None, options: dict[str, Any], *, owned: bool
    ) -> AttentionFunction:
        """ComfyUI's function with the options of this call, for the heads that a rank attends with.

        Raises `ValueError` where each token is to see those before it alone: Ring and named kernels would not know.
        """
        if options.get("causal"):
            raise ValueError(
                f"{call.name}: attention is causal, which no plan says; use a ComfyUI the plan was made for"
            )
        return partial(
            self.kernel.heads, attn_precision=attn_precision, options=options, owned=owned, named=call.group.named
        )

    def _lengths(self, call: TokenCall, attention: Attention, queries: int, keys: int) -> Lengths:
        """Queries and keys of each rank in this call, by the spec."""
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


def install() -> AttentionSwitch:
    """Put a switch where ComfyUI's attention function stands, once a process, and return it.

    ComfyUI's own files that were imported with it are given the switch too. Raises RuntimeError when another pack's
    was imported before: it holds the stock function already.
    """
    import comfy.ldm.modules.attention as module

    stock = module.optimized_attention
    if isinstance(stock, AttentionSwitch):
        return stock
    masked, chosen = module.optimized_attention_masked, module.optimized_attention_for_device
    holders = [each for each in list(sys.modules.values()) if each is module or _holds(each, (stock, masked, chosen))]
    others = [each for each in holders if not each.__name__.startswith("comfy.")]
    if early := [each.__name__ for each in others if _holds(each, [stock])]:
        raise RuntimeError(f"{min(early)} was imported before attention could be replaced; install the switch first")
    switch = AttentionSwitch(stock, getattr(module, "AttentionTensorContainer", None))
    put = dict.fromkeys(NAMES, switch) | {CHOOSER: switch.for_device(chosen)}
    for each in (each for each in holders if each not in others):
        for name in put.keys() & vars(each).keys():
            setattr(each, name, put[name])
    return switch


def _holds(module: ModuleType, functions: Sequence[object]) -> bool:
    """Whether a module has one of these functions under its name of ComfyUI's."""
    held = [getattr(module, "__dict__", {}).get(name) for name in (*NAMES, CHOOSER)]
    return any(each is function for each in held for function in functions)


def installed() -> AttentionSwitch:
    """The switch of this process. Raises RuntimeError when there is none."""
    import comfy.ldm.modules.attention as module

    switch = module.optimized_attention
    if not isinstance(switch, AttentionSwitch):
        raise RuntimeError("ComfyUI's attention is still its own; call install() before a model's file is imported")
    return switch
