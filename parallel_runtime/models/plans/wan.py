"""Plans of Wan 2.1 and 2.2: text or image to video, 5B, camera, VACE, causal; speech, faces, poses, music to video."""

from dataclasses import replace

from .plan import Plan

BLOCK = {"self_attn": "x", "cross_attn": "local"}

WAN = Plan(
    attention={"blocks": BLOCK},
    cut={"blocks.0": {"x": "x"}, "blocks.*": {"freqs": "x", "e": "frames4:x"}, "head": {"e": "frames3:x"}},
    gather={"head": "x"},
)

AUDIO = "blocks.*.audio_cross_attn_wrapper.audio_cross_attn"

PLANS = {
    "comfy.ldm.wan.model.WanModel": WAN,
    "comfy.ldm.wan.model.CameraWanModel": WAN,
    "comfy.ldm.wan.model.SCAILWanModel": WAN,
    "comfy.ldm.wan.model.SCAIL2WanModel": WAN,
    "comfy.ldm.wan.ar_model.CausalWanModel": WAN,  # a whole video; SamplerARVideo's frames are refused by its name
    "comfy.ldm.wan.model.VaceWanModel": Plan(
        attention={"blocks": BLOCK, "vace_blocks": BLOCK},
        cut={
            "blocks.0": {"x": "x"},
            "vace_blocks.0": {"c": "x", "x": "x"},
            "*blocks.*": {"freqs": "x", "e": "frames4:x"},
        },
        gather={"head": "x"},  # the last block's output still gets a VACE block's added
        unstaged="its blocks take turns with those of vace_blocks, whose outputs later blocks take",
    ),
    # the audio injector groups tokens by frames
    "comfy.ldm.wan.model.WanModel_S2V": replace(WAN, whole={"audio_injector": {"x": "x", "return": "x"}}),
    # queries are grouped by frames, each of which has its own tokens of audio
    "comfy.ldm.wan.model.HumoWanModel": Plan(
        attention={"blocks": BLOCK | {"audio_cross_attn_wrapper": "local"}},
        cut=dict(WAN.cut) | {f"{AUDIO}.o": {"#0": "x"}},
        gather={f"{AUDIO}.norm_q": "x", "head": "x"},
    ),
    "comfy.ldm.wan.model_animate.AnimateWanModel": replace(
        WAN, whole={"face_adapter.fuser_blocks.*": {"x": "x", "return": "x"}}
    ),
    "comfy.ldm.wan.model_wandancer.WanDancerModel": replace(
        WAN,
        cut={path: words for path, words in WAN.cut.items() if path != "head"} | {"head*": {"e": "frames3:x"}},
        whole={"music_injector": {"x": "x", "return": "x"}},
        gather={"head": "x", "head_global": "x"},  # by frames a second
    ),
}
