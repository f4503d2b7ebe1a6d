"""Scales that ComfyUI takes from all that a layer is given: the maximum over all ranks that have rows of it.

A layer of nvfp4 rounds its input by the largest value in it, unless the file says a scale: over all tokens of all
images of a call. Ranks that share the call each have some of them. Formats that round token by token, or by a scale
that the file says, are left alone. Which is which is not written here: each format is tried once.

ComfyUI asks `QuantizedTensor.from_float` for all of it, which `install` replaces, once a process. Where a tensor is
whole on every rank, the maximum over all of them is that of each; so in every call that ranks share it is exchanged.
Layers that are given the same tensor one after the other, as those of q, k and v, have one exchange together: `watch`
has them say what they are given. The tensor itself decides, not its memory, so all ranks decide alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...parallel.attention import SequenceParallelAttention

Scale: TypeAlias = Callable[[Tensor], Any]  # the largest value () in a tensor to what a format calls the scale of it


class SharedScales:
    """Called as `QuantizedTensor.from_float`. `sharing`: whose tensors count as one; empty: as in stock."""

    def __init__(self, stock: Any) -> None:  # noqa: ANN401  comfy_kitchen's classmethod
        self.stock = stock
        self.sharing: tuple[SequenceParallelAttention, ...] = ()
        self.layer_input: Tensor | None = None  # of the layer that asks, where it is watched
        self._last: tuple[Tensor, str, Any] | None = None  # the last such input, the format, and its scale
        self._known: dict[tuple[str, torch.dtype], Scale | None] = {}

    def __call__(self, tensor: Tensor, layout_cls: str, **given: Any) -> Any:  # noqa: ANN401  a QuantizedTensor
        """`tensor` (rows, width) in a format, its scale in `given` or None."""
        whole, self.layer_input = self.layer_input, None
        if not self.sharing or given.get("scale") is not None or (rule := self._rule(tensor, layout_cls)) is None:
            return self.stock(tensor, layout_cls, **given)
        last = self._last
        if whole is not None and last is not None and last[0] is whole and last[1] == layout_cls:
            scale = last[2]
        else:
            self._last = None
            scale = rule(self._largest(tensor))
            self._last = None if whole is None else (whole, layout_cls, scale)
        if not tensor.numel():  # an expert that no token of this rank goes to
            return tensor
        return self.stock(tensor, layout_cls, **given | {"scale": scale})

    def takes_maximum(self, layout_cls: str) -> bool:
        """Whether the format has one scale for a whole tensor, and takes it from the values."""
        return self._rule(torch.ones(()), layout_cls) is not None

    def share(self, sharing: Sequence[SequenceParallelAttention]) -> None:
        """Have these ranks' tensors count as one from now on; of none: those of each by themselves."""
        self.sharing, self.layer_input, self._last = tuple(sharing), None, None

    def _largest(self, tensor: Tensor) -> Tensor:
        """The largest value () that any rank has."""
        largest = tensor.new_zeros((), dtype=torch.float32)
        if tensor.numel():
            largest = torch.linalg.vector_norm(tensor, float("inf"), dtype=torch.float32)
        for ranks in self.sharing:
            largest = ranks.maximum(largest)
        return largest.to(tensor.dtype)

    def _rule(self, tensor: Tensor, layout_cls: str) -> Scale | None:
        """How the format makes its scale of the largest value; None where it has several, or none of the values'.

        It is tried with some numbers: where their quotients by one number are its scales, it is that division.
        """
        key = (layout_cls, tensor.dtype)
        if key not in self._known:
            tried = [tensor.new_tensor(largest) for largest in TRIED]
            scales = [self._scale(each, layout_cls) for each in tried]
            single = all(isinstance(each, Tensor) and each.numel() == 1 for each in scales)
            if not single or bool(scales[0] == scales[1]):
                self._known[key] = None
            else:
                one = self._scale(torch.ones((), device=tensor.device), layout_cls)
                divide = partial(_quotient, divisor=round(1 / float(one)))
                same = all(torch.equal(divide(each), scale) for each, scale in zip(tried, scales, strict=True))
                self._known[key] = divide if same else partial(self._scale, layout_cls=layout_cls)
        return self._known[key]

    def _scale(self, largest: Tensor, layout_cls: str) -> Any:  # noqa: ANN401  what the format calls its scale
        """What the format makes of a tensor whose largest value this is."""
        return self.stock(largest.expand(BLOCK, BLOCK).contiguous(), layout_cls).params.scale


BLOCK = 32  # rows and columns of the tensor by which a format is tried: a whole block of any
TRIED = (1.0, 2.0, 0.3, 0.0123, 3.7, 11.1, 97.0, 431.0, 5003.0)


def _quotient(largest: Tensor, *, divisor: int) -> Tensor:
    return (largest / divisor).float()


