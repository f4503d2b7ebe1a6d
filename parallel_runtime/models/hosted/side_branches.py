"""LoRAs that run as side branches of the layers of one of ComfyUI's modules, not merged into their weights.

Letters: `B` batch, `O` outputs and `I` inputs of a layer, `r` rank of a LoRA.

    out = layer(x) + up(scale * down(x))

The weight stays as the file has it: quantised, shared by ranks, in host memory. Another strength is another number, for
which no weight is read. Source: LoRA (arXiv 2106.09685), equation 3.

Owns the arithmetic and where it is put. Does not own which LoRAs a model has, nor how they travel (weight_delta.py).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...weight_delta import WeightDelta, misfit
from ..block_chain import LORA, Forward, chain_at

WEIGHT = ".weight"
ACTS = "linear_input_act"  # of comfy.ops: a layer of an activation
SIDE_BRANCHES = "has_side_branches"  # an attribute of a layer that has LoRAs as side branches
CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
Form: TypeAlias = tuple[str, ...]  # of a block: its layers with LoRAs, each once for each run of outputs


@dataclass(frozen=True)
class LowRank:
    """One LoRA of one layer: `up` (O', r) and `down` (r, I, *kernel), for O' outputs from `first` on."""

    up: Tensor
    down: Tensor
    first: int
    alpha_over_rank: float
    strength: float

    @classmethod
    def of(cls, delta: WeightDelta, weight: Tensor, *, dtype: torch.dtype, device: torch.device) -> "LowRank":
        """Of a delta that `runs_as_branch`. Raises `ValueError` where it does not fit the weight (O, I, *kernel)."""
        up, down, alpha, _ = delta.values
        if not isinstance(up, Tensor) or not isinstance(down, Tensor) or isinstance(alpha, Tensor | str):
            raise ValueError(f"{delta.key}: a LoRA without its two matrices; use a complete file")
        rank, inputs = down.shape[0], weight.shape[1:]
        first, rows = (0, weight.shape[0]) if delta.offset is None else delta.offset[1:]
        fits = up.flatten(1).shape == (rows, rank) and down.numel() == rank * inputs.numel()
        if not fits or first + rows > weight.shape[0]:
            raise misfit(delta.key, [delta], list(weight.shape))
        if delta.swap:  # scale before shift
            up = torch.cat(up.chunk(2)[::-1])
        up, down = (each.to(device=device, dtype=dtype, copy=True) for each in (up.flatten(1), down))
        return cls(up, down.reshape(rank, *inputs), first, 1.0 if alpha is None else alpha / rank, delta.strength)


@dataclass
class OutputRows:
    """The LoRAs of one run of a layer's outputs, side by side: `up` (O', r), `down` (r, I, *kernel), `scale` (r,) fp32.

    `factors`: of each of their ranks, the number of its LoRA among all of the layer, and alpha over rank.
    """

    first: int
    up: Tensor
    down: Tensor
    factors: list[tuple[int, float]]
    scale: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scale = torch.zeros(len(self.factors), dtype=torch.float32, device=self.up.device)

    def set_strengths(self, strengths: Sequence[float]) -> None:
        """Take over those of all LoRAs of the layer, in place: a graph of torch's compiler reads this tensor."""
        numbers = [strengths[number] * factor for number, factor in self.factors]
        self.scale.copy_(torch.tensor(numbers, dtype=torch.float32))


class LayerBranches:
    """The LoRAs on one layer, whose forward adds what they make to its output until they are taken off."""

    def __init__(self, layer: nn.Module) -> None:
        self.runs: list[OutputRows] = []
        self.layer: Any = layer
        vars(layer)[SIDE_BRANCHES] = True
        self._convolve = next((each for kind, each in CONVOLUTIONS.items() if isinstance(layer, kind)), None)
        self.activated = _activated(layer) if self._convolve is None else None
        self._around = partial(_adding, self)
        chain_at(layer).put(LORA, self._around)

    def take_off(self) -> None:
        """Have the layer as it was before, and no LoRA: only the collector frees an object that its link refers to."""
        self.runs = []
        vars(self.layer).pop(SIDE_BRANCHES, None)
        chain_at(self.layer).take_off(self._around)

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """The output of the layer for x (..., I), of a convolution for x (B, I, *size), with theirs, in place."""
        smoothed = getattr(self.layer, "pre_quant_scale", None)
        if smoothed is not None:  # ComfyUI's layer scales its input before any weight, one with a merged LoRA, too
            x = x * smoothed.to(device=x.device, dtype=x.dtype)
        for run in self.runs:
            out.narrow(-1 if self._convolve is None else 1, run.first, run.up.shape[0]).add_(self._product(run, x))
        return out

    def _product(self, run: OutputRows, x: Tensor) -> Tensor:
        down, up = run.down.to(x.dtype), run.up.to(x.dtype)
        if self._convolve is None:
            return F.linear((F.linear(x, down) * run.scale).to(x.dtype), up)
        layer, ones = self.layer, (1,) * (down.ndim - 2)
        hidden = self._convolve(x, down, None, layer.stride, layer.padding, layer.dilation)
        return self._convolve((hidden * run.scale.view(-1, *ones)).to(x.dtype), up.view(*up.shape, *ones))


