"""What cannot run in workers that hold the weights elsewhere, and how we say so.

Owns the list of such things and their messages: the first line names the node to remove. Checks only, changes nothing.
"""

from collections.abc import Mapping

import nodes as comfy_nodes
from comfy_api.latest import get_executing_context, get_progress_state

# What ComfyUI's own Flux reads inside its blocks; every other patch name has no effect on it, there as here.
IN_MODEL_PATCHES = ("post_input", "double_block", "single_block", "attn1_patch", "attn1_output_patch")
COMPILED = "torch.compile"  # the key of ComfyUI's own wrapper, in every version that has it
PATCHERS = "the node that adds them (SkipLayerGuidanceDiT, for one)"
ATTENTION_OVERRIDES = ("optimized_attention_override",)


def refuse(what: str, instead: str = "use Load Diffusion Model for this graph") -> ValueError:
    """The error for `what`, said by the node that executes now: remove it, or do `instead`."""
    reason = f"{_executing_node()}: {what}, which a parallel MODEL cannot take"
    return ValueError(f"{reason}; remove that node, or {instead}")


def refuse_in(source: str, what: str, instead: str = "use Load Diffusion Model for this graph") -> ValueError:
    """The error for `what` found in a MODEL or a conditioning, made by nodes such as `source`."""
    return ValueError(f"{what}, which a parallel MODEL cannot take; remove {source}, or {instead}")


def block_patches(options: Mapping[str, dict]) -> list[str]:
    """What in ComfyUI's `transformer_options` would run inside the blocks, by name; empty when nothing would."""
    patches = options.get("patches", {})
    found = [name for name in IN_MODEL_PATCHES if patches.get(name)]
    found += [f"{kind} {index}" for kind, index, *_ in options.get("patches_replace", {}).get("dit", {})]
    found += [name for name in ATTENTION_OVERRIDES if options.get(name) is not None]
    return found


def check_transformer_options(options: Mapping[str, dict]) -> None:
    """Raise `ValueError` when `options` hold anything that would run inside the blocks."""
    found = block_patches(options)
    if found:
        raise refuse_in(PATCHERS, f"the MODEL carries patches of its blocks ({', '.join(found)})")


def _executing_node() -> str:
    """The executing node as a user knows it: `Load LoRA (node 7)`."""
    context = get_executing_context()
    if context is None:
        return "this node"
    class_type = get_progress_state().dynprompt.get_node(context.node_id)["class_type"]
    title = comfy_nodes.NODE_DISPLAY_NAME_MAPPINGS.get(class_type, class_type)
    return f"{title} (node {context.node_id})"
