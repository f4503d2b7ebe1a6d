"""How ComfyUI's classes are made, and what a batch is to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_runtime.models.hosted.build import META, Recognised
from parallel_runtime.models.hosted.calls import forward_call

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .tiny import noise


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
