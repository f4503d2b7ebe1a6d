"""LoRAs beside layers of torch equal LoRAs merged into their weights; which deltas can run so, and what does not fit.

ComfyUI's modules and workers with them are test_side_branches.py's.
"""

import gc
import sys
import weakref
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rounding import ROUNDING
from torch import Tensor, nn

from parallel_runtime.models.hosted.side_branches import LowRank, SideBranches, call_layers, runs_as_branch
from parallel_runtime.proof import relative_error
from parallel_runtime.weight_delta import WeightDelta

CPU = torch.device("cpu")


class Smoothed(nn.Linear):
    """As ComfyUI's layer of a file with scales of the channels of its input."""

    pre_quant_scale = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)

    def forward(self, input: Tensor) -> Tensor:
        """Of x (..., I)."""
        return super().forward(input * self.pre_quant_scale.to(input.dtype))


KINDS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(5, 6), (2, 3, 5)),
    "linear, its input scaled": (Smoothed(5, 6), (2, 3, 5)),
    "conv1d": (nn.Conv1d(3, 6, 4, stride=2, padding=1), (2, 3, 9)),
    "conv2d": (nn.Conv2d(3, 6, (2, 3), dilation=(1, 2), padding=(0, 2)), (2, 3, 7, 8)),
    "conv3d": (nn.Conv3d(3, 6, (1, 2, 3)), (2, 3, 4, 5, 6)),
}


def lora(
    weight: Tensor, rank: int, *, strength: float = 0.5, alpha: float | None = 3.0, seed: int = 0, **other: Any
) -> WeightDelta:
    """Of a weight, or of those of its rows that `offset` says."""
    numbers = torch.Generator().manual_seed(seed)
    rows = other["offset"][2] if other.get("offset") else weight.shape[0]
    up = torch.randn(rows, rank, *(1 for _ in weight.shape[2:]), generator=numbers)
    down = torch.randn(rank, *weight.shape[1:], generator=numbers)
    return WeightDelta(key="a.weight", kind="lora", strength=strength, values=(up, down, alpha, None), **other)


def merged(weight: Tensor, deltas: Sequence[WeightDelta]) -> Tensor:
    """The weight with all of them in it."""
    weight = weight.clone()
    for delta in deltas:
        up, down, alpha, _ = delta.values
        assert isinstance(up, Tensor) and isinstance(down, Tensor) and not isinstance(alpha, Tensor)
        change = (up.flatten(1) @ down.flatten(1)).view(-1, *weight.shape[1:])
        if delta.swap:
            change = torch.cat(change.chunk(2)[::-1])
        _, start, length = delta.offset or (0, 0, len(weight))
        weight[start : start + length] += delta.strength * (1.0 if alpha is None else alpha / down.shape[0]) * change
    return weight


def branches(layer: nn.Module, deltas: Sequence[WeightDelta]) -> list[LowRank]:
    """What runs beside the layer."""
    return [LowRank.of(each, layer.weight.detach(), dtype=torch.float32, device=CPU) for each in deltas]


@pytest.mark.parametrize("kind", KINDS)
def test_loras_beside_a_layer_are_those_in_its_weight(kind: str) -> None:
    layer, shape = KINDS[kind]
    module, x = nn.Sequential(layer, nn.ReLU()), torch.randn(shape)
    plain, weight = layer(x), layer.weight.detach()
    some = [lora(weight, 2, swap=True), lora(weight, 1, alpha=None, strength=-1.5, seed=1)]
    if kind.startswith("linear"):
        some += [lora(weight, 3, offset=(0, 2, 3), seed=2), lora(weight, 2, offset=(0, 2, 3), strength=2.0, seed=3)]
    side = SideBranches()
    with torch.no_grad():
        assert side.form(module) == () and side.num_bytes == 0
        side.have(module, {"0": branches(layer, some)})
        state = {name: each.detach() for name, each in layer.named_parameters()}
        want = torch.func.functional_call(layer_like(layer), state | {"weight": merged(weight, some)}, (x,))
        assert relative_error(layer(x), want) <= ROUNDING
        side.set_strengths({"0": [0.0] * len(some)})
        assert torch.equal(layer(x), plain)
        side.set_strengths({"0": [each.strength for each in some]})
        assert relative_error(layer(x), want) <= ROUNDING
        ranks = [sum(each.values[1].shape[0] for each in runs) for runs in (some[:2], some[2:]) if runs]
        assert side.form(module) == ("0",) * len(ranks) and side.form(module) is side.form(module)
        inputs = weight[0].numel()
        assert side.num_bytes == 4 * sum(rank * (rows + inputs + 1) for rank, rows in zip(ranks, (6, 3), strict=False))
        side.have(module, {})
    assert torch.equal(layer(x), plain) and "forward" not in vars(layer) and side.form(module) == ()


