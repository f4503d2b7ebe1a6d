"""What one step of Flux.1 is given: made of the arguments of ComfyUI's forward, and checked before any rank sees it.

Owns the names, dtypes and shapes of a step's tensors, and what is refused about them. Making them rounds nothing:
ComfyUI has rounded these arguments as it does for its own model, and each keeps the dtype that it came in.
Letters: `B` batch, `S_img` and `S_txt` image and text tokens, `C` channels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .config import TIME_FACTOR, FluxConfig

RESIDUAL_SIDES = {"input": "control_in", "output": "control_out"}


@dataclass(frozen=True, kw_only=True)
class ForwardArguments:
    """What ComfyUI's Flux hands to the body of its forward. Shapes as in `step_tensors`, ids with a batch dimension."""

    img: torch.Tensor
    img_ids: torch.Tensor
    txt: torch.Tensor
    txt_ids: torch.Tensor
    timesteps: torch.Tensor
    y: torch.Tensor | None
    guidance: torch.Tensor | None
    control: Mapping[str, Sequence[torch.Tensor | None]] | None
    mask: torch.Tensor | None = None
    # Runs of image rows at timestep zero, whose timesteps follow the batch's.
    zero_timestep: Sequence[tuple[int, int]] = ()


def step_tensors(
    given: ForwardArguments, config: FluxConfig
) -> tuple[dict[str, torch.Tensor], dict[str, list[int | None]]]:
    """The tensors and options of one call (`RunContext.call`).

    img (B, S_img, C), txt (B, S_txt, context), y (B, vec), guidance (B,), timesteps (B,) fp32, img_ids (S_img, 3) and
    txt_ids (S_txt, 3) fp32, where there are any a mask (B or 1, S_txt + S_img, the same) and zero_timestep_rows
    (S_img,), and each distinct ControlNet residual once, as control_in.K / control_out.K (B, up to S_img, hidden); the
    options give for each block the K of its residual, or None.
    Raises `ValueError` for shapes and values the model cannot take.
    """
    batch = given.img.shape[0]
    y = given.y
    if y is None:
        y = torch.zeros((batch, config.vec_dim), device=given.img.device, dtype=given.img.dtype)
    tensors = {
        "img": given.img,
        "txt": given.txt,
        "y": y[:, : config.vec_dim],
        "timesteps": given.timesteps[:batch].float(),  # never less: rounded to bf16 a call is 0.9 to 6 % off
        "img_ids": given.img_ids[0].float(),  # ComfyUI repeats one image's ids over the batch
        "txt_ids": given.txt_ids[0].float(),
    }
    if config.guidance and given.guidance is not None:
        tensors["guidance"] = given.guidance.expand(batch)
    if given.mask is not None:
        tensors["mask"] = _square(given.mask)
    if given.zero_timestep:
        tensors["zero_timestep_rows"] = torch.zeros(given.img.shape[1], dtype=torch.uint8)
        for start, stop in given.zero_timestep:
            tensors["zero_timestep_rows"][start:stop] = 1
    options = {}
    depths = {"input": config.depth, "output": config.depth_single}
    for side, name in RESIDUAL_SIDES.items():
        residuals = (given.control or {}).get(side) or []
        distinct, uses = _distinct(residuals[: depths[side]])
        for number, residual in enumerate(distinct):
            tensors[f"{name}.{number}"] = residual.expand(batch, -1, -1)
        if distinct:
            options[name] = uses + [None] * (depths[side] - len(uses))
    check_step(config, tensors)
    return tensors, options


def _square(mask: torch.Tensor) -> torch.Tensor:
    """A mask as torch's attention takes it, (S, S), (B, S, S) or (B, 1, S, S), to (B or 1, S, S)."""
    if mask.ndim == 4 and mask.shape[1] == 1:
        return mask[:, 0]
    return mask[None] if mask.ndim == 2 else mask


def _distinct(residuals: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[int | None]]:
    """Each residual once, and for each block which. ControlNets repeat one tensor over several blocks.

    Identity is enough, and safe: all of them are alive in this list, so no address can have been used twice.
    """
    numbers: dict[int, int] = {}
    distinct: list[torch.Tensor] = []
    uses: list[int | None] = []
    for residual in residuals:
        if residual is None:
            uses.append(None)
            continue
        if id(residual) not in numbers:
            numbers[id(residual)] = len(distinct)
            distinct.append(residual)
        uses.append(numbers[id(residual)])
    return distinct, uses


def check_step(config: FluxConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Hold a step's tensors against the model. Raises `ValueError` naming the tensor, its value and the limit.

    img (B, S_img, in channels), txt (B, S_txt, context), y (B, vec), timesteps and guidance (B,), img_ids (S_img, 3),
    txt_ids (S_txt, 3); optional are mask (B or 1, S_txt + S_img, the same), added to attention's scores or bool,
    zero_timestep_rows (S_img,) uint8, 1 for rows at timestep zero, control_in.K and control_out.K (B, at most S_img,
    hidden).
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
        "zero_timestep_rows": (image_tokens,),
    }
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, this step needs {list(shape)}")
    _check_mask(tensors.get("mask"), batch=batch, tokens=text_tokens + image_tokens)
    for name, tensor in tensors.items():
        _check_residual(config, name, tensor, batch=batch, image_tokens=image_tokens)
        _check_finite(name, tensor)
    if "guidance" in tensors:
        _check_guidance(tensors["guidance"])


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


def _check_guidance(guidance: torch.Tensor) -> None:
    """The model takes the guidance times a thousand, in the guidance's own dtype."""
    if torch.isfinite(guidance * TIME_FACTOR).all():
        return
    value, limits = float(guidance[guidance.abs().argmax()]), torch.finfo(guidance.dtype)
    if math.isnan(value):
        raise ValueError("guidance=nan is no number; look at the node that set it (FluxGuidance, for one)")
    raise ValueError(
        f"guidance={value:g} times {TIME_FACTOR:g} is more than {str(guidance.dtype).removeprefix('torch.')} holds; "
        f"use a guidance of at most {limits.max / TIME_FACTOR:.4g}, or compute in bfloat16"
    )


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or name in ("mask", "guidance"):  # a mask may well be minus infinity
        return
    broken = int((~torch.isfinite(tensor)).sum())
    if broken:
        raise ValueError(
            f"{name} holds {broken} values that are NaN or infinite, of {tensor.numel()}; "
            "look at the node that made it (a VAE encode in fp16 is the usual one)"
        )
