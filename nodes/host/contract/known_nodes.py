"""What to do in place of a node of another pack that a parallel MODEL cannot have, by the name of its class.

Also which file to load in place of one in GGUF. Owns both tables, which have words alone: what a node does to a MODEL
is found by what it did (refusals.py), and no node is refused for its name. The first row that matches a class is its.
"""

import re
from collections.abc import Iterable

INSTEAD = "use Load Diffusion Model for this graph"
_ROWS = (
    ("sage", "start ComfyUI with --use-sage-attention, or set attention to SageAttention in SP Config"),
    ("flash_?attention", "start ComfyUI with --use-flash-attention, or set attention to FlashAttention 3 in SP Config"),
    ("compile|velocator", "set compiled=blocks in SP Config"),
    ("teacache|magcache|fbcache|spectrum", "use EasyCache, or set step_cache in SP Config"),
    ("(?-i:NAG)", "use a negative prompt with cfg above 1 (not with a model or LoRA that is made for cfg 1)"),
    ("chunk|low_?(v?ram|mem)|mem(ory)?_?eff|blockswap", "set weights to sharded or offloaded in SP Config"),
    ("ip_?adapter|pulid|animatediff", "use Load Diffusion Model and KSampler for this graph, on one device"),
)
_TABLE = tuple((re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in _ROWS)

# Words in the name of a file of weights, and the file of the same model that is about as small as one in GGUF.
_SMALL = (
    ("z.?image.?turbo", "z_image_turbo_int8_convrot.safetensors"),
    ("z.?image", "z_image_int8_convrot.safetensors"),
    ("krea.?2.*turbo", "krea2_turbo_int8_convrot.safetensors"),
    ("(minimax|h3).*ref", "minimax_h3_ref2va_pruned_int8_convrot.safetensors"),
    ("minimax|h3", "minimax_h3_fl2va_pruned_int8_convrot.safetensors"),
    ("qwen.*edit.*2511", "qwen_image_edit_2511_int8_convrot.safetensors"),
    ("ideogram", "ideogram4_int8_convrot.safetensors"),
    ("mage.?flow.*edit", "mage_flow_edit_int8_convrot.safetensors"),
    ("mage.?flow", "mage_flow_int8_convrot.safetensors"),
    ("scail", "wan2.1_14B_SCAIL_2_int8_convrot.safetensors"),
    ("joy.?(ai|image).*edit", "joyai_image_edit_int8_convrot.safetensors"),
    ("boogu.*edit", "boogu_image_edit_int8_convrot.safetensors"),
    ("seedvr2.*7b", "seedvr2_7b_int8_convrot.safetensors"),
    ("seedvr2", "seedvr2_3b_int8_convrot.safetensors"),
)
ANY_SMALL = "a .safetensors file of the same model in int8 or fp8"


def small_file(text: str) -> str:
    """What to load in place of the file of weights that a loader's settings name."""
    return next((file for pattern, file in _SMALL if re.search(pattern, text, re.IGNORECASE)), ANY_SMALL)


def instead_of(class_types: Iterable[str]) -> str:
    """What to do in place of nodes of these classes; in general where they are several kinds, or none is known."""
    found = {next((instead for known, instead in _TABLE if known.search(name)), INSTEAD) for name in class_types}
    return found.pop() if len(found) == 1 else INSTEAD
