"""What cannot run in workers that hold the weights elsewhere, and how we say so.

Owns the list of such things and their messages: the first line names the node to remove. Checks only, changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence

from .block_patches import is_rebuilt
from .comfyui import comfy, comfy_nodes, get_executing_context, get_progress_state, is_absent
from .version import off

COMPILED = "torch.compile"  # the key of ComfyUI's own wrapper, in every version that has it
# Stock nodes that put patches into a MODEL or a run, by the first of what is found there.
USUAL_PATCHER = "SkipLayerGuidanceDiT"
PATCHERS = {
    "attn1": "PerturbedAttentionGuidance",
    "attn1_patch": "HyperTile",
    "input_block_patch": "PatchModelAddDownscale",
    "input_block_patch_after_skip": "PatchModelAddDownscale",
    "middle_patch": "GLIGENTextBoxApply",
    "output_block_patch": "FreeU",
}
# ControlNets that compute with the model's own weights, where this ComfyUI has them, and with which.
WITH_OUR_WEIGHTS = {
    kind: what
    for name, what in (("QwenFunControlNet", "own first layers"), ("ControlLora", "own weights"))
    if not is_absent(kind := getattr(comfy.controlnet, name))
}
ATTENTION_OVERRIDES = ("optimized_attention_override",)
# Under which of ComfyUI's `transformer_options` there is what would run inside the blocks: without them, nothing.
INSIDE_BLOCKS = frozenset(("patches", "patches_replace", *ATTENTION_OVERRIDES))


def refuse(what: str, instead: str = "use Load Diffusion Model for this graph") -> ValueError:
    """The error for `what`, said by the node that executes now: remove it, or do `instead`."""
    reason = f"{_executing_node()}: {what}, which a parallel MODEL cannot take"
    return ValueError(f"{reason}; remove that node, or {instead}")


def refuse_in(source: str, what: str, instead: str = "use Load Diffusion Model for this graph") -> ValueError:
    """The error for `what` found in a MODEL or a conditioning, made by nodes such as `source`."""
    return ValueError(f"{what}, which a parallel MODEL cannot take; remove {source}, or {instead}")


def block_patches(options: Mapping[str, dict], kinds: Collection[str] | None = None) -> list[str]:
    """What in ComfyUI's `transformer_options` would run inside the blocks, by name; empty when nothing would.

    `kinds` are the patches that the model reads; None: it may read any, and ranks rebuild some of them.
    """
    patches = options.get("patches", {})
    if kinds is None:
        patches = {name: [each for each in several if not is_rebuilt(each)] for name, several in patches.items()}
    found = [name for name in (patches if kinds is None else kinds) if patches.get(name)]
    for name, replaced in options.get("patches_replace", {}).items():
        if kinds is None or name == "dit":
            where = "" if name == "dit" else f"{name} of "
            found += [f"{where}{kind} {index}" for kind, index, *_ in replaced]
    found += [name for name in ATTENTION_OVERRIDES if options.get(name) is not None]
    return found


def check_transformer_options(options: Mapping[str, dict], kinds: Collection[str] | None = None) -> None:
    """Raise `ValueError` when `options` hold anything that would run inside the blocks; `kinds` as `block_patches`."""
    found = block_patches(options, kinds)
    if found:
        node = PATCHERS.get(found[0].partition(" ")[0], USUAL_PATCHER)
        what = f"the MODEL carries patches of its blocks ({', '.join(found)})"
        raise refuse_in(f"the node that adds them ({node}, for one)", what)


def check_controlnets(conds: Mapping[str, Sequence[Mapping] | None]) -> None:
    """Raise `ValueError` when a conditioning has a ControlNet that computes with weights which are not here."""
    for entry in (entry for side in conds.values() for entry in side or ()):
        control = entry.get("control")
        while control is not None:
            for kind, weights in WITH_OUR_WEIGHTS.items():
                if isinstance(control, kind):
                    what = f"a ControlNet ({type(control).__name__}) computes with the model's {weights}"
                    raise refuse_in("its Apply ControlNet", what, "use a ControlNet with layers of its own")
            control = control.previous_controlnet


def _executing_node() -> str:
    """The executing node as a user knows it: `Load LoRA (node 7)`."""
    if off("texts") or (context := get_executing_context()) is None:
        return "this node"
    class_type = get_progress_state().dynprompt.get_node(context.node_id)["class_type"]
    title = comfy_nodes.NODE_DISPLAY_NAME_MAPPINGS.get(class_type, class_type)
    return f"{title} (node {context.node_id})"
