"""Why ComfyUI's classes without a spec have none, and what works instead: data, by the class's dotted path.

A class is here or has a spec, never both.
"""

from .whole import WHOLE, WHY

NEEDS_NONE = "use cfg parallel, data parallel or sharded weights, which need none"
ROWS_TOGETHER = "use sharded weights, or data parallel for a list of videos, which need none"
ONE_CALL = "use sharded weights, which need none"
NOT_SAMPLED = "use ComfyUI's Load Diffusion Model"

# Class -> why its tokens are not shared, and what to use.
WITHOUT: dict[str, tuple[str, str]] = {
    **{path: (WHY, NEEDS_NONE) for path in WHOLE},
    "comfy.ldm.ace.model.ACEStepTransformer2DModel": (
        "its self attention is linear and in code of its own, and its layers see the tokens beside each token",
        NEEDS_NONE,
    ),
    "comfy.ldm.seedvr.model.NaDiT": (
        "its attention goes over windows of the video, which each block cuts anew, and both sides of cfg are one call",
        ROWS_TOGETHER,
    ),
    "comfy.ldm.trellis2.model.Trellis2": (
        "its tokens are the voxels of a shape, in objects of its own, and both sides of cfg are one call",
        ONE_CALL,
    ),
    "comfy.ldm.sensenova.model.SenseNovaU15": (
        "no ComfyUI that has it was tried, and an image may use the prompt of another row of the batch",
        ONE_CALL,
    ),
    "comfy.ldm.rt_detr.rtdetr_v4.RTv4": ("it detects objects and no sampler calls it", NOT_SAMPLED),
    "comfy.ldm.sam3.detector.SAM3Model": ("it finds masks and no sampler calls it", NOT_SAMPLED),
    "comfy.ldm.depth_anything_3.model.DepthAnything3Net": ("it estimates depth and no sampler calls it", NOT_SAMPLED),
}
