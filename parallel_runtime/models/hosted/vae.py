"""ComfyUI's own VAE in a rank: its class found by `comfy.sd.VAE` from the weights alone, as ComfyUI's loader finds it.

Owns the making of the module. Does not own how its weights come (worker/vae.py), nor how a picture is cut into tiles,
which is ComfyUI's own code in the process that asks.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...checkpoint import ComfyUI
from .comfyui import import_comfyui


def build_vae(
    comfyui: ComfyUI,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    device: torch.device,
) -> torch.nn.Module:
    """The VAE that these weights are of, in `dtype`, in host memory: the very tensors, where they have that dtype.

    Raises `ValueError` for weights of none.
    """
    import_comfyui(comfyui, device)
    from comfy.sd import VAE

    with parameters_without_memory():
        module: torch.nn.Module | None = VAE(
            sd=dict(tensors), device=device, dtype=dtype, metadata=dict(metadata)
        ).first_stage_model
    if module is None:
        raise ValueError(f"ComfyUI finds no VAE in {len(tensors)} weights; choose another VAE")
    left = {name: each.dtype for name, each in module.state_dict().items() if each.is_meta}
    if lacking := sorted(set(left) - set(tensors)):
        raise ValueError(f"the weights of {type(module).__name__} lack {lacking[0]}; choose another VAE")
    module.load_state_dict({name: tensors[name].to(dtype) for name, dtype in left.items()}, strict=False, assign=True)
    return module


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are made meanwhile have their parameters on the meta device; their buffers are real.

    ComfyUI's loader copies weights into a module that has room for all of them: twice the size of MiniMax H3's 5 GB.
    """

    def without_memory(_: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> Any:  # noqa: ANN401 (torch: None)
        return torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no-op", category=UserWarning)  # a copy to the meta device
            yield
    finally:
        hook.remove()
