"""What decides how this process's ComfyUI computes: its options, and what ComfyUI has made of them.

Read in ComfyUI's own process by a custom node, and in a rank by an engine; neither imports the other's code.
"""

from typing import Any

import torch

from parallel_runtime.models.hosted.options import Options, read_options
from parallel_runtime.packages import imported_packages
from parallel_runtime.torch_flags import read_flags

# Of comfy.model_management: functions of nothing, and of the device that it computes on.
ANSWERS = (
    *("sage_attention_enabled", "flash_attention_enabled", "ck_attention_enabled", "xformers_enabled"),
    *("pytorch_attention_enabled", "force_upcast_attention_dtype", "force_channels_last", "intermediate_dtype"),
)
ANSWERS_OF_DEVICE = (
    *("should_use_fp16", "should_use_bf16", "supports_fp8_compute", "vae_dtype", "text_encoder_dtype"),
    *("unet_dtype", "supports_cast_dtypes"),
)


def options() -> Options:
    """Those of this process, as ranks get them."""
    import comfy.cli_args

    return read_options(comfy.cli_args.parser, comfy.cli_args.args)


def values() -> dict[str, str]:
    """The value of every option, by the name of its value."""
    import comfy.cli_args

    return {name: _told(value) for name, value in vars(comfy.cli_args.args).items()}


def _of_comfyui(function: Any) -> Any:
    """ComfyUI's attention function, also where a rank has put its own in its place."""
    return function.kernel.stock if hasattr(function, "kernel") else function


def states() -> dict[str, Any]:
    """What ComfyUI and torch were made to do by options. Names that this ComfyUI lacks are left out."""
    import comfy.ldm.modules.attention as attention
    import comfy.memory_management
    import comfy.model_management as management
    import comfy.model_patcher
    import comfy_kitchen

    device = management.get_torch_device()
    function = attention.optimized_attention
    masked = attention.optimized_attention_masked
    found = {
        "attention": _of_comfyui(function).__name__,
        "masked attention": _of_comfyui(masked).__name__,
        "attention's precision": str(attention.get_attn_precision(torch.float16, torch.float16)),
        "kitchen": _told({name: str(each) for name, each in comfy_kitchen.list_backends().items()}),
        "dynamic VRAM": comfy.memory_management.aimdo_enabled,
        "patcher": comfy.model_patcher.CoreModelPatcher.__name__,
        "fp8": str(management.SUPPORT_FP8_OPS),
        "default dtype": str(torch.get_default_dtype()),
        "packages": [
            list(each) for each in imported_packages() if each.name in ("torch", "comfy_kitchen", "comfy_aimdo")
        ],
        "flags": read_flags(),
    }
    for name in ANSWERS:
        if hasattr(management, name):
            found[name] = str(getattr(management, name)())
    for name in ANSWERS_OF_DEVICE:
        if hasattr(management, name):
            found[name] = str(getattr(management, name)(device))
    return found


def _told(value: Any) -> str:
    if isinstance(value, set):
        return f"set of {sorted(map(str, value))}"
    return str(sorted(value.items()) if isinstance(value, dict) else value)
