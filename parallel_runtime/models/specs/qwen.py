"""Plans of Qwen-Image, Qwen-Image-Edit, Qwen-Image 2.1 and Mage-Flow."""

from .spec import Keeps, ShardingSpec

QWEN_IMAGE = ShardingSpec(
    attention={"transformer_blocks": "txt+img"},
    cut={
        "transformer_blocks.0": {"hidden_states": "img", "encoder_hidden_states": "txt"},
        "transformer_blocks.*": {
            "image_rotary_emb": "txt+img@2",
            "encoder_hidden_states_mask": "txt",
            "timestep_zero_index": "index:img",
        },
    },
    gather={"proj_out": "img"},
    control={"input": "img"},
    hands={"transformer_blocks": ("encoder_hidden_states", "hidden_states")},
)

# Text and references come first and see nothing of the picture: every rank has all of them. Their keys are the same in
# every step, so the class keeps them: a call that has them computes the picture's rows alone.
QWEN_IMAGE_21 = ShardingSpec(
    attention={"transformer_blocks": "img<-txt+img|img<-kept:txt+img|local"},
    cut={
        "transformer_blocks.*": {"prefix_len": "every:txt", "pe": "rest:txt+img"},
        "transformer_blocks.0": {"x": "rest:txt+img"},
    },
    gather={"proj_out": "img"},
    unstaged="its blocks are given a function that has the keys of all tokens",
    keeps=Keeps(
        reset="reset_prefix_cache",
        decide="select_prefix_cache",
        patcher="current_patcher",
        option="qwen_image21_cache",
    ),
)

SPECS = {
    "comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel": QWEN_IMAGE_21,
    "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel": QWEN_IMAGE,
    "comfy.ldm.mage_flow.model.MageFlowTransformer2DModel": QWEN_IMAGE,  # the same blocks
}

IN_BLOCKS = {
    "hidden_states": "img",
    "encoder_hidden_states": "txt",
    "image_rotary_emb": "txt+img@2",
    "encoder_hidden_states_mask": "txt",
    "timestep_zero_index": "index:img",
}
BETWEEN = {
    "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel": ShardingSpec(
        attention={"transformer_blocks": "txt+img"},
        cut={"transformer_blocks.*": IN_BLOCKS},
        gather={"transformer_blocks.*": ("txt", "img")},
    ),
}