def _adding(branches: LayerBranches, inner: Forward) -> Forward:
    """A function, not an object: torch's compiler makes one graph for all blocks, not one for each object."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        if (args or kwargs) and branches.activated is not None:
            return branches.activated(CalledLayer(branches.layer), x, *args, **_named(args, kwargs))
        return branches.add_to(inner(x, *args, **kwargs), x)

    return forward


def _activated(layer: nn.Module) -> Callable[..., Tensor] | None:
    """ComfyUI's `linear_input_act`, where the module of a layer's class has it.

    From 0.39 on a Linear takes what stands before and after its product as further arguments of its forward, and hands
    them on to that.
    """
    kinds = (vars(sys.modules[kind.__module__]) for kind in type(layer).__mro__ if kind.__module__ in sys.modules)
    return next((found[ACTS] for found in kinds if ACTS in found), None)


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, with the activation, which `linear_input_act` has no default for."""
    return dict(kwargs) if args else {"input_act": None, **kwargs}


class CalledLayer:
    """Stands for a layer in `linear_input_act`, which calls a layer that has no weight that it multiplies by itself."""

    weight, _full_precision_mm = None, True

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Any:  # noqa: ANN401
        return self._layer(x)


def call_layers(ops: ModuleType) -> None:
    """Have ComfyUI's `linear_input_act` call layers that have side branches; nothing where `comfy.ops` has none.

    By itself it multiplies by weights of some formats and devices, and never calls their layer.
    """
    stock = vars(ops).get(ACTS)
    if stock is not None and not isinstance(stock, partial):
        setattr(ops, ACTS, partial(_called, stock))


def _called(stock: Callable[..., Tensor], layer: nn.Module, *given: Any, **named: Any) -> Tensor:  # noqa: ANN401
    return stock(CalledLayer(layer) if getattr(layer, SIDE_BRANCHES, False) else layer, *given, **named)


class SideBranches:
    """The LoRAs on the layers of one module, by the paths of the layers."""

    def __init__(self) -> None:
        self._layers: dict[str, LayerBranches] = {}
        self._forms: dict[nn.Module, Form] = {}

    @property
    def num_bytes(self) -> int:
        """Of all LoRAs."""
        runs = [run for branches in self._layers.values() for run in branches.runs]
        return sum(each.nbytes for run in runs for each in (run.up, run.down, run.scale))

    def have(self, module: nn.Module, loras: Mapping[str, Sequence[LowRank]]) -> None:
        """Have these LoRAs, and no others."""
        self._forms = {}
        for path in self._layers.keys() - loras.keys():
            self._layers.pop(path).take_off()
        for path, here in loras.items():
            if path not in self._layers:
                self._layers[path] = LayerBranches(module.get_submodule(path))
            self._layers[path].runs = _runs_of(here)
        self.set_strengths({path: [each.strength for each in here] for path, here in loras.items()})

    def set_strengths(self, strengths: Mapping[str, Sequence[float]]) -> None:
        """Change the strengths of all LoRAs of these layers, in the order in which they came."""
        for path, here in strengths.items():
            for run in self._layers[path].runs:
                run.set_strengths(here)

    def form(self, block: nn.Module) -> Form:
        """What of a block's layers a graph of it is made for: a graph that knows other LoRAs does not compute these."""
        if not self._layers:
            return ()
        if block not in self._forms:
            runs = {branches.layer: branches.runs for branches in self._layers.values()}
            paths = ([path] * len(runs.get(layer, ())) for path, layer in block.named_modules())
            self._forms[block] = tuple(path for each in paths for path in each)
        return self._forms[block]


def _runs_of(loras: Sequence[LowRank]) -> list[OutputRows]:
    """LoRAs of the same outputs together, so that each run of outputs has two products however many there are."""
    numbered: dict[tuple[int, int], list[int]] = {}
    for number, lora in enumerate(loras):
        numbered.setdefault((lora.first, lora.up.shape[0]), []).append(number)
    return [
        OutputRows(
            first,
            _joined([loras[number].up for number in numbers], 1),
            _joined([loras[number].down for number in numbers], 0),
            [(number, loras[number].alpha_over_rank) for number in numbers for _ in range(loras[number].up.shape[1])],
        )
        for (first, _), numbers in numbered.items()
    ]


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def runs_as_branch(delta: WeightDelta, layer: nn.Module, weight: Tensor) -> bool:
    """Whether a delta can be a side branch of this layer: a LoRA without a core, whose weight only its forward uses.

    Another one is merged. `weight`: the layer's own, wherever it lies.
    """
    plain = delta.kind == "lora" and delta.values[3] is None and delta.strength_model == 1.0
    if not plain or (delta.offset is not None and delta.offset[0] != 0):
        return False
    if isinstance(layer, tuple(CONVOLUTIONS)):
        known: Any = layer
        return delta.offset is None and known.groups == 1 and known.padding_mode == "zeros"
    if not isinstance(layer, nn.Linear) and not hasattr(layer, "comfy_cast_weights"):  # of comfy.ops
        return False
    # A class may read a weight that has more rows than the layer has outputs, or that is rotated, past its forward.
    sizes = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    rotated = getattr(getattr(weight, "_params", None), "convrot", False)
    return weight.shape == sizes and not rotated
