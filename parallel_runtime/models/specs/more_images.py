"""Plans of more image models: Ernie-Image, Ideogram 4, JoyImage, Lens, Boogu."""

from .spec import ShardingSpec

SPECS = {
    "comfy.ldm.ernie.model.ErnieImageModel": ShardingSpec(
        attention={"layers": "all"},
        cut={"layers.0": {"x": "all"}, "layers.*": {"rotary_pos_emb": "all"}},
        gather={"final_linear": "all"},
    ),
    "comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel": ShardingSpec(
        attention={"layers": "all"},
        cut={"layers.0": {"x": "all"}, "layers.*": {"freqs_cis": "all"}},
        gather={"final_layer": "all"},
    ),
    "comfy.ldm.joyimage.model.JoyImageTransformer3DModel": ShardingSpec(
        attention={"double_blocks": "img+txt"},
        cut={
            "double_blocks.0": {"hidden_states": "img", "encoder_hidden_states": "txt"},
            "double_blocks.*": {"image_rotary_emb": "img"},
        },
        gather={"double_blocks.-1": ("img", "")},  # references are cut off before the last layers
        hands={"double_blocks": ("hidden_states", "encoder_hidden_states")},
    ),
    "comfy.ldm.lens.model.LensTransformer2DModel": ShardingSpec(
        attention={"transformer_blocks": "img+txt"},
        cut={
            "transformer_blocks.0": {"hidden_states": "img", "encoder_hidden_states": "txt"},
            "transformer_blocks.*": {"freqs_cis": "img+txt@2", "attention_mask": "img+txt@3"},
        },
        gather={"proj_out": "img"},
        control={"input": "img"},
        hands={"transformer_blocks": ("encoder_hidden_states", "hidden_states")},
    ),
    "comfy.ldm.boogu.model.BooguTransformer2DModel": ShardingSpec(
        attention={
            "noise_refiner": "noise",
            "double_stream_layers": {"img_instruct_attn": "txt+img", "img_self_attn": "img"},
            "single_stream_layers": "txt+img",
        },
        cut={
            "noise_refiner.0": {"hidden_states": "noise"},
            "noise_refiner.*": {"image_rotary_emb": "noise"},
            "double_stream_layers.0": {"img_hidden_states": "img", "instruct_hidden_states": "txt"},
            "double_stream_layers.*": {"joint_rotary_emb": "txt+img", "img_rotary_emb": "img"},
            "single_stream_layers.*": {"image_rotary_emb": "txt+img"},
        },
        gather={"noise_refiner.-1": "noise", "norm_out": "txt+img"},
        hands={
            "double_stream_layers": ("img_hidden_states", "instruct_hidden_states"),
            "single_stream_layers": "hidden_states",
        },
    ),
}
