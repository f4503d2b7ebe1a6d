"""Plans of Wan 2.1 and 2.2: text or image to video, 5B, camera, VACE, causal; speech, faces, poses, music to video.

And Wan-Animate 2, which a video drives.
"""

from dataclasses import replace

from .spec import ShardingSpec

BLOCK = {"self_attn": "x", "cross_attn": "local"}

WAN = ShardingSpec(
    attention={"blocks": BLOCK},
    cut={"blocks.0": {"x": "x"}, "blocks.*": {"freqs": "x", "e": "frames4:x"}, "head": {"e": "frames3:x"}},
    gather={"head": "x"},
)

INJECTED = ("block_id", "injected_block_id")
AUDIO = "blocks.*.audio_cross_attn_wrapper.audio_cross_attn"

SPECS = {
    "comfy.ldm.wan.model.WanModel": WAN,
    "comfy.ldm.wan.model.CameraWanModel": WAN,
    "comfy.ldm.wan.model.SCAILWanModel": WAN,
    "comfy.ldm.wan.model.SCAIL2WanModel": WAN,
    "comfy.ldm.wan.ar_model.CausalWanModel": WAN,  # a whole video; SamplerARVideo's frames are refused by its name
    "comfy.ldm.wan.model.VaceWanModel": ShardingSpec(
        attention={"blocks": BLOCK, "vace_blocks": BLOCK},
        cut={
            "blocks.0": {"x": "x"},
            "vace_blocks.0": {"c": "x", "x": "x"},
            "*blocks.*": {"freqs": "x", "e": "frames4:x"},
        },
        gather={"head": "x"},  # the last block's output still gets a VACE block's added
        unstaged="its blocks take turns with those of vace_blocks, whose outputs later blocks take",
    ),
    # the audio injector groups tokens by frames, after some blocks
    "comfy.ldm.wan.model.WanModel_S2V": replace(
        WAN,
        whole={"audio_injector": {"x": "x", "return": "x"}},
        works_where={"audio_injector": INJECTED},
    ),
    # queries are grouped by frames, each of which has its own tokens of audio
    "comfy.ldm.wan.model.HumoWanModel": ShardingSpec(
        attention={"blocks": BLOCK | {"audio_cross_attn_wrapper": "local"}},
        cut=dict(WAN.cut) | {f"{AUDIO}.o": {"#0": "x"}},
        gather={f"{AUDIO}.norm_q": "x", "head": "x"},
    ),
    "comfy.ldm.wan.model_animate.AnimateWanModel": replace(
        WAN, whole={"face_adapter.fuser_blocks.*": {"x": "x", "return": "x"}}
    ),
    # rows of all frames to a rank, since each frame attends by itself: to the video, and to its own frame of the pose
    "comfy.ldm.wan.model_animate2.WanAnimate2Model": ShardingSpec(
        attention={
            "blocks": {
                "self_attn:forward_pose": "frames",
                "self_attn:forward_gen": "frames again",
                "cross_attn": "local",
            }
        },
        cut={
            "patch_embedding": {"return": "grid@2"},
            "blocks.*:forward_pose": {"freqs": "flat:grid@1"},
            "blocks.*:forward_gen": {"freqs": "flat:grid@1"},
            "blocks.*:kv_from_input": {"freqs": "flat:grid@1"},
        },
        gather={":unpatchify": "grid@2"},
        unstaged="each of its blocks computes for the pose first, then for the video with what it made of that",
    ),
    "comfy.ldm.wan.model_wandancer.WanDancerModel": replace(
        WAN,
        cut={path: words for path, words in WAN.cut.items() if path != "head"} | {"head*": {"e": "frames3:x"}},
        whole={"music_injector": {"x": "x", "return": "x"}},
        works_where={"music_injector": INJECTED},
        gather={"head": "x", "head_global": "x"},  # by frames a second
    ),
}
