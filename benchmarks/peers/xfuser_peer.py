"""xfuser (xDiT): its Flux wrapper with its unified sequence parallelism, Ulysses or ring.

What CPU torch needs is changed in this process only: xfuser makes its Ulysses and ring groups on a GPU alone, and its
flash kernel has no CPU version under that name. On a GPU it runs as shipped, with the attention it chooses itself.
"""

# ruff: noqa: E402  what the import needs comes before it
from __future__ import annotations

import torch

mps_is_available = torch.backends.mps.is_available
if not torch.cuda.is_available():
    torch.backends.mps.is_available = lambda: True  # it cannot be imported where it finds no accelerator
from xfuser.config import config, xFuserArgs
from xfuser.core.distributed import (
    attention_backend,
    group_coordinator,
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
    runtime_state,
)
from xfuser.core.distributed.attention_backend import AttentionBackendType
from xfuser.model_executor.layers import usp
from xfuser.model_executor.models.transformers.transformer_flux import xFuserFlux1Transformer2DWrapper
from yunchang.globals import PROCESS_GROUP

torch.backends.mps.is_available = mps_is_available

from .process import Forward, Place, as_diffusers, serve

SIZES = (
    "patch_size in_channels num_layers num_single_layers attention_head_dim num_attention_heads joint_attention_dim "
    "pooled_projection_dim guidance_embeds axes_dims_rope"
).split()


def join(place: Place) -> None:
    """xfuser's groups and its runtime state, with one process a rank."""
    if place.device.type == "cpu":
        config.HAS_LONG_CTX_ATTN = parallel_state.HAS_LONG_CTX_ATTN = True
        group_coordinator.HAS_LONG_CTX_ATTN = True
        usp.PROCESS_GROUP = PROCESS_GROUP
        attention_backend.register_attention_function(AttentionBackendType.SDPA_FLASH)(flash_on_cpu)
    backend = torch.distributed.get_backend()
    init_distributed_environment(rank=place.rank, local_rank=place.rank, world_size=place.ranks, backend=backend)
    initialize_model_parallel(
        sequence_parallel_degree=place.ranks,
        ulysses_degree=place.ulysses,
        ring_degree=place.ring,
        backend=backend,
    )
    own_choice = None if place.device.type == "cuda" else "sdpa_flash" if place.ring > 1 else "sdpa"
    degrees = xFuserArgs(
        ulysses_degree=place.ulysses, ring_degree=place.ring, attention_backend=own_choice, warmup_steps=0
    )
    state = runtime_state.RuntimeState(degrees.create_config()[0])
    state.max_condition_sequence_length = 0  # read by every single block, used by PipeFusion alone
    runtime_state._RUNTIME = state  # its own setter wants a pipeline with encoders and a VAE


def flash_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """xfuser's SDPA_FLASH on the CPU. All (B, H, S, D); the log-sum-exp (B, H, S)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal)


def make_forward(place: Place) -> Forward:
    """xfuser's wrapper with the weights of the file."""
    reference = place.oracle()
    with torch.device("meta"):
        model = xFuserFlux1Transformer2DWrapper(**{name: reference.model.config[name] for name in SIZES})
    reference.model.time_text_embed = reference.model.time_text_embed.inner  # as diffusers has it
    model.load_state_dict(reference.model.state_dict(), strict=True, assign=True)
    model.eval().requires_grad_(False)
    return torch.inference_mode()(lambda inputs: model(**as_diffusers(inputs, place.dtype), return_dict=False)[0])


if __name__ == "__main__":
    place = Place.parse()
    torch.set_num_interop_threads(1)
    place.join()
    join(place)
    serve(place, make_forward(place))
