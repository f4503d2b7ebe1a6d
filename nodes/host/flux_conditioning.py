"""From the arguments of ComfyUI's Flux forward to the tensors of one step, checked before anything is sent.

Owns the names of the step's tensors; what is refused about their values is the adapter's. Rounds nothing: ComfyUI has
rounded these arguments to the compute dtype as it does for its own model, and each keeps the dtype that it came in.
Letters: `B` batch, `S_img` and `S_txt` image and text tokens, `C` channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...parallel_runtime.models.flux.config import FluxConfig
from ...parallel_runtime.models.flux.inputs import check_step

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
    zero_timestep: Sequence[
        tuple[int, int]
    ] = ()  # runs of image rows at timestep zero, whose timesteps follow the batch's


def step_tensors(
    given: ForwardArguments, config: FluxConfig
) -> tuple[dict[str, torch.Tensor], dict[str, list[int | None]]]:
    """The tensors and options of one call (`RunContext.step`).

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
