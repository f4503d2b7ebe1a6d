"""How ComfyUI's classes are made, and what a batch is to them."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from torch import nn

from parallel_runtime.models.hosted import build
from parallel_runtime.models.hosted.build import META, Built, Recognised
from parallel_runtime.models.hosted.calls import forward_call
from parallel_runtime.models.hosted.deltas import FileViews

from .cases import CASES
from .cases_images import hidream_o1
from .cases_lightricks import ltx2
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .tiny import difference, noise


def described(name: str, **config: Any) -> Any:
    """ComfyUI's description of a model of its supported ones."""
    import comfy.supported_models

    return getattr(comfy.supported_models, name)(config)


@in_ranks(1)
def test_a_class_that_reads_a_value_of_what_it_makes_is_on_meta_all_the_same(group: GlooGroup) -> None:
    sizes = {"in_channels": 48, "hidden_size": 96, "text_hidden_dim": 48, "timbre_hidden_dim": 16, "num_heads": 6}
    sizes |= {"audio_acoustic_hidden_dim": 16, "num_dit_layers": 2, "num_lyric_layers": 1, "num_timbre_layers": 1}
    sizes |= {"num_tokenizer_layers": 1, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 128, "fsq_dim": 96}
    sizes |= {"encoder_hidden_size": 96, "encoder_intermediate_size": 128, "encoder_num_heads": 6, "fsq_levels": [8, 5]}
    config = described("ACEStep15", **sizes)
    with pytest.raises(RuntimeError, match="meta tensor"):  # else this class needs no help any more
        config.get_model({}, "", device=META)
    model = Recognised(config, {}).model(META).diffusion_model
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))


@in_ranks(1)
def test_what_lies_beside_the_transformer_is_the_models(group: GlooGroup) -> None:
    sizes = {"depth": 1, "embed_dim": 192, "num_heads": 3, "cond_token_dim": 64, "timestep_features_type": "expo"}
    config = described("StableAudio3", **sizes, global_cond_type="adaLN", global_cond_shared_embed=True)
    path = "embedder.embedding.1"
    weights = {f"{path}.weight": noise(768, 256), f"{path}.bias": noise(768)}
    beside = {f"conditioner.conditioners.seconds_total.{name}": weight for name, weight in weights.items()}
    whole = Recognised(config, {}, beside).model(META)
    assert all(torch.equal(whole.seconds_total_embedder.get_parameter(name), each) for name, each in weights.items())
    with pytest.raises(RuntimeError, match="Missing key"):
        Recognised(config, {}).model(META)


