"""Plans of models of three-dimensional shapes: Hunyuan3D 2 and 2.1, TripoSplat."""

from .spec import LONG_SKIPS, ShardingSpec

SPECS = {
    "comfy.ldm.hunyuan3d.model.Hunyuan3Dv2": ShardingSpec(
        attention={"double_blocks": "txt+img", "single_blocks": "txt+img"},
        cut={"double_blocks.0": {"img": "img", "txt": "txt"}},
        gather={"final_layer": "img"},
        hands={"double_blocks": ("img", "txt"), "single_blocks": "x"},
    ),
    "comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain": ShardingSpec(
        attention={"blocks": {"attn1": "x", "attn2": "local"}},
        cut={"blocks.0": {"hidden_states": "x"}},
        gather={"blocks.-1": "x"},  # the last layer drops the first token
        unstaged=LONG_SKIPS,
    ),
    "comfy.ldm.triposplat.model.LatentSeqMMFlowModel": ShardingSpec(
        attention={"noise_refiner": "points", "blocks": "all"},
        cut={  # a block's rotary table is made from the tokens that it is given
            "noise_repo_layers.0": {"hidden_states": "points"},
            "noise_refiner.0": {"x": "points"},
            "repo_layers.0": {"hidden_states": "all"},
            "blocks.0": {"x": "all"},
        },
        gather={"noise_refiner.-1": "points", "blocks.-1": "all"},
    ),
}
