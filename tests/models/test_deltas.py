"""LoRAs merged where a layer is used, as ComfyUI's dynamic VRAM does, beside ComfyUI's own code for it.

Owns: the numbers of one weight. Which ComfyUI merges so is nodes/host/model/weight_deltas.py's.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from host.outcomes import StockFailsError
from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.models.hosted.deltas import PREFIX, FileViews, MergedDeltas
from parallel_runtime.models.parts import as_parameter, plain_parts
from parallel_runtime.weight_delta import WeightDelta

from .gloo_group import GlooGroup
from .ranks import in_ranks

CPU = torch.device("cpu")
WIDE, SMALL = 192, 64  # numbers of a row; a layer of the second is loaded as without dynamic VRAM
FP8 = torch.float8_e4m3fn
PRODUCTS = "fp8, products"
KINDS = {"fp8": FP8, PRODUCTS: FP8, "bf16": torch.bfloat16, "scaled fp8": "TensorCoreFP8E4M3Layout"}
KINDS |= {"nvfp4": "TensorCoreNVFP4Layout", "int8": "TensorWiseINT8Layout"}


def layer_of(kind: str, size: int) -> nn.Module:
    """ComfyUI's own layer with a weight of that kind, and a bias."""
    import comfy.ops
    import comfy.quant_ops

    numbers = torch.Generator().manual_seed(3)
    layer = (comfy.ops.fp8_ops if kind == PRODUCTS else comfy.ops.manual_cast).Linear(size, size)
    weight = torch.randn(size, size, generator=numbers)
    given = KINDS[kind]
    if isinstance(given, torch.dtype):
        held = weight.to(given)
    else:
        try:
            held = comfy.quant_ops.QuantizedTensor.from_float(weight.bfloat16(), given)
        except KeyError as error:
            raise StockFailsError(f"this ComfyUI's comfy_kitchen has no {given}") from error
        layer.layout_type = given  # which ComfyUI 0.24 asks for
    layer.weight = as_parameter(held)
    layer.bias = nn.Parameter(torch.randn(size, generator=numbers).bfloat16(), requires_grad=False)
    return layer


def lora(size: int) -> WeightDelta:
    numbers = torch.Generator().manual_seed(4)
    up, down = torch.randn(size, 4, generator=numbers), torch.randn(4, size, generator=numbers)
    return WeightDelta(key="layer.weight", kind="lora", strength=0.7, values=(up, down, 2.0, None), where_used=True)


def ours(kind: str, size: int, delta: WeightDelta) -> Tensor:
    module = nn.ModuleDict({"layer": layer_of(kind, size)})
    changes = MergedDeltas(module, {}, None, torch.bfloat16)
    changes.merge({delta.key: [delta]}, device=CPU, cancelled=lambda: False, beat=lambda: None)
    changed = module["layer"].weight.data
    changes.undo_except(set(), cancelled=lambda: False, beat=lambda: None)
    assert all(map(torch.equal, numbers_of(module["layer"].weight), numbers_of(layer_of(kind, size).weight)))
    return changed


def stocks(kind: str, size: int, delta: WeightDelta) -> Tensor:
    """What a layer has from its second call on, where all of it stays on the device."""
    import comfy.memory_management as memory
    import comfy.model_management as management
    import comfy.ops
    from comfy.model_patcher import LowVramPatch
    from comfy.weight_adapter import LoRAAdapter

    layer: Any = layer_of(kind, size)
    up, down, alpha, dora = delta.values
    key = PREFIX + delta.key
    change = LoRAAdapter(set(), (up, down, alpha, None, dora, None))
    layer.weight_lowvram_function = LowVramPatch(key, {key: [(delta.strength, change, 1.0, None, None)]})
    layer.seed_key = key.removesuffix(".weight")
    held = [layer.weight, layer.bias]
    room = torch.zeros(memory.vram_aligned_size(held), dtype=torch.uint8)
    management.cast_to_gathered(held, room)
    layer._prefetch = {
        **{"signature": 1, "resident": False, "xfer_dest": room, "cast_dest": None, "needs_cast": False},
        "cast_geometry": memory.tensors_to_geometries(held),
    }
    cast = (torch.bfloat16, CPU, torch.bfloat16, None, False)
    if kind == PRODUCTS:
        cast = (FP8, CPU, torch.bfloat16, management.lora_compute_dtype(CPU), True)
    comfy.ops.resolve_cast_module_with_vbar(layer, *cast)
    return layer._v_weight


def numbers_of(weight: Tensor) -> list[Tensor]:
    return [part.float() for part in plain_parts(weight)[0]]


