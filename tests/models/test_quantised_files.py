"""Scales that ranks exchange for quantised layers, and files that are refused by their layer, or read otherwise.

Owns no parity (test_quantised.py).
"""

import contextlib
import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from torch import Tensor

from families.unet import KOALA, SDXL
from host.quantised import FORMATS, Tensors, mark, quantised
from parallel_runtime.models.hosted import formats, scales
from parallel_runtime.models.hosted.build import META, build, recognise
from parallel_runtime.models.hosted.formats import check_formats
from parallel_runtime.models.hosted.scales import shared as shared_scales
from parallel_runtime.models.hosted.scales import watch
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.shard import split_lengths

from .gloo_group import GlooGroup
from .quantised_model import SIZES, TOLD, kernels
from .ranks import in_ranks, refused
from .tiny import build as tiny
from .tiny import noise

LAYER = "blocks.0.self_attn.q"


def over(axis: Axis) -> SequenceParallelAttention:
    """The ranks of an axis as those that share a call."""
    return SequenceParallelAttention(ulysses=axis)


def mine(axis: Axis, rows: Tensor) -> Tensor:
    """This rank's rows."""
    lengths = split_lengths(len(rows), axis.size)
    return rows.split(lengths)[axis.index]


@in_ranks(2)
def test_a_scale_taken_from_the_activations_is_one_number_and_everybodys_rows_are_rounded_by_it(
    group: GlooGroup,
) -> None:
    axis = group.axis
    from comfy.quant_ops import QuantizedTensor

    rows = noise(35, 64) * torch.linspace(0.1, 3, 35)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        whole = QuantizedTensor.from_float(rows.to(dtype), "TensorCoreNVFP4Layout")
        part = mine(axis, rows.to(dtype))
        with shared_scales([over(axis)]):
            got = QuantizedTensor.from_float(part, "TensorCoreNVFP4Layout")
            said = QuantizedTensor.from_float(part, "TensorCoreNVFP4Layout", scale=torch.tensor(0.5))
        assert torch.equal(got.params.scale, whole.params.scale), (got.params.scale, whole.params.scale)
        assert torch.equal(got.dequantize(), mine(axis, whole.dequantize()))
        assert said.params.scale == 0.5, "a scale that the file says was exchanged"
        own = QuantizedTensor.from_float(part, "TensorCoreNVFP4Layout")
        assert axis.index == axis.size - 1 or own.params.scale != whole.params.scale, "the control says nothing"


def test_the_switch_for_scales_is_put_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = SimpleNamespace(from_float=print)
    monkeypatch.setattr(scales, "_quantised", lambda: stock)
    scales.install()
    switch = stock.from_float
    assert isinstance(switch, scales.SharedScales)
    scales.install()
    assert stock.from_float is switch
    monkeypatch.setattr(scales, "_quantised", lambda: None)
    scales.install()  # a ComfyUI without quantised formats


@in_ranks(2)
def test_a_rank_without_rows_takes_part_in_a_scale(group: GlooGroup) -> None:
    """A mixture of experts calls each of them on every rank, with the tokens that were sent there: often none."""
    axis = group.axis
    from comfy.quant_ops import QuantizedTensor

    rows, last = noise(7, 64), axis.index == axis.size - 1
    with shared_scales([over(axis)]):
        got = QuantizedTensor.from_float(rows if last else rows[:0], "TensorCoreNVFP4Layout")
    whole = QuantizedTensor.from_float(rows, "TensorCoreNVFP4Layout")
    weight = QuantizedTensor.from_float(noise(32, 64), "TensorCoreNVFP4Layout")
    with kernels("nvfp4"):
        out = torch.nn.functional.linear(got, weight)
    assert out.shape == ((7 if last else 0), 32)
    assert not last or torch.equal(got.params.scale, whole.params.scale)


class Asked(SequenceParallelAttention):
    """Ranks that are asked for maxima, and say how often."""

    asks = 0

    def maximum(self, tensor: Tensor) -> Tensor:
        """As it is."""
        self.asks += 1
        return tensor


