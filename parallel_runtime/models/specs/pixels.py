"""Plans of image models that work on pixels: PixelDiT, PiD, Z-Image in pixel space."""

from dataclasses import replace

from .images import SPECS as IMAGES
from .spec import ShardingSpec

Z_IMAGE = IMAGES["comfy.ldm.lumina.model.NextDiT"]

# The last blocks, whose rows are patches of all images in a batch, are computed whole by every rank.
PIXELDIT = ShardingSpec(
    attention={"patch_blocks": "txt+img"},
    cut={"patch_blocks.0": {"x": "img", "y": "txt"}, "patch_blocks.*": {"pos_img": "img@0", "pos_txt": "txt@0"}},
    gather={"patch_blocks.-1": ("img", "")},
    hands={"patch_blocks": ("x", "y")},
)

SPECS = {
    "comfy.ldm.pixeldit.model.PixDiT_T2I": PIXELDIT,
    "comfy.ldm.pixeldit.pid.PidNet": replace(
        PIXELDIT,
        cut={
            "lq_proj.gate_modules.0": {"x": "img"},  # its output is what the first block takes
            "lq_proj.gate_modules.*": {"lq": "img"},
            **PIXELDIT.cut,
            "patch_blocks.0": {"y": "txt"},
        },
    ),
    "comfy.ldm.lumina.model.NextDiTPixelSpace": replace(
        Z_IMAGE,
        cut={
            **{path: words for path, words in Z_IMAGE.cut.items() if path != "final_layer"},
            "dec_net": {"x": "patches@0", "c": "patches@0"},
        },
        gather={"noise_refiner.-1": "img", "layers.-1": "all", "dec_net": "patches@0"},
        unstaged="dec_net shares out other tokens than its blocks, and a stage has fresh ones of a patch alone",
    ),
}
