"""Wan 2.1 and 2.2: a frame of 10 x 14 latents is 35 tokens, three of them 105."""

from typing import Any

from torch import nn

from .tiny import Case, at, build, case, noise

VIDEO = (16, 3, 10, 14)


def wan(path: str = "WanModel", **config: Any) -> nn.Module:
    """Wan, 3 blocks of 6 heads."""
    sizes = {"dim": 96, "ffn_dim": 192, "freq_dim": 32, "text_dim": 48, "in_dim": 16, "out_dim": 16, "num_heads": 6}
    return build(
        f"comfy.ldm.wan.{path if '.' in path else f'model.{path}'}",
        **{"model_type": "t2v", "num_layers": 2, "text_len": 9} | sizes | config,
    )


def clip(channels: int = 16, *, frames: int = 3, size: tuple[int, int] = (10, 14), **more: Any) -> dict[str, Any]:
    """A call."""
    return {"x": noise(1, channels, frames, *size), "timestep": at(700), "context": noise(1, 9, 48)} | more


def seen(channels: int, **more: Any) -> dict[str, Any]:
    """A call with what CLIP vision sees in a picture."""
    return clip(channels, clip_fea=noise(1, 257, 1280), **more)


BY_FRAME = {"timestep": at(0, 700, 650)[None]}
case("Wan t2v")(lambda: (wan(), {"x": noise(2, *VIDEO), "timestep": at(700, 700), "context": noise(2, 9, 48)}))
case("Wan i2v")(lambda: (wan(model_type="i2v", in_dim=36), seen(36)))
case("Wan 5B, a timestep for each frame")(lambda: (wan(), clip() | BY_FRAME))


@case("Wan 5B, a timestep for each frame, and a reference")
def _() -> Case:
    return wan(in_dim_ref_conv=16), clip(reference_latent=noise(1, 16, 10, 14)) | BY_FRAME


@case("Wan Fun, references")
def _() -> Case:
    references = {"reference_latent": noise(1, 16, 10, 14), "context_latents": [noise(1, 16, 1, 6, 8)]}
    return wan(in_dim_ref_conv=16), clip(**references)


@case("Wan camera")
def _() -> Case:
    model = wan("CameraWanModel", model_type="camera", in_dim=32)
    return model, seen(32, camera_conditions=noise(1, 24, 3, 80, 112) * 0.05)


@case("Wan VACE, two contexts")
def _() -> Case:
    model = wan("VaceWanModel", model_type="vace", num_layers=4, vace_layers=2, vace_in_dim=96)
    return model, clip(vace_context=noise(1, 2, 96, *VIDEO[1:]), vace_strength=[1.0, 0.5])


@case("Wan S2V, poses, motion before")
def _() -> Case:
    model = wan("WanModel_S2V", model_type="s2v", audio_dim=24, num_layers=3, audio_inject_layers=[0, 2])
    given = {"control_video": noise(1, *VIDEO), "audio_embed": noise(1, 25, 24, 12)}
    given |= {"reference_latent": noise(1, 16, 1, 10, 14), "reference_motion": noise(1, 16, 19, 10, 14)}
    return model, clip(**given)


@case("Wan HuMo, reference, audio by frames")
def _() -> Case:
    given = clip(audio_embed=noise(1, 3, 8, 5, 1280), reference_latent=noise(1, 16, 1, 10, 14))
    return wan("HumoWanModel", model_type="humo"), given


@case("Wan Animate, poses, faces")
def _() -> Case:
    model = wan("model_animate.AnimateWanModel", model_type="animate", num_layers=5, in_dim=36)
    convolutions = model.motion_encoder.enc.net_app.convs
    del convolutions[5:8]  # faces of 64 pixels, not 512: what sees them is the same on every rank, and slow
    return model, seen(36, pose_latents=noise(1, 16, 2, 10, 14), face_pixel_values=noise(1, 3, 5, 64, 64))


def scail(path: str, **more: Any) -> Case:
    """SCAIL: a pose of half the size beside the video, and references before it."""
    return wan(path, model_type="scail", in_dim=20), seen(20, pose_latents=noise(1, 20, 3, 5, 7), **more)


case("Wan SCAIL, pose, reference")(lambda: scail("SCAILWanModel", reference_latent=noise(1, 20, 1, 10, 14)))


@case("Wan SCAIL-2, two references, masks, replacing")
def _() -> Case:
    masks = {"ref_mask_latents": noise(1, 28, 5, 10, 14), "sam_latents": noise(1, 28, 3, 5, 7)}
    return scail("SCAIL2WanModel", reference_latent=noise(1, 20, 2, 10, 14), ref_mask_flag=False, **masks)


@case("WanDancer, music, 15 frames a second, another picture")
def _() -> Case:
    """2 frames of 8 groups of 5 tokens."""
    model = wan("model_wandancer.WanDancerModel", model_type="wandancer", num_layers=3, audio_inject_layers=[0, 2])
    music = {"audio_embed": noise(1, 11, 35), "fps": 15.0, "audio_inject_scale": 0.5}
    return model, seen(16, frames=2, size=(10, 16), clip_fea_ref=noise(1, 257, 1280), **music)


ANIMATE2 = ("comfy.ldm.wan.model_animate2", "class WanAnimate2Model")


def animate2(height: int, width: int, **more: Any) -> Case:
    """Wan-Animate 2: a reference and two frames of 5 x 7 tokens, which a video of two frames drives."""
    model = wan("model_animate2.WanAnimate2Model", model_type="animate2", in_dim=36)
    return model, seen(36, size=(height, width), **more)


case("Wan-Animate 2, pose", of=ANIMATE2)(lambda: animate2(10, 14, pose_latents=noise(1, 16, 2, 10, 14)))


@case("Wan-Animate 2, upright, another picture and prompt for the pose, strengths", of=ANIMATE2)
def _() -> Case:
    pose = {"pose_latents": noise(1, 16, 2, 13, 10), "clip_fea_pose": noise(1, 257, 1280) * 0.5}
    pose |= {"context_pose": noise(1, 7, 48), "pose_strength": 0.6, "reference_strength": 1.5}
    return animate2(13, 10, **pose)


case("Wan-Animate 2, a step without pose", of=ANIMATE2)(lambda: animate2(10, 14))
case("Wan-Animate 2, 3 rows of tokens", of=ANIMATE2)(lambda: animate2(6, 4, pose_latents=noise(1, 16, 2, 6, 4)))
case("Wan causal, a whole video")(lambda: (wan("ar_model.CausalWanModel"), clip()))
