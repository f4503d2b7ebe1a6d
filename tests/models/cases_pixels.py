"""PixelDiT, PiD, Z-Image in pixel space: 35 patches."""

from typing import Any

from torch import nn

from .cases_images import Z_IMAGE, described
from .tiny import Case, at, build, case, noise, takes

PIXELDIT = {"in_channels": 3, "num_groups": 6, "hidden_size": 96, "pixel_hidden_size": 8, "pixel_num_groups": 3}
PIXELDIT |= {"pixel_attn_hidden_size": 48, "patch_depth": 4, "pixel_depth": 2, "patch_size": 4, "txt_embed_dim": 48}


def with_strong_patches(model: nn.Module) -> nn.Module:
    """The model, whose output depends more on what its blocks say of a patch than on the patch's own pixels."""
    for name, weight in model.named_parameters():
        if "adaLN" in name:
            weight.mul_(4)
    return model


def pixels(batch: int = 2, **more: Any) -> dict[str, Any]:
    """A call of PixelDiT: an image whose sides the patches do not divide."""
    given = {"x": noise(batch, 3, 19, 27), "timesteps": at(*[700] * batch), "context": noise(batch, 9, 48)}
    return given | more


@case("PixelDiT")
def _() -> Case:
    return with_strong_patches(build("comfy.ldm.pixeldit.model.PixDiT_T2I", **PIXELDIT, txt_max_length=9)), pixels()


@case("PiD")
def _() -> Case:
    sizes = PIXELDIT | {"txt_max_length": 9, "lq_latent_channels": 16, "lq_hidden_dim": 32, "lq_num_res_blocks": 1}
    sizes |= {"pit_lq_inject": True} if takes("comfy.ldm.pixeldit.pid.PidNet", "pit_lq_inject") else {}
    model = build("comfy.ldm.pixeldit.pid.PidNet", **sizes, lq_interval=2)
    return with_strong_patches(model), pixels(lq_latent=noise(2, 16, 3, 4), degrade_sigma=at(0.1, 0.3))


@case("Z-Image in pixel space")
def _() -> Case:
    sizes = {"patch_size": 2, "in_channels": 3, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 6, "n_kv_heads": 6}
    sizes |= {"qk_norm": True, "cap_feat_dim": 48, "axes_lens": [64] * 3, "rope_theta": 256.0, "multiple_of": 32}
    sizes |= {"ffn_dim_multiplier": 2.0, "decoder_hidden_size": 64, "decoder_num_res_blocks": 2}
    model = build("comfy.ldm.lumina.model.NextDiTPixelSpace", **sizes, **Z_IMAGE)
    return model, described(x=noise(2, 3, 10, 14))
