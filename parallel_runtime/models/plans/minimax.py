"""Plan of MiniMax H3: text, references, audio and video packed into one stream, tokens in dim 0."""

from .plan import Plan

PLANS = {
    "comfy.ldm.minimax.model.MiniMaxH3Model": Plan(
        attention={"blocks": "all"},
        cut={"blocks.0": {"x": "all@0"}, "blocks.*": {"mod_segments": "ranges:all", "rope_freqs": "all"}},
        gather={"blocks.-1": "all@0"},
    ),
}
