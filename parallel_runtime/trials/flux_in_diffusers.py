"""Flux.1 in unmodified diffusers: `FluxTransformer2DModel.forward`, given the calls that ComfyUI makes of its class.

Shares no code with the ranks, on purpose: not the names, not the sizes, not the loader. It takes a call as ComfyUI
rounded it, so a half-precision one differs from fp32 by its arithmetic alone. The one thing done differently from stock
diffusers is documented at `_KeepTimes`. Letters: `B` batch, `C` channels, `S` tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open

from ..model_call import ModelCall
from ..models.hosted.calls import from_tree

PATCH = 2
KNOWN = {"x", "timestep", "context", "y", "guidance", "control", "transformer_options"}

_OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
_DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}
_DOUBLE_NORMS: Mapping[str, tuple[str, ...]] = {
    "img_attn.norm": ("norm_q", "norm_k"),
    "txt_attn.norm": ("norm_added_q", "norm_added_k"),
}
_DOUBLE_QKV: Mapping[str, tuple[str, ...]] = {
    "img_attn.qkv": ("to_q", "to_k", "to_v"),
    "txt_attn.qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}


class _KeepTimes(torch.nn.Module):
    """diffusers rounds timestep and guidance to the model's dtype before their sinusoids; this keeps them as given.

    Each is multiplied by a thousand in its own dtype, as in ComfyUI: the timestep comes in fp32, the guidance rounded.
    Nothing changes where all is fp32. In bf16 a rounded timestep alone is an error of 0.9 to 6 % a call.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.given: tuple[torch.Tensor, ...] = ()  # the timestep and, where the model takes one, the guidance

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        exact = [(each * 1000).float() for each in self.given]
        return self.inner(*exact, *arguments[len(exact) :])


class FluxInDiffusers:
    """The model of one file, computing in `dtype`.

    `scale_dtype`: what the scales of fp8 weights are rounded to, as ComfyUI on a CPU rounds them to the dtype that it
    computes in.
    """

    def __init__(self, path: str, *, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
        tensors = _read(path, scale_dtype)
        with torch.device("meta"):
            self.model = FluxTransformer2DModel(**_config(tensors))
        converted = {name: value.to(dtype) for name, value in to_diffusers(tensors).items()}
        self.model.load_state_dict(converted, strict=True, assign=True)
        self.model.eval().requires_grad_(False)
        # its buffers were made on meta; the rotary module holds none, only numbers
        self._times = _KeepTimes(self.model.time_text_embed)
        self.model.time_text_embed = self._times
        self.dtype = dtype

    @torch.inference_mode()
    def __call__(self, call: ModelCall) -> torch.Tensor:
        """The velocity (B, numbers of the latent) fp32 of a call of ComfyUI's `Flux`.

        Raises `ValueError` for one that has more than latent, timestep, text and guidance: references are not
        converted.
        """
        tree: Any = from_tree(call.options["call"], [call.tensors[f"t{n}"] for n in range(len(call.tensors))])
        given = {
            **dict(zip(("x", "timestep", "context", "y", "guidance"), tree["args"], strict=False)),
            **tree["kwargs"],
        }
        unknown = sorted(name for name, value in given.items() if name not in KNOWN and value is not None)
        if unknown:
            raise ValueError(f"--against diffusers takes no {', '.join(unknown)}; leave --against out")
        x = given["x"]  # (B, C, height, width)
        height, width = x.shape[2:]
        padded = torch.nn.functional.pad(x, (0, width % PATCH, 0, height % PATCH), mode="circular")
        rows, columns = (side // PATCH for side in padded.shape[2:])
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1] = torch.arange(rows)[:, None]
        ids[..., 2] = torch.arange(columns)[None]
        guidance = given.get("guidance") if self.model.config.guidance_embeds else None
        self._times.given = (given["timestep"],) if guidance is None else (given["timestep"], guidance)
        out = self.model(
            hidden_states=_to_tokens(padded).to(self.dtype),
            encoder_hidden_states=given["context"].to(self.dtype),
            pooled_projections=given["y"].to(self.dtype),
            timestep=given["timestep"],
            img_ids=ids.reshape(-1, 3),
            txt_ids=torch.zeros(given["context"].shape[1], 3),
            guidance=guidance,
            return_dict=False,
        )[0]
        return _to_latent(out, rows, columns)[..., :height, :width].float().flatten(1)


def _to_tokens(latent: torch.Tensor) -> torch.Tensor:
    """(B, C, height, width) to (B, S, 4 C): squares of two by two, channel by channel."""
    batch, channels, height, width = latent.shape
    squares = latent.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _to_latent(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The way back."""
    squares = tokens.reshape(tokens.shape[0], rows, columns, -1, PATCH, PATCH)
    return squares.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def to_diffusers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Original (BFL) names and fused matrices to diffusers' names and split ones. For any hidden size."""
    out: dict[str, torch.Tensor] = {}
    for comfy, theirs in _OUTSIDE.items():
        if f"{comfy}.weight" in tensors:
            _copy(out, tensors, comfy, theirs)
    for end in ("weight", "bias"):
        # diffusers wants scale before shift, the file has shift first
        shift, scale = tensors[f"final_layer.adaLN_modulation.1.{end}"].chunk(2)
        out[f"norm_out.linear.{end}"] = torch.cat((scale, shift))
    for block in range(_blocks(tensors, "double_blocks")):
        _double(out, tensors, f"double_blocks.{block}.", f"transformer_blocks.{block}.")
    for block in range(_blocks(tensors, "single_blocks")):
        _single(out, tensors, f"single_blocks.{block}.", f"single_transformer_blocks.{block}.")
    return out


def _double(out: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], source: str, target: str) -> None:
    for comfy, theirs in _DOUBLE.items():
        _copy(out, tensors, source + comfy, target + theirs)
    for comfy, names in _DOUBLE_QKV.items():
        for end in ("weight", "bias"):
            for name, part in zip(names, tensors[f"{source}{comfy}.{end}"].chunk(3), strict=True):
                out[f"{target}attn.{name}.{end}"] = part
    for comfy, names in _DOUBLE_NORMS.items():
        for name, kind in zip(names, ("query_norm", "key_norm"), strict=True):
            out[f"{target}attn.{name}.weight"] = _norm(tensors, f"{source}{comfy}.{kind}")


def _single(out: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], source: str, target: str) -> None:
    _copy(out, tensors, f"{source}linear2", f"{target}proj_out")
    _copy(out, tensors, f"{source}modulation.lin", f"{target}norm.linear")
    hidden = tensors[f"{source}linear2.weight"].shape[0]
    for end in ("weight", "bias"):
        fused = tensors[f"{source}linear1.{end}"]
        q, k, v, mlp = fused.split((hidden, hidden, hidden, fused.shape[0] - 3 * hidden))
        names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        out.update({f"{target}{name}.{end}": part for name, part in zip(names, (q, k, v, mlp), strict=True)})
    for name, kind in (("norm_q", "query_norm"), ("norm_k", "key_norm")):
        out[f"{target}attn.{name}.weight"] = _norm(tensors, f"{source}norm.{kind}")


