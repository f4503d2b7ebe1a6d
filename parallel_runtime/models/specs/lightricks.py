"""Plans of LTX-Video and LTX-2 (video and audio). Before ComfyUI 0.28 rotary tables by heads are (B, H, S, D)."""

from .spec import ShardingSpec

SPECS = {
    "comfy.ldm.lightricks.model.LTXVModel": ShardingSpec(
        attention={"transformer_blocks": {"attn1": "vid", "attn2": "local"}},
        cut={
            "transformer_blocks.0": {"x": "vid"},
            "transformer_blocks.*": {"pe": "heads:vid", "timestep": "vid", "self_attention_mask": "guides:vid"},
        },
        gather={"transformer_blocks.-1": "vid"},
    ),
    "comfy.ldm.lightricks.av_model.LTXAVModel": ShardingSpec(
        attention={
            "transformer_blocks": {
                "attn1": "vid",
                "audio_attn1": "aud",
                "audio_to_video_attn": "vid<-aud",
                "video_to_audio_attn": "aud<-vid",
                "attn2": "local",
                "audio_attn2": "local",
            }
        },
        cut={
            "transformer_blocks.0": {"x": ("vid", "aud")},
            "transformer_blocks.*": {
                "v_pe": "heads:vid",
                "v_cross_pe": "heads:vid",
                "v_timestep": "frames:vid",
                "v_cross_scale_shift_timestep": "frames:vid",
                "v_cross_gate_timestep": "frames:vid",
                "a_pe": "heads:aud",
                "a_cross_pe": "heads:aud",
                "a_timestep": "aud",
                "a_cross_scale_shift_timestep": "aud",
                "a_cross_gate_timestep": "aud",
                "self_attention_mask": "guides:vid",
            },
        },
        gather={"transformer_blocks.-1": ("vid", "aud")},
    ),
}