@pytest.mark.parametrize("kind", KINDS)
@in_ranks(1)
def test_a_lora_is_rounded_by_the_dice_of_dynamic_vram(group: GlooGroup, kind: str) -> None:
    """The control is a merge by the dice of a ComfyUI without it: other numbers. No dice round 16 bits."""
    delta = lora(WIDE)
    want = numbers_of(stocks(kind, WIDE, delta))
    assert all(map(torch.equal, numbers_of(ours(kind, WIDE, delta)), want))
    otherwise = numbers_of(ours(kind, WIDE, replace(delta, where_used=False)))
    apart = float((otherwise[0] != want[0]).float().mean())
    assert apart > (0.1 if kind != "bf16" else 0.0), apart


@in_ranks(1)
def test_what_comfyui_merges_in_fp32_alone_is_merged_as_it_is_loaded(group: GlooGroup) -> None:
    """In 16 bits it says that the change does not fit, and leaves it out."""
    blocks = torch.randn(WIDE // 8, 8, 8, generator=torch.Generator().manual_seed(6))
    oft = replace(lora(WIDE), kind="oft", values=(blocks, None, 0.0, None))
    kept = replace(lora(WIDE), kind="diff", values=(torch.ones(WIDE, WIDE),))
    for delta in (oft, kept):
        here, there = (numbers_of(ours("fp8", WIDE, replace(delta, where_used=each))) for each in (True, False))
        assert all(map(torch.equal, here, there)) is (delta is oft), delta.kind


@in_ranks(1)
def test_a_bias_is_merged_where_it_is_used_though_its_layers_weight_is_elsewhere(group: GlooGroup) -> None:
    of_bias = [replace(lora(WIDE), key="layer.bias", kind="diff")]
    for elsewhere in (False, True):
        module = nn.ModuleDict({"layer": layer_of("fp8", WIDE)})
        if elsewhere:
            module["layer"]._parameters["weight"] = None
        changes = MergedDeltas(module, {}, None, torch.bfloat16)
        assert changes._is_merged_where_used("layer.bias", of_bias), elsewhere
    assert not changes._is_merged_where_used("layer.bias", [replace(of_bias[0], where_used=False)])


@in_ranks(1)
def test_small_layers_and_other_shapes_are_merged_as_they_are_loaded(group: GlooGroup) -> None:
    larger = torch.randn(2 * WIDE, WIDE, generator=torch.Generator().manual_seed(5))
    for size, delta in ((SMALL, lora(SMALL)), (WIDE, replace(lora(WIDE), kind="padded_diff", values=(larger,)))):
        here, there = (numbers_of(ours("fp8", size, replace(delta, where_used=each))) for each in (True, False))
        assert all(map(torch.equal, here, there)), delta.kind


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the module", "views of the file"])
@in_ranks(1)
def test_taking_changes_back_beats_and_goes_on_after_a_cancel(group: GlooGroup, elsewhere: bool) -> None:
    """From a slow disk it takes minutes, and a rank without a heartbeat is ended."""
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    changes = MergedDeltas(module, {}, FileViews(module, CPU, {}) if elsewhere else None)
    keys = [f"{name}.weight" for name in "abc"]
    deltas = {key: [WeightDelta(key=key, kind="diff", strength=1.0, values=(torch.ones(4, 4),))] for key in keys}
    changes.merge(deltas, device=CPU, cancelled=lambda: False, beat=lambda: None)

    def changed() -> int:
        return sum(not torch.equal(module.state_dict()[key], before[key]) for key in keys)

    beats = list[int]()
    with pytest.raises(RequestCancelledError):
        changes.undo_except(set(), cancelled=lambda: changed() == 2, beat=lambda: beats.append(changed()))
    assert beats == [2]
    changes.undo_except({keys[0]}, cancelled=lambda: False, beat=lambda: beats.append(changed()))
    changes.undo_except(set(), cancelled=lambda: False, beat=lambda: beats.append(changed()))
    assert sorted(beats) == [0, 1, 2] and len(beats) == 3


@in_ranks(1)
def test_changes_that_all_ranks_take_back_together_are_not_given_up_half_way(group: GlooGroup) -> None:
    taken = list[list[str]]()
    held: Any = SimpleNamespace(
        collective=True,
        pristine=lambda name: nn.Parameter(torch.ones(4, 4)),
        by_block=lambda names: [[name] for name in names],
        change=lambda weights: taken.append(sorted(weights)),
    )
    changes = MergedDeltas(nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"}), {}, held)
    deltas = {
        key: [WeightDelta(key=key, kind="diff", strength=1.0, values=(torch.ones(4, 4),))]
        for key in ("a.weight", "b.weight")
    }
    changes.merge(deltas, device=CPU, cancelled=lambda: False, beat=lambda: None)
    taken.clear()
    changes.undo_except(set(), cancelled=lambda: True, beat=lambda: taken.append(["beat"]))
    assert taken == [["a.weight"], ["beat"], ["b.weight"], ["beat"]]
