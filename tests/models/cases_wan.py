"""Wan 2.1 and 2.2: a frame of 10 x 14 latents is 35 tokens, three of them 105."""

from __future__ import annotations

from typing import Any

from torch import nn

from .tiny import Case, at, build, case, noise

VIDEO = (16, 3, 10, 14)


def wan(path: str = "WanModel", **config: Any) -> nn.Module:
    """Wan, 3 blocks of 6 heads."""
    sizes = {"dim": 96, "ffn_dim": 192, "freq_dim": 32, "text_dim": 48, "in_dim": 16, "out_dim": 16, "num_heads": 6}
    return build(
        f"comfy.ldm.wan.model.{path}", **{"model_type": "t2v", "num_layers": 2, "text_len": 9} | sizes | config
    )


@case("Wan t2v")
def _() -> Case:
    return wan(), {"x": noise(2, *VIDEO), "timestep": at(700, 700), "context": noise(2, 9, 48)}


@case("Wan t2v, 4 heads")
def _() -> Case:
    return wan(num_heads=4), {"x": noise(1, *VIDEO), "timestep": at(700), "context": noise(1, 9, 48)}


@case("Wan i2v")
def _() -> Case:
    inputs = {"x": noise(1, 36, *VIDEO[1:]), "timestep": at(700), "context": noise(1, 9, 48)}
    return wan(model_type="i2v", in_dim=36), inputs | {"clip_fea": noise(1, 257, 1280)}


@case("Wan 5B, a timestep for each frame")
def _() -> Case:
    return wan(), {"x": noise(1, *VIDEO), "timestep": at(0, 700, 650)[None], "context": noise(1, 9, 48)}


@case("Wan 5B, a timestep for each frame, and a reference")
def _() -> Case:
    inputs = {"x": noise(1, *VIDEO), "timestep": at(0, 700, 650)[None], "context": noise(1, 9, 48)}
    return wan(in_dim_ref_conv=16), inputs | {"reference_latent": noise(1, 16, 10, 14)}


@case("Wan Fun, references")
def _() -> Case:
    inputs = {"x": noise(1, *VIDEO), "timestep": at(700), "context": noise(1, 9, 48)}
    references = {"reference_latent": noise(1, 16, 10, 14), "context_latents": [noise(1, 16, 1, 6, 8)]}
    return wan(in_dim_ref_conv=16), inputs | references


@case("Wan camera")
def _() -> Case:
    inputs = {"x": noise(1, 32, *VIDEO[1:]), "timestep": at(700), "context": noise(1, 9, 48)}
    model = wan("CameraWanModel", model_type="camera", in_dim=32)
    return model, inputs | {"clip_fea": noise(1, 257, 1280), "camera_conditions": noise(1, 24, 3, 80, 112) * 0.05}


@case("Wan VACE, two contexts")
def _() -> Case:
    model = wan("VaceWanModel", model_type="vace", num_layers=4, vace_layers=2, vace_in_dim=96)
    inputs = {"x": noise(1, *VIDEO), "timestep": at(700), "context": noise(1, 9, 48)}
    return model, inputs | {"vace_context": noise(1, 2, 96, *VIDEO[1:]), "vace_strength": [1.0, 0.5]}


@case("Wan S2V")
def _() -> Case:
    model = wan("WanModel_S2V", model_type="s2v", audio_dim=24, num_layers=4, audio_inject_layers=[0, 2])
    inputs = {"x": noise(1, *VIDEO), "timestep": at(700), "context": noise(1, 9, 48)}
    return model, inputs | {"audio_embed": noise(1, 25, 24, 12), "reference_latent": noise(1, 16, 1, 10, 14)}