class Rounding(torch.nn.Linear):
    """A layer of a file in nvfp4 that rounds what it is given."""

    quant_format, _full_precision_mm = "nvfp4", False

    def forward(self, input: Tensor, input_act: float = 1.0) -> Tensor:
        """(..., width) to (..., out)."""
        from comfy.quant_ops import QuantizedTensor

        rows = input_act * input.reshape(-1, input.shape[-1])
        rounded = QuantizedTensor.from_float(rows, "TensorCoreNVFP4Layout")
        rounded = rounded.dequantize() if isinstance(rounded, QuantizedTensor) else rounded
        return torch.nn.functional.linear(rounded, self.weight, self.bias).reshape(*input.shape[:-1], self.out_features)


@pytest.mark.parametrize("last", ["rounds", "plain"])
@in_ranks(2)
def test_every_rank_asks_for_the_scales_of_experts_that_none_of_its_tokens_go_to(group: GlooGroup, last: str) -> None:
    """ComfyUI's class calls only those that have tokens; the last ones of a rank are none of its calls either. Of a
    mixed file the `last` layer of each may be plain: two experts without tokens still are two exchanges."""
    axis = group.axis
    from comfy.ldm.hunyuan3dv2_1.hunyuandit import MoEBlock

    torch.manual_seed(5)
    mixture = MoEBlock(64, num_experts=4, moe_top_k=1, ff_inner_dim=96, operations=SimpleNamespace(Linear=Rounding))
    for expert in mixture.experts if last == "plain" else ():
        expert.net[-1].__class__ = torch.nn.Linear
    rows = noise(1, 36, 64) * torch.linspace(0.1, 3, 36)[:, None]
    chosen = torch.tensor([2 if row < 18 else (0, 1, 3)[row % 3] for row in range(36)])  # of two ranks: one, three
    parts = split_lengths(36, axis.size)
    starts = [sum(parts[:number]) for number in range(axis.size)]

    def run(first: int, stop: int) -> Tensor:
        mixture.gate.forward = lambda x: (chosen[first:stop], torch.ones(stop - first, 1), None)
        return mixture.eval()(rows[:, first:stop])

    whole = run(0, 36)
    watch(mixture)
    asks = set()
    for first, length in zip(starts, parts, strict=True):
        counted = Asked(ulysses=axis)
        with shared_scales([counted]):
            run(first, first + length)
        asks.add(counted.asks)
    assert len(asks) == 1, f"ranks ask for {asks} scales, and the one with more waits forever"
    first, stop = starts[axis.index], starts[axis.index] + parts[axis.index]
    with shared_scales([over(axis)]):
        found = run(first, stop)
    off = (found - whole[:, first:stop]).norm(dim=-1) > ROUNDING * whole.norm(dim=-1).max()
    assert off.sum() <= 1, "a last digit sends one row over a step, another scale all of them"
    assert torch.equal(run(0, 36), whole), "a call that nobody shares is another one"


@in_ranks(2)
def test_what_a_layer_was_given_is_forgotten_when_it_has_run(group: GlooGroup) -> None:
    """Also where it does not round it, or raises; `input` may be said by its name."""
    axis = group.axis
    from comfy.quant_ops import QuantizedTensor

    layer, asked = Rounding(64, 32), Asked(ulysses=axis)
    rows = noise(7, 64)
    watch(layer)
    with shared_scales([asked]):
        for _ in range(2):
            layer(input=rows)
        assert asked.asks == 1, "q, k and v given by name were exchanged apart"
        for act in ({}, {"input_act": 2.0}, {"input_act": 3.0}):  # as ComfyUI 0.39, before the product
            layer(rows, **act)
        layer(rows, 2.0)
        assert asked.asks == 4, "what it makes of a tensor by itself counts as that tensor"
        for wrong in (rows[:, :48], "nothing that it could round"):
            with contextlib.suppress(RuntimeError, AttributeError):
                layer(wrong)
            assert QuantizedTensor.from_float.layer_input is None


def without(*names: str) -> Callable[[Tensors], None]:
    """Takes tensors of the layer out of a file."""

    def spoil(tensors: Tensors) -> None:
        for name in names:
            del tensors[f"{LAYER}.{name}"]

    return spoil


def saying(value: Any) -> Callable[[Tensors], None]:
    """Puts another mark on the layer."""
    return lambda tensors: tensors.update({f"{LAYER}.comfy_quant": value})