@in_ranks(1)
def test_a_class_that_mixes_the_rows_of_a_batch_is_called_with_all_of_them(group: GlooGroup) -> None:
    mixed = {"ACE-Step 1.5": True, "Hunyuan3D 2.1, experts, long skips": True, "Stable Audio 1": False}
    for name, mixes in mixed.items():
        model, inputs = CASES[name]()
        first = {key: value[:1] if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        whole, alone = model(**inputs)[:1], model(**first)
        assert (float((alone - whole).norm() / whole.norm()) > 1e-3) is mixes, name
        x = inputs.pop("x")
        assert forward_call(model, x.shape[1], [x], inputs).out_shape[0] == (1 if mixes else 2), name


def rows_apart(model: nn.Module, inputs: dict[str, Any]) -> float:
    """How far the rows of a call with several are from each of them computed alone."""

    def row(value: Any, number: int) -> Any:
        if isinstance(value, list):
            return [row(each, number) for each in value]
        return value[number : number + 1] if isinstance(value, torch.Tensor) else value

    def outs(given: dict[str, Any]) -> list[torch.Tensor]:
        if hasattr(model, "clear_kv_cache"):
            model.clear_kv_cache()
        out = model(**copy.deepcopy(given))
        return [each.flatten(1) for each in (out if isinstance(out, list | tuple) else [out])]

    whole = torch.cat(outs(inputs), 1)
    alone = [
        torch.cat(outs({key: row(value, number) for key, value in inputs.items()}), 1) for number in range(len(whole))
    ]
    return difference(torch.cat(alone), whole)


def rows_of(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Into how many parts ranks can cut a call's rows, its input and its time given by position."""
    x, time, *_ = inputs.values()
    xs = x if isinstance(x, list) else [x]
    return forward_call(model, xs[0].shape[1], [x, time], dict(list(inputs.items())[2:])).out_shape[0]


@in_ranks(1)
def test_images_of_which_a_mask_keeps_unlike_parts_are_computed_together_by_ltx_2(group: GlooGroup) -> None:
    """It takes the largest timestep of all rows, and asks the first one's mask whether frames are kept in parts."""
    model, video, audio = ltx2(), torch.ones(4, 1, 3, 5, 7), torch.ones(4, 13)
    some, quiet = video.clone(), audio.clone()
    some[1, ..., :2, :] = 0.5
    quiet[1] = 0.2

    def given(video: torch.Tensor, audio: torch.Tensor) -> dict[str, Any]:
        x, times = [noise(1, 16, 3, 5, 7), noise(1, 8, 13, 16)], [(video * 0.9).flatten(1), audio * 0.9]
        rows = {"x": [each.expand(len(video), *each.shape[1:]) for each in x], "timestep": times}
        rows["context"] = noise(1, 9, 96).expand(len(video), -1, -1)
        return rows | {"attention_mask": None, "denoise_mask": video}

    for name, call in {"alike": given(video, audio), "some": given(some, audio), "quiet": given(video, quiet)}.items():
        apart = rows_apart(model, call)
        assert (apart <= ROUNDING) if name == "alike" else (apart > 1e-3), (name, apart)
        assert rows_of(model, call) == (4 if name == "alike" else 1), name
    both = given(torch.cat((some[:2], some[:2])), audio)  # two images, with a prompt and without
    assert rows_of(model, both) == 2, "cfg can part the sides"


@in_ranks(1)
def test_rows_with_unlike_references_are_computed_together_by_hidream_o1(group: GlooGroup) -> None:
    """It has the first row's references for all rows."""
    first, second = noise(1, 96, 128, 3).sigmoid(), noise(1, 96, 128, 3).sigmoid().flip(1)
    model, one = hidream_o1(ref_images=[first])
    calls = {"none": hidream_o1()[1], "alike": one, "unlike": hidream_o1(ref_images=[second])[1]}
    for name, other in calls.items():
        rows = {
            key: torch.cat((calls["none"][key] if name == "none" else one[key], value))
            if isinstance(value, torch.Tensor) and key not in ("timesteps", "input_ids")
            else value
            for key, value in other.items()
        }
        rows["timesteps"] = other["timesteps"].repeat(2)
        prompt = other["input_ids"].clone()
        prompt[0, 0] = 6  # a negative prompt of the same length
        rows["input_ids"] = torch.cat((other["input_ids"], prompt))
        apart = rows_apart(model, rows)
        assert (apart > 1e-3) if name == "unlike" else (apart <= ROUNDING), (name, apart)
        assert rows_of(model, rows) == (1 if name == "unlike" else 2), name


class Casting(nn.Linear):
    """A layer that gives its weight the dtype of its input, as ComfyUI's do."""

    comfy_cast_weights = True


def test_matrices_that_layers_cast_stay_the_files_in_these_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "reads_dtype", lambda _, name: name.startswith("block.read"))
    layers = {"cast": Casting(2, 2), "fp8": Casting(2, 2), "read": Casting(2, 2), "plain": nn.Linear(2, 2)}
    block = nn.ModuleDict({**layers, "norm": nn.LayerNorm(2)})
    module = nn.ModuleDict({"block": block, "other": Casting(2, 2)})
    rounded = dict.fromkeys(dict(module.named_parameters()), torch.half) | {"block.fp8.weight": torch.float8_e4m3fn}
    built = Built(whole=SimpleNamespace(diffusion_model=module), declared={}, rounded=rounded)
    left = built.casting_in_use({"block": block}).rounded
    assert rounded.keys() - left.keys() == {"block.cast.weight"} and left.items() <= rounded.items()


def test_a_weight_whose_dtype_is_read_is_known_by_its_class_or_one_that_that_is_derived_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derived = type("Derived", (Casting,), {})
    path = f"{Casting.__module__}.{Casting.__qualname__}"
    monkeypatch.setattr(build, "may_be_found", lambda kind: kind is nn.LayerNorm)
    monkeypatch.setattr(build, "READ_DTYPES", {path: r"a\.(b|c)"})
    for model in (Casting(2, 2), derived(2, 2)):
        assert [build.reads_dtype(model, name) for name in ("a.b", "a.c", "a.d", "x.a.b")] == [True, True, False, False]
    assert not build.reads_dtype(nn.Linear(2, 2), "a.b")
    assert build.reads_dtype(nn.LayerNorm(2), "a.d"), "the code of such a class has not been read"


def test_weights_that_get_no_larger_are_rounded_one_by_one_on_their_way_to_the_device() -> None:
    """And others there. Made of what the file says, again and again; those that have their dtype are left alone."""
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("narrows", "widens", "alike", "unnamed")})
    module["widens"].to(torch.bfloat16)
    before = {name: layer.weight for name, layer in module.items()}
    dtypes = {"narrows": torch.half, "widens": torch.float32, "alike": torch.float32}
    rounded = {f"{name}.weight": dtype for name, dtype in dtypes.items()}
    built = Built(whole=SimpleNamespace(diffusion_model=module), declared={}, rounded=rounded)
    assert built.widens("widens.weight") and built.widens("narrows.weight") is built.widens("alike.weight") is False
    views = FileViews(module, torch.device("meta"), rounded)
    views.change({"narrows.weight": None})
    assert (module["narrows"].weight.dtype, module["narrows"].weight.device.type) == (torch.half, "meta")
    assert all(module[name].weight is before[name] for name in ("widens", "alike", "unnamed"))
    module["narrows"].weight = before["narrows"]
    built.round_here()
    assert (module["narrows"].weight.dtype, module["widens"].weight.dtype) == (torch.half, torch.float32)
    assert all(module[name].weight is before[name] for name in ("alike", "unnamed"))
    for name, dtype in dtypes.items():
        assert torch.equal(views.pristine(f"{name}.weight"), before[name]), "as the file has it"
        views.change({f"{name}.weight": None})
        assert (module[name].weight.dtype, module[name].weight.device.type) == (dtype, "meta")
    changed = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    views.change({"narrows.weight": changed})
    assert module["narrows"].weight.dtype == torch.float32, "what a LoRA made has its own dtype"
