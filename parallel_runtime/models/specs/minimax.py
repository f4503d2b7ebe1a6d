"""Spec of MiniMax H3: text, references, audio and video packed into one stream, tokens in dim 0."""

from .spec import ShardingSpec

SPECS = {
    "comfy.ldm.minimax.model.MiniMaxH3Model": ShardingSpec(
        attention={"blocks": "all"},
        cut={"blocks.0": {"x": "all@0"}, "blocks.*": {"mod_segments": "ranges:all", "rope_freqs": "all"}},
        gather={"blocks.-1": "all@0"},
        row_ranges={"blocks": "mod_segments"},
    ),
}