def layer_like(layer: nn.Module) -> nn.Module:
    """A layer of that class without LoRAs."""
    other = object.__new__(type(layer))
    vars(other).update({name: value for name, value in vars(layer).items() if name != "forward"})
    return other


def test_a_lora_that_is_taken_off_frees_its_memory_without_the_collector() -> None:
    module, side = nn.ModuleList([nn.Linear(5, 6)]), SideBranches()
    gc.disable()
    try:
        loras = branches(module[0], [lora(module[0].weight, 2)])
        ups = [weakref.ref(lora.up) for lora in loras]
        side.have(module, {"0": loras})
        del loras
        assert all(up() is not None for up in ups)
        side.have(module, {})
        assert all(up() is None for up in ups)
    finally:
        gc.enable()


def test_a_layer_whose_forward_was_another_keeps_it() -> None:
    layer = nn.Linear(5, 6)
    module, mine = nn.Sequential(layer), layer.forward
    layer.forward = mine
    side, given = SideBranches(), branches(layer, [lora(layer.weight, 2)])
    side.have(module, {"0": given})
    side.have(module, {})
    assert vars(layer)["forward"] is mine


def int8_alone(linear: Any, x: Tensor, act: str) -> Tensor:
    """`linear_input_act` by the rules of ComfyUI 0.30, which knows a quantised weight by its class."""
    return F.linear(x.relu(), linear.weight) if isinstance(linear.weight, Tensor) else linear(x.relu())


def halves_too(linear: Any, x: Tensor, act: str, residual: Tensor) -> Tensor:
    """The same by later rules: any weight, unless the layer's file asks for products in full precision."""
    by_itself = not getattr(linear, "_full_precision_mm", False)
    return residual + (F.linear(x.relu(), linear.weight) if by_itself else linear(x.relu()))


@pytest.mark.parametrize("rules", [int8_alone, halves_too])
def test_a_lora_counts_where_comfyui_multiplies_by_a_weight_past_its_layer(rules: Any) -> None:
    ops, layer, x, side = ModuleType("comfy.ops"), nn.Linear(5, 6, bias=False), torch.randn(4, 5), SideBranches()
    more = {"residual": torch.ones(4, 6)} if rules is halves_too else {}
    call_layers(ops)
    assert not hasattr(ops, "linear_input_act"), "an older ComfyUI has none"
    ops.linear_input_act = rules  # type: ignore[attr-defined]
    for _ in range(2):
        call_layers(ops)
    plain = rules(layer, x, "relu", **more)
    for loras in (branches(layer, [lora(layer.weight, 2)]), []):
        side.have(nn.Sequential(layer), {"0": loras} if loras else {})
        out = ops.linear_input_act(layer, x, "relu", **more)
        want = more.get("residual", 0) + layer(x.relu())
        assert torch.equal(out, want) and torch.equal(out, plain) is not bool(loras)


class Later(nn.Linear):
    """As ComfyUI's from 0.39 on: what stands before and after the product are further arguments."""

    __module__ = "later_ops"

    def forward(
        self, x: Tensor, input_act: str | None = None, *, residual: Tensor | None = None, **more: Any
    ) -> Tensor:
        if input_act is None and residual is None:
            return super().forward(x)
        return sys.modules["later_ops"].linear_input_act(self, x, input_act, residual=residual, **more)  # type: ignore[no-any-return]


