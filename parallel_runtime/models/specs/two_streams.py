"""Plans of Flux.1, Flux.2 and the families that share its blocks."""

from dataclasses import replace

from .spec import Handed, ShardingSpec

HANDS: dict[str, Handed] = {"double_blocks": ("img", "txt"), "single_blocks": "x"}
BLOCKS = {"double_blocks": "txt+img", "single_blocks": "txt+img"}
TWO_STREAMS = {
    "double_blocks.0": {"img": "img", "txt": "txt"},
    "double_blocks.*": {"pe": "txt+img@2", "attn_mask": "order:txt+img", "modulation_dims_img": "ranges:img"},
}
ONE_STREAM = {"pe": "txt+img@2", "attn_mask": "order:txt+img"}

FLUX = ShardingSpec(
    attention=BLOCKS,
    cut=TWO_STREAMS
    | {
        # the model counts these ranges from the text that it holds here, which is this rank's
        "single_blocks.*": ONE_STREAM | {"modulation_dims": "ranges:-txt+img"},
        "final_layer": {"modulation_dims": "ranges:img"},
    },
    gather={"final_layer": "img"},
    control={"input": "img", "output": "img"},
    hands=HANDS,
)

SPECS = {
    "comfy.ldm.flux.model.Flux": FLUX,
    "comfy.ldm.chroma.model.Chroma": replace(
        FLUX, cut={path: words for path, words in FLUX.cut.items() if path != "final_layer"}
    ),
    "comfy.ldm.chroma_radiance.model.ChromaRadiance": ShardingSpec(
        attention=BLOCKS,
        cut=TWO_STREAMS | {"single_blocks.*": ONE_STREAM},
        gather={"single_blocks.-1": "-txt+img"},  # what makes pixels of tokens has them in the batch
        control={"input": "img"},
        hands=HANDS,
    ),
    "comfy.ldm.hunyuan_video.model.HunyuanVideo": ShardingSpec(
        attention=BLOCKS,
        cut=TWO_STREAMS | {"single_blocks.*": ONE_STREAM | {"modulation_dims": "ranges:txt+img"}},
        # HunyuanVideo 1.5 has no single blocks
        gather=({"single_blocks.-1": "-txt+img"}, {"double_blocks.-1": ("img", "")}),
        hands=HANDS,
    ),
}