AGAIN = "download the file again, or use another one"
BROKEN = torch.tensor(list(b'{"format": "nvf'), dtype=torch.uint8)
BAD: dict[str, tuple[str, Callable[[Tensors], None], tuple[str, ...]]] = {
    "nvfp4 without its block scales": ("nvfp4", without("weight_scale"), ("nvfp4 and lacks its weight_scale,", AGAIN)),
    "nvfp4 without its scale": ("nvfp4", without("weight_scale_2"), ("lacks its weight_scale_2,", AGAIN)),
    "fp8 without its scale": (
        "fp8 e4m3",
        without("weight_scale"),
        ("float8_e4m3fn and lacks its weight_scale,", AGAIN),
    ),
    "no format": (
        "int8",
        without("comfy_quant"),
        ("holds int8 with a scale, and nothing says its format", "quantised for"),
    ),
    "an unknown format": (
        "nvfp4",
        saying(mark({"format": "nvfp3"})),
        ("'nvfp3'", "this ComfyUI has", "nvfp4", "update"),
    ),
    "no name of a format": ("nvfp4", saying(mark({})), ("is in the format None, and this ComfyUI has",)),
    "broken JSON": ("nvfp4", saying(BROKEN), (f"{LAYER}.comfy_quant is not the JSON text of a format", AGAIN)),
    "JSON of another kind": ("nvfp4", saying(mark(["nvfp4"])), (".comfy_quant is not the JSON text", AGAIN)),
    "another dtype": (
        "nvfp4",
        saying(mark({"format": "float8_e4m3fn"})),
        ("whose numbers are float8_e4m3fn, and holds uint8",),
    ),
}


@in_ranks(1)
def test_a_file_that_cannot_be_loaded_is_refused_by_its_layer(group: GlooGroup) -> None:
    whole = {f"{LAYER}.weight": noise(64, 64)}
    for name, (kind, spoil, texts) in BAD.items():
        tensors = FORMATS[kind].stored(LAYER, whole[f"{LAYER}.weight"])
        spoil(tensors)
        with refused(f"{name}.safetensors: {LAYER}", *texts):
            recognise(f"{name}.safetensors", tensors, {})
    for text in ("{", "[]", "{}", '{"layers": ["a"]}'):
        with refused("x.safetensors: _quantization_metadata in its header is not a JSON object with layers", AGAIN):
            recognise("x.safetensors", whole, {"_quantization_metadata": text})


@in_ranks(1)
def test_a_file_that_lacks_a_weight_is_refused_by_its_name(group: GlooGroup) -> None:
    """A quantised layer has none before it is loaded, and is made on the CPU: what is there may be any number."""
    model = tiny("comfy.ldm.wan.model.WanModel", model_type="t2v", text_len=9, **SIZES)
    for name in ("blocks.0.ffn.0.bias", "blocks.1.ffn.2.weight", "blocks.1.modulation"):
        tensors, said = quantised(dict(model.state_dict()), "nvfp4")
        del tensors[name]
        said = {"config": json.dumps({"transformer": TOLD})} | said
        with refused("x.safetensors lacks ", f"weight(s) of WanModel, {name} for one; download it again"):
            build("x.safetensors", recognise("x.safetensors", tensors, said), torch.float32)


@in_ranks(1)
def test_an_old_file_in_another_fp8_than_comfyui_says_is_cast_as_in_stock(group: GlooGroup) -> None:
    """ComfyUI marks every layer of an old scaled file as e4m3, and casts those that are not."""
    whole = noise(64, 64)
    tensors = FORMATS["fp8 e4m3"].stored(LAYER, whole)
    tensors[f"{LAYER}.weight"] = whole.to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="recognises no diffusion model"):  # one layer is no model
        recognise("x.safetensors", tensors, {})


def names_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a U-Net of such arguments, by name, without values."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    made = UNetModel(**arguments, out_channels=4, device="meta")
    return dict(made.state_dict())


