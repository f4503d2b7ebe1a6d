"""Plans of Wan 2.1 and 2.2: text or image to video, 5B, camera, VACE, speech to video."""

from dataclasses import replace

from .plan import Plan

BLOCK = {"self_attn": "x", "cross_attn": "local"}

WAN = Plan(
    attention={"blocks": BLOCK},
    cut={"blocks.0": {"x": "x"}, "blocks.*": {"freqs": "x", "e": "frames4:x"}, "head": {"e": "frames3:x"}},
    gather={"head": "x"},
)

PLANS = {
    "comfy.ldm.wan.model.WanModel": WAN,
    "comfy.ldm.wan.model.CameraWanModel": WAN,
    "comfy.ldm.wan.model.VaceWanModel": Plan(
        attention={"blocks": BLOCK, "vace_blocks": BLOCK},
        cut={
            "blocks.0": {"x": "x"},
            "vace_blocks.0": {"c": "x", "x": "x"},
            "*blocks.*": {"freqs": "x", "e": "frames4:x"},
        },
        gather={"head": "x"},  # the last block's output still gets a VACE block's added
    ),
    # the audio injector groups tokens by frames
    "comfy.ldm.wan.model.WanModel_S2V": replace(WAN, whole={"audio_injector": {"x": "x", "return": "x"}}),
}
