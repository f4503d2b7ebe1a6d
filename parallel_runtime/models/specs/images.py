"""Plans of other image models.

Z-Image and Lumina 2, OmniGen2, Krea 2, SD3.5, PixArt, HunyuanDiT, AuraFlow, HiDream-I1 and O1.
"""

from .spec import LONG_SKIPS, ShardingSpec

SPECS = {
    "comfy.ldm.lumina.model.NextDiT": ShardingSpec(
        attention={"noise_refiner": "img", "layers": "all"},
        cut={
            "noise_refiner.0": {"x": "img"},
            "noise_refiner.*": {"freqs_cis": "img", "timestep_zero_index": "ranges:img"},
            "layers.0": {"x": "all"},
            "layers.*": {"freqs_cis": "all", "timestep_zero_index": "ranges:all"},
            "final_layer": {"timestep_zero_index": "ranges:all"},
        },
        gather={"noise_refiner.-1": "img", "final_layer": "all"},
    ),
    "comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel": ShardingSpec(
        attention={"noise_refiner": "img", "layers": "all"},
        cut={
            "noise_refiner.0": {"hidden_states": "img"},
            "noise_refiner.*": {"image_rotary_emb": "img"},
            "layers.0": {"hidden_states": "all"},
            "layers.*": {"image_rotary_emb": "all"},
        },
        gather={"noise_refiner.-1": "img", "norm_out": "all"},
    ),
    "comfy.ldm.krea2.model.SingleStreamDiT": ShardingSpec(
        attention={"blocks": "all"},
        cut={"blocks.0": {"x": "all"}, "blocks.*": {"freqs": "all@2", "timestep_zero_index": "index:all"}},
        gather={"last": "all"},
    ),
    "comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper": ShardingSpec(
        attention={"joint_blocks": "txt+img|img"},  # joint, then in some blocks of the image alone
        cut={"joint_blocks.0": {"#1": "img", "#0": "txt"}},
        gather={"final_layer": "img"},
        control={"output": "img"},
        hands={"joint_blocks": ("#0", "#1")},
    ),
    "comfy.ldm.pixart.pixartms.PixArtMS": ShardingSpec(
        attention={"blocks": {"attn": "img", "cross_attn": "local"}},
        cut={"blocks.0": {"x": "img"}},
        gather={"final_layer": "img"},
    ),
    "comfy.ldm.hydit.models.HunYuanDiT": ShardingSpec(
        attention={"blocks": {"attn1": "img", "attn2": "local"}},
        cut={"blocks.0": {"x": "img"}, "blocks.*": {"freq_cis_img": "img@0"}},
        gather={"final_layer": "img"},
        control={"output": "img"},
        unstaged=LONG_SKIPS,
    ),
    "comfy.ldm.aura.mmdit.MMDiT": ShardingSpec(
        attention={"double_layers": "txt+img", "single_layers": "txt+img"},
        cut={"double_layers.0": {"c": "txt", "x": "img"}},
        gather={"final_linear": "img"},
        hands={"double_layers": ("c", "x"), "single_layers": "cx"},
    ),
    "comfy.ldm.hidream.model.HiDreamImageTransformer2DModel": ShardingSpec(
        attention={"double_stream_blocks": "img+t5+llama+llama", "single_stream_blocks": "img+t5+llama+llama"},
        cut={  # each block is given other text, joined outside of it, so all is cut where it is made
            "caption_projection.*": {"return": "llama"},
            "caption_projection.-1": {"return": "t5"},
            "x_embedder": {"return": "img"},
            "*_stream_blocks.*": {"rope": "img+*"},
        },
        gather={"final_layer": "img"},
        unstaged="each of its blocks is given other text, joined to the tokens between blocks",
    ),
    # The prompt attends to itself alone, by a kernel of its own: every rank computes it, and shares the picture. Its
    # keys, which the class keeps for its next call, are forgotten before each (worker/hosted.py).
    "comfy.ldm.hidream_o1.model.HiDreamO1Transformer": ShardingSpec(
        attention={"language_model.layers": "img<-txt+img"},
        cut={
            "": {"**ar_len": "every:txt"},
            "language_model.layers.0": {"x": "rest:txt+img"},
            "language_model.layers.*": {"freqs_cis": "txt+img"},
        },
        gather={"language_model.norm": "txt+img"},
        unstaged="its prompt's tokens attend to themselves alone, by a kernel of the class's own, over all of them",
    ),
}

BETWEEN = {
    "comfy.ldm.lumina.model.NextDiT": ShardingSpec(
        attention={"noise_refiner": "img", "layers": "all"},
        cut={
            "noise_refiner.*": {"x": "img", "freqs_cis": "img", "timestep_zero_index": "ranges:img"},
            "layers.*": {"x": "all", "freqs_cis": "all", "timestep_zero_index": "ranges:all"},
        },
        gather={"noise_refiner.*": "img", "layers.*": "all"},
    ),
}