@in_ranks(1)
def test_a_checkpoint_says_what_its_model_predicts_and_its_transformer_does_not(group: GlooGroup) -> None:
    """As ComfyUI's two loaders: of SDXL, Load Diffusion Model never learns that a checkpoint predicts v."""
    whole = {f"model.diffusion_model.{name}": weight for name, weight in names_of(KOALA).items()}
    whole |= {"first_stage_model.encoder.conv_in.weight": torch.zeros(1), "v_pred": torch.zeros(0)}
    for checkpoint, predicts in ((True, "V_PREDICTION"), (False, "EPS")):
        found = recognise("x.safetensors", whole, {}, checkpoint=checkpoint)
        assert found.model(META).model_type.name == predicts
        assert set(found.weights) == {name.removeprefix("model.diffusion_model.") for name in whole if ".diff" in name}


@in_ranks(1)
def test_a_unet_under_diffusers_names_is_read_under_comfyuis(group: GlooGroup) -> None:
    from comfy.utils import unet_to_diffusers

    depths = {"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10}
    arguments = SDXL | depths | {"channel_mult": [1, 2, 4]}
    weights = names_of(arguments)
    names = {ours: theirs for theirs, ours in unet_to_diffusers(arguments).items()}
    found = recognise("x.safetensors", {names[name]: weight for name, weight in weights.items()}, {})
    assert {name: weight.shape for name, weight in found.weights.items()} == {
        name: weight.shape for name, weight in weights.items()
    }
    assert {name for name, _ in found.model(META).diffusion_model.named_parameters()} == set(weights)


def has_formats(monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]) -> None:
    """Have a ComfyUI with these formats."""
    names = ("comfy", "comfy.quant_ops")
    modules = [ModuleType(name) for name in names]
    modules[0].quant_ops, modules[1].QUANT_ALGOS = modules[1], known  # type: ignore[attr-defined]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["asym_w4a8_int8", "w6a8_int8"])
def test_a_format_whose_scales_have_other_names_than_comfyui_lists(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As ComfyUI 0.33 and later have them, whose loaders take `weight_s_rel` and `weight_s_channel`."""
    has_formats(monkeypatch, {name: {"storage_t": torch.int8, "parameters": {"weight_scale"}}})
    weights = {"a.weight": torch.zeros(2, 4, dtype=torch.int8), "a.weight_s_rel": torch.zeros(2, 1)}
    weights |= {"a.comfy_quant": mark({"format": name})}
    check_formats("file", weights | {"a.weight_s_channel": torch.zeros(2)})
    with pytest.raises(ValueError, match="lacks its weight_s_channel, without"):
        check_formats("file", weights)


def test_a_layer_of_narrow_numbers_whose_format_nothing_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has_formats(monkeypatch, {})
    fp8, int8, scale = torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.zeros(2, 4, dtype=torch.int8), torch.ones(())
    for weights, said in (
        ({"a.weight": fp8, "a.weight_scale": scale}, "'?a'? holds float8_e4m3fn with a scale, and nothing says its"),
        ({"a.weight": int8}, "'?a'? holds int8, and nothing says its format"),
        ({"a.weight": int8, "a.weight_scale": scale}, "'?a'? holds int8 with a scale"),
    ):
        with pytest.raises(ValueError, match=f"file: {said}"):
            check_formats("file", weights)
    check_formats("file", {"a.weight": fp8, "a.bias": int8, "b.weight": int8[0], "c.weight": fp8.float()})


@pytest.mark.parametrize(
    ("said", "without", "coarse"),
    [
        ([], set(), 0.0),
        ([{"format": "int8_tensorwise"}], set(), 2e-2),
        ([{"format": "int8_tensorwise"}, {"format": "float8_e4m3fn"}], set(), 0.1),
        ([{"format": "int8_tensorwise"}, {"format": "float8_e4m3fn"}], {"float8_e4m3fn"}, 2e-2),
        ([{"format": "float8_e4m3fn", "full_precision_matrix_mult": True}], set(), 0.0),
        ([{"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, {"format": "int8_tensorwise"}], set(), 2e-2),
    ],
)
def test_inputs_of_layers_are_coarse_where_products_are_in_the_files_format(
    monkeypatch: pytest.MonkeyPatch, said: list[dict[str, Any]], without: set[str], coarse: float
) -> None:
    monkeypatch.setattr(formats, "_without_product", lambda config: without)
    marks = {f"{number}{formats.MARK}": mark(each) for number, each in enumerate(said)}
    assert formats.coarse_inputs(None, {**marks, "a.weight": torch.zeros(1)}) == coarse
