"""Ernie-Image, Ideogram 4, JoyImage, Lens, Boogu, Mage-Flow, Kandinsky 5 Image, Anima: mostly 35 tokens."""

from typing import Any

import torch
from torch import nn

from .cases_videos import COSMOS, PREDICT2
from .tiny import Case, at, build, case, noise, text_mask


@case("Ernie-Image")
def _() -> Case:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_layers": 2, "ffn_hidden_size": 128, "in_channels": 16}
    sizes |= {"out_channels": 16, "text_in_dim": 48, "rope_axes_dim": (4, 6, 6)}
    given = {"x": noise(2, 16, 5, 7), "timesteps": at(0.7, 0.7), "context": noise(2, 9, 48)}
    return build("comfy.ldm.ernie.model.ErnieImageModel", **sizes), given


def ideogram4() -> nn.Module:
    """Ideogram 4."""
    sizes = {"in_channels": 16, "num_layers": 2, "num_attention_heads": 6, "attention_head_dim": 16, "adaln_dim": 32}
    sizes |= {"intermediate_size": 128, "llm_features_dim": 48, "mrope_section": (4, 2, 2)}
    return build("comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel", **sizes)


def packed(**more: Any) -> dict[str, Any]:
    """A call of Ideogram 4."""
    return {"x": noise(2, 16, 5, 7), "timesteps": at(0.7, 0.7)} | more


@case("Ideogram 4, text mask")
def _() -> Case:
    return ideogram4(), packed(context=noise(2, 9, 48), attention_mask=text_mask(2, slice(3)))


case("Ideogram 4, without text")(lambda: (ideogram4(), packed()))


@case("JoyImage, two references")
def _() -> Case:
    sizes = {"in_channels": 16, "hidden_size": 96, "num_attention_heads": 6, "text_dim": 48, "num_layers": 2}
    sizes |= {"mlp_width_ratio": 2.0, "rope_dim_list": [4, 6, 6]}
    given = {"hidden_states": noise(2, 16, 1, 10, 14), "timestep": at(700, 700), "context": noise(2, 9, 48)}
    given |= {"ref_latents": [noise(2, 16, 1, 6, 8), noise(2, 16, 1, 4, 6)]}
    return build("comfy.ldm.joyimage.model.JoyImageTransformer3DModel", **sizes), given


@case("Lens, text mask, ControlNet")
def _() -> Case:
    """Text of 2 layers."""
    sizes = {"in_channels": 64, "out_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 6}
    sizes |= {"enc_hidden_dim": 24, "axes_dims_rope": (4, 6, 6), "selected_layer_index": (0, 1)}
    given = {"x": noise(2, 64, 5, 7), "timestep": at(0.7, 0.7), "context": noise(2, 9, 2 * 24)}
    given |= {"attention_mask": text_mask(2), "control": {"input": [noise(2, 35, 96), None]}}
    return build("comfy.ldm.lens.model.LensTransformer2DModel", **sizes), given


@case("Boogu, references")
def _() -> Case:
    """8 heads in 4 groups."""
    sizes = {"in_channels": 16, "hidden_size": 96, "num_layers": 2, "num_double_stream_layers": 2}
    sizes |= {"num_refiner_layers": 1, "num_attention_heads": 8, "num_kv_heads": 4, "multiple_of": 32}
    sizes |= {"axes_dim_rope": (4, 4, 4), "instruction_feat_dim": 48}
    given = {"x": noise(2, 16, 10, 14), "timesteps": at(0.7, 0.7), "context": noise(2, 9, 48), "num_tokens": 9}
    given |= {"ref_latents": [noise(2, 16, 6, 8), noise(2, 16, 4, 6)]}
    return build("comfy.ldm.boogu.model.BooguTransformer2DModel", **sizes), given


@case("Mage-Flow, reference, text mask, ControlNet")
def _() -> Case:
    sizes = {"in_channels": 16, "out_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 6}
    sizes |= {"joint_attention_dim": 48, "axes_dims_rope": (4, 6, 6)}
    there = text_mask(2)
    there[:, -1] = 0  # padding in both
    given = {"x": noise(2, 16, 5, 7), "timestep": at(0.7, 0.7), "context": noise(2, 9, 48), "attention_mask": there}
    given |= {"ref_latents": [noise(2, 16, 3, 4)], "control": {"input": [noise(2, 35, 96), None]}}
    return build("comfy.ldm.mage_flow.model.MageFlowTransformer2DModel", **sizes), given


@case("Anima, text through its adapter")
def _() -> Case:
    from comfy.ldm.anima.model import Anima

    model = build(PREDICT2, **COSMOS, extra_per_block_abs_pos_emb=False)
    model.__class__ = Anima  # whose own constructor makes an adapter of 130 million weights
    sizes = {"source_dim": 40, "target_dim": 48, "model_dim": 48, "num_layers": 1, "num_heads": 3}
    model.llm_adapter = build("comfy.ldm.anima.model.LLMAdapter", **sizes)
    given = {"x": noise(1, 16, 1, 10, 14), "timesteps": at(0.7), "context": noise(1, 9, 40)}
    return model, given | {"t5xxl_ids": torch.arange(7)[None], "t5xxl_weights": noise(1, 7, 1).abs()}
