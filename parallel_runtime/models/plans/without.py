"""Why ComfyUI's classes without a plan have none, and what works instead: data, by the class's dotted path.

A class is here or has a plan, never both.
"""

NEEDS_NONE = "use cfg parallel, data parallel or sharded weights, which need none"
ROWS_TOGETHER = "use sharded weights, or data parallel for a list of videos, which need none"
NOT_SAMPLED = "use ComfyUI's Load Diffusion Model"

UNET = "it is a U-Net, whose convolutions and norms see the whole picture"
UNWRITTEN = "nobody has written its plan yet"

_U_NETS = (
    "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    "comfy.ldm.cascade.stage_b.StageB",
    "comfy.ldm.cascade.stage_c.StageC",
)
_UNWRITTEN = (
    "comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
    "comfy.ldm.ace.model.ACEStepTransformer2DModel",
    "comfy.ldm.audio.dit.AudioDiffusionTransformer",
    "comfy.ldm.boogu.model.BooguTransformer2DModel",
    "comfy.ldm.ernie.model.ErnieImageModel",
    "comfy.ldm.hunyuan3d.model.Hunyuan3Dv2",
    "comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
    "comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel",
    "comfy.ldm.joyimage.model.JoyImageTransformer3DModel",
    "comfy.ldm.lens.model.LensTransformer2DModel",
    "comfy.ldm.lumina.model.NextDiTPixelSpace",
    "comfy.ldm.mage_flow.model.MageFlowTransformer2DModel",
    "comfy.ldm.pixeldit.model.PixDiT_T2I",
    "comfy.ldm.pixeldit.pid.PidNet",
    "comfy.ldm.triposplat.model.LatentSeqMMFlowModel",
)

# Class -> why its tokens are not shared, and what to use.
WITHOUT: dict[str, tuple[str, str]] = {
    **{path: (UNET, NEEDS_NONE) for path in _U_NETS},
    **{path: (UNWRITTEN, NEEDS_NONE) for path in _UNWRITTEN},
    "comfy.ldm.seedvr.model.NaDiT": (
        "its attention goes over windows of the video, which each block cuts anew, and both sides of cfg are one call",
        ROWS_TOGETHER,
    ),
    "comfy.ldm.rt_detr.rtdetr_v4.RTv4": ("it detects objects and no sampler calls it", NOT_SAMPLED),
    "comfy.ldm.sam3.detector.SAM3Model": ("it finds masks and no sampler calls it", NOT_SAMPLED),
    "comfy.ldm.depth_anything_3.model.DepthAnything3Net": ("it estimates depth and no sampler calls it", NOT_SAMPLED),
}