def _copy(out: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], comfy: str, theirs: str) -> None:
    for end in ("weight", "bias"):
        out[f"{theirs}.{end}"] = tensors[f"{comfy}.{end}"]


def _norm(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[f"{name}.scale"] if f"{name}.scale" in tensors else tensors[f"{name}.weight"]


def _blocks(tensors: Mapping[str, torch.Tensor], kind: str) -> int:
    return 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith(f"{kind}.")), default=-1)


def _read(path: str, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        start = next(name for name in names if name.endswith("img_in.weight"))[: -len("img_in.weight")]
        tensors = {name[len(start) :]: file.get_tensor(name) for name in names if name.startswith(start)}
    for suffix in (".weight_scale", ".scale_weight"):  # of matrices in fp8, as ComfyUI names them now and did before
        for name in [name for name in tensors if name.endswith(suffix)]:
            weight = name.removesuffix(suffix) + ".weight"
            tensors[weight] = tensors[weight].float() * tensors[name].to(scale_dtype).float()
    return tensors


def _config(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    hidden, channels = tensors["img_in.weight"].shape
    head = _norm(tensors, "double_blocks.0.img_attn.norm.query_norm").shape[0]
    return {
        "patch_size": 1,
        "in_channels": channels,
        "out_channels": tensors["final_layer.linear.weight"].shape[0],
        "num_layers": _blocks(tensors, "double_blocks"),
        "num_single_layers": _blocks(tensors, "single_blocks"),
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": tensors["txt_in.weight"].shape[1],
        "pooled_projection_dim": tensors["vector_in.in_layer.weight"].shape[1],
        "guidance_embeds": "guidance_in.in_layer.weight" in tensors,
        "axes_dims_rope": (head // 8, 7 * head // 16, 7 * head // 16),
    }