@contextmanager
def shared(sharing: Sequence[SequenceParallelAttention]) -> Iterator[None]:
    """Around a call whose rows these ranks share; without ranks, nothing. Every rank makes the same calls of layers."""
    switch = _installed() if sharing else None
    if switch is None:
        yield
        return
    switch.share(sharing)
    try:
        yield
    finally:
        switch.share(())


def watch(module: torch.nn.Module) -> set[Any] | None:
    """Have the layers of a module that take a scale of all they are given say what that is; not where it is changed
    before it is rounded. Returns these layers (`agree`), which on a card without a kernel for the format are none; None
    where no card has any.

    No class that ranks share may write to a tensor between two layers that it gives it to.
    """
    import comfy.quant_ops

    switch = _installed()
    if switch is None:
        return None
    asking, any_card = set[Any](), False
    for layer in module.modules():
        name: str = getattr(layer, "quant_format", None) or ""
        told: dict[str, Any] = comfy.quant_ops.QUANT_ALGOS.get(name, {})
        rounds = bool(name) and told.get("quantize_input", True) and getattr(layer, "input_scale", None) is None
        takes = rounds and switch.takes_maximum(told["comfy_tensor_layout"])
        any_card |= takes
        if takes and not layer._full_precision_mm:
            asking.add(layer)
            if getattr(layer, "pre_quant_scale", None) is None:
                layer.forward = partial(_say_input, switch, layer.forward)
    for mixture in module.modules():
        experts = getattr(mixture, "experts", None)
        if isinstance(experts, torch.nn.ModuleList) and hasattr(mixture, INFER) and asking & set(experts.modules()):
            Experts(switch, mixture, experts)
    return asking if any_card else None


def agree(asking: set[Any], sharing: Sequence[SequenceParallelAttention], device: torch.device) -> bool:
    """Whether all ranks of `sharing` have as many such layers; where they have not, none rounds what it is given.

    ComfyUI leaves a format alone on a card that has no kernel for it, and such a rank takes part in no exchange of a
    scale, for which the others would wait. Every rank of them asks at the same moment.
    """
    most = torch.tensor([len(asking), -len(asking)], dtype=torch.float32, device=device)
    for ranks in sharing:
        most = ranks.maximum(most)
    largest, smallest = most.tolist()
    if largest == -smallest:
        return True
    for layer in asking:
        layer._full_precision_mm = True
    asking.clear()
    return False


def _say_input(switch: SharedScales, inner: Callable[..., Any], *given: Any, **named: Any) -> Any:  # noqa: ANN401
    if not switch.sharing:
        return inner(*given, **named)
    tensor, further = (given[0], len(given) > 1) if given else (named.get("input"), False)
    # With what stands before the product (comfy.ops.linear_input_act), the layer rounds another tensor.
    switch.layer_input = None if further or named.keys() - {"input"} else tensor
    try:
        return inner(*given, **named)
    finally:
        switch.layer_input = None


INFER = "moe_infer"  # ComfyUI's method that calls only the experts that tokens go to


class Experts:
    """The experts of one mixture, each called by every rank that shares a call, in their order: without tokens too.

    A rank that left one out would not take part in the exchange of its scale, and the others would wait for it.
    """

    def __init__(self, switch: SharedScales, mixture: Any, experts: torch.nn.ModuleList) -> None:  # noqa: ANN401
        self._switch, self._forwards = switch, [each.forward for each in experts]
        self._next = len(experts)  # to be called; all were, outside of `moe_infer`
        for number, expert in enumerate(experts):
            expert.forward = partial(self._call, number)
        setattr(mixture, INFER, partial(self._infer, getattr(mixture, INFER)))

    def _infer(self, inner: Callable[..., Any], rows: Tensor, *more: Any, **named: Any) -> Any:  # noqa: ANN401
        self._next, self._nothing = 0, rows[:0]
        try:
            out = inner(rows, *more, **named)
            self._catch_up(len(self._forwards))
        finally:
            self._next = len(self._forwards)
        return out

    def _call(self, number: int, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        self._catch_up(number)
        self._next = max(self._next, number + 1)
        return self._forwards[number](*given, **named)

    def _catch_up(self, number: int) -> None:
        """Call the experts before this one that no token of this rank goes to."""
        for forward in self._forwards[self._next : number] if self._switch.sharing else ():
            forward(self._nothing[:0])  # a tensor of its own: by the same one, two would count as one exchange


def install() -> None:
    """Put a switch where ComfyUI's function stands, once a process; nothing where it has no quantised formats."""
    quantised = _quantised()
    if quantised is not None and _installed() is None:
        quantised.from_float = SharedScales(quantised.from_float)


def _installed() -> SharedScales | None:
    quantised = _quantised()
    switch = None if quantised is None else vars(quantised).get("from_float")
    return switch if isinstance(switch, SharedScales) else None


def _quantised() -> Any:  # noqa: ANN401  comfy_kitchen's class, or what ComfyUI has in its place
    import comfy.quant_ops

    found = comfy.quant_ops.QuantizedTensor
    return found if hasattr(found, "from_float") else None
