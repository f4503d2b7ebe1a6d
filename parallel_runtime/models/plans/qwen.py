"""Plans of Qwen-Image, Qwen-Image-Edit and Mage-Flow."""

from .plan import Plan

QWEN_IMAGE = Plan(
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

PLANS = {
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
    "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel": Plan(
        attention={"transformer_blocks": "txt+img"},
        cut={"transformer_blocks.*": IN_BLOCKS},
        gather={"transformer_blocks.*": ("txt", "img")},
    ),
}
