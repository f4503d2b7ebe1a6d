"""Which family a file holds, by the names in its header."""

import pytest
import torch

from parallel_runtime.checkpoint import CheckpointHeader, TensorEntry
from parallel_runtime.models.flux.family import FLUX
from parallel_runtime.models.flux.sample import sample_config
from parallel_runtime.models.registry import find_family, read_own

OURS = tuple(sample_config().expected_shapes())


def header(*names: str) -> CheckpointHeader:
    """A file with these names."""
    entry = TensorEntry(torch.float32, (1,), 0, 4)
    return CheckpointHeader("model.safetensors", dict.fromkeys(names, entry), 4)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_a_file_of_a_family_of_ours_is_known_by_its_names_even_when_it_is_damaged(prefix: str) -> None:
    damaged = header(*(prefix + name for name in OURS if name != "img_in.bias"))
    assert find_family(damaged) is FLUX
    with pytest.raises(ValueError, match="img_in.weight has shape"):
        read_own(damaged)


@pytest.mark.parametrize(
    "foreign",
    [
        "double_stream_modulation_img.lin.weight",
        "distilled_guidance_layer.norms.0.scale",
        "txt_in.individual_token_refiner.blocks.0.norm1.weight",
        "double_blocks.0.img_mlp.gate_proj.weight",
    ],
)
def test_models_with_such_blocks_that_are_not_ours_go_to_comfyuis_modules(foreign: str) -> None:
    other = header(*OURS, foreign)
    assert find_family(other) is None
    with pytest.raises(ValueError, match="not Flux.1"):
        read_own(other)


@pytest.mark.parametrize("mark", ["double_blocks.0.img_attn.qkv.comfy_quant", ""])
@pytest.mark.parametrize(
    ("dtype", "scale", "ours"),
    [
        (torch.float8_e4m3fn, (), True),  # one scale a matrix
        (torch.float8_e4m3fn, (7, 2), False),  # mxfp8
        (torch.int8, (), False),
        (torch.uint8, (7, 2), False),  # nvfp4
    ],
)
def test_a_flux_in_a_format_of_comfyuis_layers_goes_to_comfyuis_modules(
    mark: str, dtype: torch.dtype, scale: tuple[int, ...], ours: bool
) -> None:
    plain = header(*OURS, *([mark] if mark else []))
    layer = {"weight": TensorEntry(dtype, (4, 4), 0, 16), "weight_scale": TensorEntry(torch.float32, scale, 16, 20)}
    tensors = {**plain.tensors, **{f"double_blocks.0.img_attn.qkv.{name}": each for name, each in layer.items()}}
    told = {} if mark else {"_quantization_metadata": '{"layers": {}}'}
    assert find_family(CheckpointHeader("model.safetensors", tensors, 20, told)) is (FLUX if ours else None)
    with pytest.raises(ValueError, match="img_in.weight has shape" if ours else "use a|use an"):  # and without a word
        read_own(CheckpointHeader("model.safetensors", tensors, 20))
    assert find_family(CheckpointHeader("model.safetensors", tensors, 20)) is (FLUX if ours or not mark else None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_a_flux_in_fp8_goes_to_comfyuis_modules_where_they_are_at_hand(dtype: torch.dtype) -> None:
    """Blocks of ours widen such weights in every step."""
    name = "double_blocks.0.img_mlp.0.weight"
    file = CheckpointHeader("model.safetensors", {**header(*OURS).tensors, name: TensorEntry(dtype, (4,), 0, 4)}, 4)
    assert find_family(file) is FLUX
    assert find_family(file, comfyui=True) is (FLUX if dtype == torch.bfloat16 else None)


def test_text_encoders_in_fp8_leave_a_checkpoint_to_the_blocks_of_ours() -> None:
    """Blocks of ours widen none of them."""
    prefix, fp8 = "model.diffusion_model.", TensorEntry(torch.float8_e4m3fn, (4,), 0, 4)
    tensors = header(*(prefix + name for name in OURS)).tensors
    texts = {**tensors, "text_encoders.t5xxl.transformer.shared.weight": fp8}
    assert find_family(CheckpointHeader("model.safetensors", texts, 4), comfyui=True) is FLUX
    texts[f"{prefix}double_blocks.0.img_mlp.0.weight"] = fp8
    assert find_family(CheckpointHeader("model.safetensors", texts, 4), comfyui=True) is None


def test_a_flux_in_fp8_whose_scale_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="double_blocks.0.img_attn.qkv is said to be in a format with a scale"):
        read_own(header(*OURS, "double_blocks.0.img_attn.qkv.comfy_quant"))


def test_files_without_such_blocks_go_to_comfyuis_modules() -> None:
    for names in (("blocks.0.self_attn.q.weight",), ("transformer_blocks.0.attn.to_q.weight",), OURS[:0]):
        assert find_family(header(*names)) is None
    without_vector = header(*(name for name in OURS if not name.startswith("vector_in.")))
    assert find_family(without_vector) is None
