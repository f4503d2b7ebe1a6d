"""Gets the model of `verify --against diffusers`; nothing else of the pack needs diffusers.

diffusers is not in requirements.txt: its own requirements may replace packages that a user's other nodes rely on.
"""

from typing import TYPE_CHECKING

from ..checkpoint import CheckpointHeader

if TYPE_CHECKING:
    from .flux_in_diffusers import FluxInDiffusers

REMEDY = 'pip install "diffusers>=0.35", in an environment of its own when other packages need an older huggingface_hub'


def load_reference_model(header: CheckpointHeader) -> "type[FluxInDiffusers]":
    """The class that computes this file by diffusers.

    Raises `ValueError` where diffusers cannot be imported, and for a file that is not converted.
    """
    if not _is_flux(header):
        raise ValueError("--against diffusers: only Flux.1 is converted; leave --against out to compare with ComfyUI")
    try:
        from .flux_in_diffusers import FluxInDiffusers
    except ModuleNotFoundError as error:
        if error.name != "diffusers":
            raise ValueError(f"diffusers cannot be imported: {_first_line(error)}; {REMEDY}") from error
        raise ValueError(f"diffusers is not installed; {REMEDY}") from error
    except (ImportError, RuntimeError) as error:  # the latter is how diffusers wraps what its parts could not import
        raise ValueError(f"diffusers cannot be imported: {_first_line(error)}; {REMEDY}") from error
    return FluxInDiffusers


def _is_flux(header: CheckpointHeader) -> bool:
    """Whether the file has what Flux.1 alone has together, under whatever prefix."""
    names = set(header.tensors)
    prefixes = [name.removesuffix("img_in.weight") for name in names if name.endswith("img_in.weight")]
    wanted = ("vector_in.in_layer.weight", "double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight")
    return any(all(prefix + each in names for each in wanted) for prefix in prefixes)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
