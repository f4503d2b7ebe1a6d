"""ComfyUI's attention function, replaced: inside planned blocks its calls go through the group.

Model files take the function by name when they are imported (`from ... import optimized_attention`), so `install` runs
before they are. ComfyUI's own function stays the kernel: it attends with some of the heads to whole keys.

Letters: `B` batch, `H` heads, `S` tokens of this rank, `D` head size.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...parallel.kernels import ATTENDED
from ...parallel.named_kernels import attend_heads, may_attend
from ..specs.words import UNPLANNED, Attention
from .call import Lengths, TokenCall
from .first_keys import attend_again
from .group import QKV, Kernel
from .lightricks import GuideMask
from .masks import whole_mask, window_mask
from .sdpa import backend_of, failed, in_stocks_order, is_moved
from .traced_attention import attend

NAMES = ("optimized_attention", "optimized_attention_masked")
CHOOSER = "optimized_attention_for_device"
TORCHS = "pytorch"  # ComfyUI's function that has torch attend
# ComfyUI's functions that compute each head without the others, to the last bit. Of others nobody has looked.
EACH_HEAD_ALONE = frozenset(f"attention_{name}" for name in ("pytorch", "flash", "xformers", "sage"))


class AttentionSwitch:
    """Called as ComfyUI's attention function. `call`: the shared call under way, which hooks set; None: as in stock."""

    def __init__(self, stock: Callable[..., Tensor], container: type | None = None) -> None:
        self.stock = stock
        self.container: Any = container or ()  # the class, of which nothing is one where ComfyUI has none
        self.call: TokenCall | None = None
        self.site = ""  # of a block, the module that runs; "": none that its plan names (sites.py)
        self._ran: dict[tuple[object, ...], str] = {}  # by what the choice of a kernel depends on, what attended

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
            taken = self.take(q), self.take(k), self.take(v)
            return attend(*taken, heads, mask, attn_precision, skip_reshape, skip_output_reshape, self.site, options)
        call = self.call
        attention = None if call is None else self._attention(call, q, k, 2 if skip_reshape else 1)
        if call is None or attention is None or attention.local or (call.uncut and call.has_all_keys(attention)):
            return self._by_stock(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, options)
        owned = isinstance(q, self.container)
        qkv = list(map(self.take, (q, k, v)))
        del q, k, v
        if not skip_reshape:
            width = qkv[0].shape[-1] // heads
            qkv = [_by_heads(tensor, width) for tensor in qkv]
        held = qkv[1].shape[2]
        if attention.frames:
            queries, keys = call.frame_lengths(qkv[0].shape[2]), call.frame_lengths(held)
        else:
            queries, keys = self._lengths(call, attention, qkv[0].shape[2], held)
        common = call.common_keys(attention, masked=mask is not None)
        call.tokens = max(call.tokens, common + sum(keys))
        if call.uncut:
            qkv[1:] = [call.counted(attention.keys, tensor, 2) for tensor in qkv[1:]]
        if attention.again:
            out = attend_again(call, self._kernel(attn_precision, options, owned=owned), qkv, keys)
        elif isinstance(mask, GuideMask):
            out = self._guided(call, attention, qkv, mask, queries, keys, attn_precision, options)
        else:
            if mask is not None and attention.window is not None:
                mask = window_mask(mask, attention.window, sum(keys))
            elif mask is not None:
                mask = whole_mask(call, attention, mask, queries, keys, held)
            out = call.attend(
                attention,
                self._kernel(attn_precision, options, owned=owned),
                qkv,
                query_lengths=queries,
                key_lengths=keys,
                mask=mask,
                scale=options.get("scale"),
                common=common,
                each_head_alone=self._each_head_alone(options),
                exact=_is_exact(options),
            )
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    def _attention(self, call: TokenCall, q: Any, k: Any, dim: int) -> Attention | None:  # noqa: ANN401
        """What this attention is over: by the module that runs, and of alternatives by the tokens in `dim`."""
        attention = call.inside.get(self.site, call.attention)
        if attention is None or attention.otherwise is None:
            return attention
        return call.chosen(attention, (self.peek(q).shape[dim], self.peek(k).shape[dim]))

    def for_device(self, stock: Callable[..., Callable[..., Tensor]]) -> Callable[..., Callable[..., Tensor]]:
        """As ComfyUI's function that chooses attention for a device, `stock`; in a shared call, this."""

        def choose(*args: Any, **options: Any) -> Callable[..., Tensor]:  # noqa: ANN401
            return stock(*args, **options) if self.call is None or self.call.attention is None else self

        return choose

    def peek(self, given: Any) -> Tensor:  # noqa: ANN401  a tensor, or a container of one
        """The tensor, which stays in its container. By the container's class: a tensor has a `take` of its own."""
        if not isinstance(given, self.container):
            return given
        tensor: Tensor | None = given.tensor
        if tensor is None:
            raise ValueError(
                f"{'attention' if self.call is None else f'{self.call.name}: attention'} was given a container whose "
                "tensor another call has taken already; report the model and the node"
            )
        return tensor

    def take(self, given: Any) -> Tensor:  # noqa: ANN401
        """The tensor, out of its container."""
        tensor = self.peek(given)
        return tensor if tensor is given else given.take()

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
        kernel = self._kernel(attn_precision, options, owned=False)
        alone, scale = self._each_head_alone(options), options.get("scale")
        attend = partial(
            call.attend, attention, kernel, key_lengths=keys, scale=scale, each_head_alone=alone, exact=True
        )
        q, k, v = qkv
        out = attend(qkv, query_lengths=queries, mask=mask.all)
        for each in mask.segments:
            some = slice(each.first, each.last)
            out[:, :, some] = attend([q[:, :, some], k, v], query_lengths=each.lengths, mask=each.mask)
        return out

    def _kernel(self, attn_precision: torch.dtype | None, options: dict[str, Any], *, owned: bool) -> Kernel:
        """ComfyUI's function with the options of this call, for the heads that the group hands it.

        `owned`: they came in containers, so the function gets them in some, and frees them as soon as it can.
        """

        def kernel(qkv: QKV, heads: int, mask: Tensor | None) -> Tensor:
            given = {**options, "enable_gqa": True} if qkv[1].shape[1] != qkv[0].shape[1] else options
            q, k, v = qkv
            name = "" if self.call is None or mask is not None or attn_precision is not None else self.call.group.named
            if name and may_attend(name, exact=_is_exact(options)):
                out = attend_heads(name, q, k, v, scale=options.get("scale"))
                if out is not None:
                    qkv.clear()
                    return out
            q, k, v = map(self.container, qkv) if owned else qkv
            qkv.clear()
            out = self._by_stock(q, k, v, heads, mask, attn_precision, True, True, given)
            if not isinstance(out, Tensor):
                raise TypeError(f"ComfyUI's attention function returned a {type(out).__name__} instead of a tensor")
            return out

        return kernel

    def _by_stock(
        self,
        q: Any,  # noqa: ANN401  a tensor, or a container of one; k and v too
        k: Any,  # noqa: ANN401
        v: Any,  # noqa: ANN401
        heads: int,
        mask: Any,  # noqa: ANN401
        attn_precision: torch.dtype | None,
        skip_reshape: bool,
        skip_output_reshape: bool,
        options: dict[str, Any],
    ) -> Tensor:
        """ComfyUI's function. Where torch raises in it with a kernel that stands first because of us (sdpa.py), once
        more in ComfyUI's own order of kernels, which this process keeps then.

        What came in containers is held for that until a call of its kind has succeeded; after that it is freed as soon
        as stock frees it, so such a call that raises is not repeated.
        """
        tensors = [self.peek(each) for each in (q, k, v)]
        kind = (
            *((each.dtype, each.device.type, each.ndim, each.shape[-1]) for each in tensors),
            *(heads, skip_reshape and tensors[1].shape[1], mask is None),
        )
        known = self._ran.get(kind)
        name = self._name(tensors, heads, mask, skip_reshape) if known is None else known
        if known is not None or not is_moved():
            tensors.clear()
        try:
            out = self.stock(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not is_moved():
                raise
            owned = isinstance(q, self.container)
            if owned and not tensors:
                with in_stocks_order(error):
                    pass
                raise
            tensors = tensors or [q, k, v]
            with in_stocks_order(error):
                given = map(self.container, tensors) if owned else tensors
                out = self.stock(*given, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **options)
            self._ran.clear()
            name = self._name(tensors, heads, mask, skip_reshape)
        self._ran[kind] = name
        ATTENDED.add(name)
        return out

    def _name(self, tensors: list[Tensor], heads: int, mask: Tensor | None, by_heads: bool) -> str:
        """For the report of this process: ComfyUI's function, with the kernel that torch takes."""
        name = getattr(self.stock, "__name__", "attention").removeprefix("attention_")
        if name != TORCHS:
            return name
        if not by_heads:
            width = tensors[0].shape[-1] // heads if tensors[0].ndim == 3 else tensors[0].shape[-1]
            tensors = [_by_heads(each, width) for each in tensors]
        q, k, v = tensors
        backend = backend_of(sys.modules["comfy.ops"], q, k, v, mask)
        return f"{name}: {backend}{failed()}" if backend else f"{name}{failed()}"

    def _each_head_alone(self, options: dict[str, Any]) -> bool:
        """Whether the function that will attend computes a head alike whatever other heads it is given."""
        preferred = options.get("preferred_attention")  # of a layer whose file names a function of its own
        function = getattr(preferred, "function", None) or self.stock
        overridden = "optimized_attention_override" in (options.get("transformer_options") or {})
        return getattr(function, "__name__", "") in EACH_HEAD_ALONE and not overridden

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


def _is_exact(options: dict[str, Any]) -> bool:
    """Whether a model says of a call that no kernel that rounds may compute it."""
    return options.get("low_precision_attention") is False


def _by_heads(tensor: Tensor, width: int) -> Tensor:
    """(B, S, H * D) or (B, S, H, D) to (B, H, S, D)."""
    return tensor.reshape(*tensor.shape[:2], -1, width).transpose(1, 2)


def install() -> AttentionSwitch:
    """Put a switch where ComfyUI's attention function stands, once a process, and return it.

    ComfyUI's own files that were imported with it are given the switch too. Raises RuntimeError when one of somebody
    else's was imported before: it holds the stock function already.
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
