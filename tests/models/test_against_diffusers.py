"""ComfyUI's classes, over ranks, beside unmodified diffusers: Wan and Qwen-Image, weights carried over by a map here.

Flux.1's is trials/flux_in_diffusers.py, which users have too. Sizes are even: with an odd number of rows of tokens
diffusers counts positions of Qwen-Image from another middle.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from safetensors.torch import load_file

from families.files import write_model_files
from families.variants import FILES
from host.fetch import comfyui_path
from parallel_runtime.devices import parse_devices
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.calls import from_tree
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

pytestmark = [pytest.mark.slow, pytest.mark.full]

Weights = Mapping[str, torch.Tensor]
PLAN, TEXT = ParallelPlan(ulysses=2), 13
WAN_NAMES = (
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.head\.", "proj_out."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"\.modulation$", ".scale_shift_table"),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.([qkv])\.(weight|bias)$", r".to_\1.\2"),
    (r"\.o\.(weight|bias)$", r".to_out.0.\1"),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)


def wan(sizes: Mapping[str, Any], weights: Weights) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """diffusers' Wan with a file's weights, as a function of ComfyUI's call."""
    from diffusers import WanTransformer3DModel  # 4 s

    carried = {}
    for name, value in weights.items():
        for pattern, theirs in WAN_NAMES:
            name = re.sub(pattern, theirs, name)
        carried[name] = value
    heads = sizes["num_heads"]
    model = WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=sizes["dim"] // heads,
        text_dim=sizes["text_dim"],
        freq_dim=sizes["freq_dim"],
        ffn_dim=sizes["ffn_dim"],
        num_layers=sizes["num_layers"],
    )
    model.load_state_dict(carried, strict=True)
    return lambda call: model(call["x"], call["timestep"], call["context"], return_dict=False)[0]


def qwen(sizes: Mapping[str, Any], weights: Weights) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """diffusers' Qwen-Image with a file's weights, whose names are diffusers' own."""
    from diffusers import QwenImageTransformer2DModel  # 4 s

    names = ("in_channels", "out_channels", "num_layers", "attention_head_dim", "num_attention_heads")
    names += ("joint_attention_dim", "axes_dims_rope")
    model = QwenImageTransformer2DModel(**{name: sizes[name] for name in names if name in sizes})
    model.load_state_dict(dict(weights), strict=True)

    def run(call: Mapping[str, Any]) -> torch.Tensor:
        x = call["x"]  # (B, C, 1, height, width)
        batch, channels, _, height, width = x.shape
        rows, columns = height // 2, width // 2
        squares = x.reshape(batch, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
        out = model(
            squares.reshape(batch, rows * columns, 4 * channels),
            encoder_hidden_states=call["context"],
            timestep=call["timestep"],
            img_shapes=[[(1, rows, columns)]] * batch,
            return_dict=False,
        )[0]
        return out.reshape(batch, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)

    return run


MODELS = {"tiny_wan_t2v.safetensors": wan, "tiny_qwen_image.safetensors": qwen}


def arguments_of(call: ModelCall) -> dict[str, Any]:
    """The call as ComfyUI's class is given it."""
    tree: Any = from_tree(call.options["call"], [call.tensors[f"t{number}"] for number in range(len(call.tensors))])
    return dict(zip(("x", "timestep", "context"), tree["args"], strict=False)) | tree["kwargs"]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_what_diffusers_computes_and_one_weight_left_out_is_seen(name: str, tmp_path: Path) -> None:
    file, devices = FILES[name], parse_devices("cpu:2").devices
    write_model_files(tmp_path, [file])
    size = Workload(width=128, height=96, text_tokens=TEXT, frames=5 if name.startswith("tiny_wan") else None)
    given = {"steps": 1, "comfyui": str(comfyui_path()), "device": devices[0]}
    with closing(Trial(str(tmp_path / name), "float32", size, [PLAN], **given)) as trial, Pool(devices) as pool:
        (ours,) = trial.results(PlanRunner(pool, trial.spec, PLAN, options={}).run)
        call, weights = arguments_of(trial.calls[0]), load_file(tmp_path / name)
    with torch.inference_mode():
        theirs = MODELS[name](file.arguments, weights)(call)
        left_out = next(each for each in weights if each.startswith(("blocks.1.", "transformer_blocks.1.")))
        wrong = MODELS[name](file.arguments, {**weights, left_out: torch.zeros_like(weights[left_out])})(call)
    assert 0 < relative_error(ours, theirs.flatten(1)) <= ROUNDING
    assert relative_error(ours, wrong.flatten(1)) > 100 * ROUNDING
