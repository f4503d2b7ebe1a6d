"""What one step of Flux.1 must be given: names, shapes and values, checked before any rank sees them.

Owns the refusals of a step. Reads shapes and looks for values that are not finite; changes nothing.
"""

from collections.abc import Mapping

import torch

from ..plan import ParallelPlan, heads_error, stages_error
from .flux_config import FluxConfig


def check_plan(config: FluxConfig, plan: ParallelPlan) -> None:
    """Raise `ValueError` when the plan cannot split this model."""
    reason = heads_error(plan.ulysses, config.num_heads) or stages_error(
        plan.pipefusion, config.depth + config.depth_single
    )
    if reason is not None:
        raise ValueError(reason)


def check_step(config: FluxConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Hold a step's tensors against the model. Raises `ValueError` naming the tensor, its value and the limit.

    img (B, S_img, in channels), txt (B, S_txt, context), y (B, vec), timesteps and guidance (B,), img_ids (S_img, 3),
    txt_ids (S_txt, 3); optional are mask (B or 1, S_txt + S_img, the same), added to attention's scores or bool,
    still_rows (S_img,) uint8, 1 for rows at timestep zero, control_in.K and control_out.K (B, at most S_img, hidden).
    """
    for name in ("img", "txt", "y", "timesteps", "img_ids", "txt_ids"):
        if name not in tensors:
            raise ValueError(f"{name} is missing from the step; send img, txt, y, timesteps, img_ids and txt_ids")
    img, txt = tensors["img"], tensors["txt"]
    if img.ndim != 3 or txt.ndim != 3:
        raise ValueError(f"img has shape {list(img.shape)} and txt {list(txt.shape)}; both need (batch, tokens, width)")
    batch, image_tokens, text_tokens = img.shape[0], img.shape[1], txt.shape[1]
    if batch < 1 or image_tokens < 1:
        raise ValueError(f"the latent has shape {list(img.shape)}; use at least one image of one token")
    if text_tokens < 1:
        raise ValueError("the conditioning is empty (0 text tokens); connect a text encoder, an empty prompt will do")
    _check_channels(config, img, txt)
    expected = {
        "y": (batch, config.vec_dim),
        "txt": (batch, text_tokens, config.context_dim),
        "timesteps": (batch,),
        "guidance": (batch,),
        "img_ids": (image_tokens, 3),
        "txt_ids": (text_tokens, 3),
        "still_rows": (image_tokens,),
    }
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, this step needs {list(shape)}")
    _check_mask(tensors.get("mask"), batch=batch, tokens=text_tokens + image_tokens)
    for name, tensor in tensors.items():
        _check_residual(config, name, tensor, batch=batch, image_tokens=image_tokens)
        _check_finite(name, tensor)


def _check_channels(config: FluxConfig, img: torch.Tensor, txt: torch.Tensor) -> None:
    if img.shape[2] != config.in_channels:
        raise ValueError(
            f"the latent has {img.shape[2]} channels after patching, this model takes {config.in_channels}; "
            "use a Flux latent (16 channels; Fill also needs inpaint conditioning)"
        )
    if txt.shape[2] != config.context_dim:
        raise ValueError(
            f"the conditioning is {txt.shape[2]} wide, this model takes {config.context_dim}; "
            "use the text encoders that belong to it"
        )


def _check_mask(mask: torch.Tensor | None, *, batch: int, tokens: int) -> None:
    if mask is None:
        return
    if mask.ndim != 3 or mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != (tokens, tokens):
        raise ValueError(
            f"the attention mask has shape {list(mask.shape)}, this step needs {[batch, tokens, tokens]}; "
            "use a mask over the text and image tokens of this latent"
        )


def _check_residual(config: FluxConfig, name: str, tensor: torch.Tensor, *, batch: int, image_tokens: int) -> None:
    if not name.startswith(("control_in.", "control_out.")):
        return
    shape = tuple(tensor.shape)
    if len(shape) != 3 or shape[0] != batch or shape[1] > image_tokens or shape[2] != config.hidden_size:
        raise ValueError(
            f"{name} has shape {list(shape)}, this step takes at most {[batch, image_tokens, config.hidden_size]}; "
            "use a ControlNet made for this model"
        )


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or name == "mask":  # a mask may well be minus infinity
        return
    broken = int((~torch.isfinite(tensor)).sum())
    if broken:
        raise ValueError(
            f"{name} holds {broken} values that are NaN or infinite, of {tensor.numel()}; "
            "look at the node that made it (a VAE encode in fp16 is the usual one)"
        )