def later(
    linear: Any, x: Tensor, input_act: str | None, *, residual: Tensor | None = None, act_scale: float | None = None
) -> Tensor:
    """Their `linear_input_act`, which multiplies by the weight past the layer's forward."""
    if input_act is not None:
        x = x.relu() * (1 if act_scale is None else act_scale)
    out = nn.Linear.forward(linear, x) if isinstance(linear, Later) else linear(x)
    return out if residual is None else residual + 2 * out


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {}),
        (("relu",), {}),
        ((), {"input_act": "relu"}),
        ((), {"residual": torch.ones(4, 5)}),
        (("relu",), {"residual": torch.ones(4, 5), "act_scale": 3.0}),
        ((), {"act_scale": 3.0}),
        ((None,), {"act_scale": 3.0}),
    ],
)
def test_a_lora_counts_once_by_what_is_multiplied_where_a_layer_takes_what_stands_around_its_product(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    ops: Any = ModuleType("later_ops")
    ops.linear_input_act = later
    monkeypatch.setitem(sys.modules, "later_ops", ops)
    if wrapped:
        call_layers(ops)
    layer, x, side = Later(5, 5), torch.randn(4, 5), SideBranches()
    whole = Later(5, 5)
    delta = lora(layer.weight, 2)
    whole.load_state_dict({"weight": merged(layer.weight, [delta]), "bias": layer.bias})
    with torch.no_grad():
        plain = layer(x, *args, **named)
        side.have(nn.Sequential(layer), {"0": branches(layer, [delta])})
        out, want = layer(x, *args, **named), whole(x, *args, **named)
        torch.testing.assert_close(out, want)
        assert not torch.allclose(out, plain, atol=1e-2)
        side.have(nn.Sequential(layer), {})
        assert torch.equal(layer(x, *args, **named), plain)


@pytest.mark.parametrize(
    ("values", "offset", "said"),
    [
        ((torch.ones(6, 2), torch.ones(3, 5), None, None), None, "patch of shapes [[6, 2], [3, 5]] does not fit"),
        (
            (torch.ones(5, 2), torch.ones(2, 5), None, None),
            None,
            "does not fit a.weight, a weight of [6, 5]; use one made",
        ),
        ((torch.ones(6, 2), torch.ones(2, 6), None, None), None, "does not fit"),
        ((torch.ones(3, 2), torch.ones(2, 5), None, None), (0, 4, 3), "does not fit"),
        ((torch.ones(6, 2), None, None, None), None, "a.weight: a LoRA without its two matrices; use a complete file"),
        ((torch.ones(6, 2), torch.ones(2, 5), torch.ones(1), None), None, "a LoRA without its two matrices"),
        ((None, torch.ones(2, 5), None, None), None, "a LoRA without its two matrices"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused(values: Any, offset: Any, said: str) -> None:
    delta = WeightDelta(key="a.weight", kind="lora", strength=1.0, values=values, offset=offset)
    with pytest.raises(ValueError) as error:
        LowRank.of(delta, torch.ones(6, 5), dtype=torch.float32, device=CPU)
    assert said in str(error.value)


def test_a_lora_of_the_last_rows_fits() -> None:
    found = LowRank.of(lora(torch.ones(6, 5), 2, offset=(0, 3, 3)), torch.ones(6, 5), dtype=torch.half, device=CPU)
    assert (found.first, found.up.shape, found.down.shape, found.up.dtype) == (3, (3, 2), (2, 5), torch.half)
    assert (found.alpha_over_rank, found.strength) == (1.5, 0.5)


LINEAR, ROTATED = torch.ones(6, 5), torch.ones(6, 5)
ROTATED._params = SimpleNamespace(convrot=True)  # type: ignore[attr-defined]
OF_COMFY = type("OfComfy", (nn.Module,), {"comfy_cast_weights": True, "out_features": 6, "in_features": 5})()


@pytest.mark.parametrize(
    ("layer", "weight", "changed", "runs"),
    [
        (nn.Linear(5, 6), LINEAR, {}, True),
        (OF_COMFY, LINEAR, {}, True),
        (nn.Linear(5, 6), LINEAR, {"offset": (0, 2, 3)}, True),
        (nn.Linear(5, 6), LINEAR, {"offset": (1, 2, 3)}, False),
        (nn.Linear(5, 6), LINEAR, {"kind": "diff"}, False),
        (nn.Linear(5, 6), LINEAR, {"strength_model": 0.5}, False),
        (nn.Linear(5, 6), LINEAR, {"values": (None, None, None, LINEAR)}, False),
        (nn.Linear(5, 7), LINEAR, {}, False),
        (nn.Linear(5, 6), ROTATED, {}, False),
        (nn.LayerNorm(6), LINEAR, {}, False),
        (nn.Conv1d(3, 6, 2), LINEAR, {}, True),
        (nn.Conv1d(3, 6, 2), LINEAR, {"offset": (0, 2, 3)}, False),
        (nn.Conv1d(4, 6, 2, groups=2), LINEAR, {}, False),
        (nn.Conv2d(3, 6, 2, padding_mode="reflect"), LINEAR, {}, False),
    ],
)
def test_which_deltas_run_beside_a_layer(layer: nn.Module, weight: Tensor, changed: dict[str, Any], runs: bool) -> None:
    given: dict[str, Any] = {"key": "a.weight", "kind": "lora", "strength": 1.0, "values": (None, None, None, None)}
    assert runs_as_branch(WeightDelta(**given | changed), layer, weight) is runs
