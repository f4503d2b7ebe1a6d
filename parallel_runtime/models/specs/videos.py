"""Plans of other video models: Mochi, Kandinsky 5, Cosmos 1 and Predict2 (and Anima), CogVideoX."""

from .spec import ShardingSpec

PREDICT2 = ShardingSpec(
    attention={"blocks": {"self_attn": "grid", "cross_attn": "local"}},
    cut={
        "blocks.0": {"x_B_T_H_W_D": "grid@1"},
        "blocks.*": {"rope_emb_L_1_1_D": "flat:grid@1", "extra_per_block_pos_emb": "grid@1"},
    },
    gather={"final_layer": "grid@1"},
)

SPECS = {
    "comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint": ShardingSpec(
        attention={"blocks": "vid+index:txt"},  # video and as much text as there is in the prompt
        cut={
            "blocks.0": {"x": "vid", "y": "txt"},
            "blocks.*": {"**rope_cos": "vid@0", "**rope_sin": "vid@0", "**crop_y": "index:txt"},
        },
        gather={"final_layer": "vid"},
        hands={"blocks": ("x", "y")},
    ),
    "comfy.ldm.kandinsky5.model.Kandinsky5": ShardingSpec(
        attention={"visual_transformer_blocks": {"self_attention": "vid", "cross_attention": "local"}},
        cut={"visual_transformer_blocks.0": {"visual_embed": "vid"}, "visual_transformer_blocks.*": {"freqs": "vid"}},
        gather={"visual_transformer_blocks.-1": "vid"},
        replaced={"double_block": ("visual_transformer_blocks", {"x": "visual_embed", "context": "text_embed"})},
    ),
    "comfy.ldm.cosmos.predict2.MiniTrainDIT": PREDICT2,
    "comfy.ldm.anima.model.Anima": PREDICT2,
    "comfy.ldm.cosmos.model.GeneralDIT": ShardingSpec(
        attention={"blocks": {"blocks.0": "grid", "blocks.1": "local"}},
        cut={"x_embedder": {"return": "grid@1"}},  # something is added to it outside of the blocks
        whole={
            "pos_embedder": {"#0": "grid@1", "return": "flat:grid@0"},
            "extra_pos_embedder": {"#0": "grid@1", "return": "grid@1"},
        },
        gather={"blocks.-1": "grid@0"},
    ),
    "comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel": ShardingSpec(
        attention={"blocks": "txt+vid"},
        cut={
            "blocks.0": {"hidden_states": "vid", "encoder_hidden_states": "txt"},
            "blocks.*": {"image_rotary_emb": "vid@0"},
        },
        gather={"proj_out": "vid"},
        hands={"blocks": ("hidden_states", "encoder_hidden_states")},
    ),
}
