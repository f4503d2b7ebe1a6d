"""Stable Diffusion 3.5 with 3 heads: medium, whose first blocks attend twice, and large."""

from typing import Any

from .files import ModelFile, Rule, tiny
from .graphs import picture_of
from .variant import variants

FAMILY = "SD3.5"
TEXT, POOLED = 48, 64
DEPTH = 3  # blocks, and heads of 64: ComfyUI's detection takes both from the width


def sd3_file(size: str, *, seed: int, twice: list[int], pooled: int = POOLED, depth: int = DEPTH) -> ModelFile:
    """A file of one of the sizes. `twice`: blocks in which the picture attends to itself as well; `pooled`: a width."""
    text = {"target": "torch.nn.Linear", "params": {"in_features": TEXT, "out_features": 64 * depth}}
    sizes: dict[str, Any] = {"input_size": None, "patch_size": 2, "in_channels": 16, "out_channels": 16, "depth": depth}
    sizes |= {"adm_in_channels": pooled, "context_embedder_config": text, "qk_norm": "rms", "num_patches": 32 * 32}
    sizes |= {"pos_embed_max_size": 32, "pos_embed_scaling_factor": None, "x_block_self_attn_layers": twice}
    path = "modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper"
    rules = (Rule(r"ln_[qk]\.weight$", std=0.1, mean=1.5), Rule("pos_embed$", std=0.3))
    return tiny(f"sd35_{size}", path, seed, sizes, rules=rules)


CONTROLLED_POOLED = 2048  # fixed in ComfyUI's ControlNets of SD3.5
CONTROLLED = sd3_file("controlled", seed=120, twice=[], pooled=CONTROLLED_POOLED)
FILES = (sd3_file("medium", seed=80, twice=[0, 1]), sd3_file("large", seed=81, twice=[]))


def controlnet_of_sd35(name: str, *, double: bool) -> ModelFile:
    """A ControlNet that gets an embedder of the model it is used with; `double`: that of the pooled text."""
    sizes: dict[str, Any] = {"img_size": None, "patch_size": 2, "in_chans": 16, "attention_head_dim": 64}
    sizes |= {"num_attention_heads": DEPTH, "adm_in_channels": CONTROLLED_POOLED, "num_layers": 1}
    sizes |= {"main_model_double": DEPTH}
    kind = "comfy.cldm.dit_embedder.ControlNetEmbedder"
    return ModelFile(name=name, class_path=kind, arguments=sizes | {"double_y_emb": double}, seed=123)


text_to_image = picture_of(TEXT, pooled=POOLED)
VARIANTS = variants(
    ("sd3.5 medium", FAMILY, "sd35_medium", text_to_image), ("sd3.5 large", FAMILY, "sd35_large", text_to_image)
)
