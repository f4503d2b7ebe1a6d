"""Files of classes whose published sizes ComfyUI's detection fixes, small: the test host tells it (host/told_sizes.py).

The variants of these families have files of the published widths; these are for what needs many models at once.
"""

from __future__ import annotations

from .told import told

TEXT, AXES = 48, [4, 6, 6]
QWEN_SIZES = {"num_layers": 2, "num_attention_heads": 5, "attention_head_dim": 16, "joint_attention_dim": TEXT}
QWEN_SIZES |= {"axes_dims_rope": AXES}
LUMINA_SIZES = {"patch_size": 2, "in_channels": 16, "cap_feat_dim": TEXT, "n_layers": 2, "n_refiner_layers": 2}
LUMINA_SIZES |= {"dim": 288, "n_heads": 6, "n_kv_heads": 6, "qk_norm": True, "axes_dims": [16] * 3}
LUMINA_SIZES |= {"axes_lens": [64] * 3, "rope_theta": 256.0, "ffn_dim_multiplier": 2.0, "multiple_of": 32}
Z_IMAGE_SIZES = LUMINA_SIZES | {"z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32}
QWEN = told("small_qwen_image", "qwen_image.model.QwenImageTransformer2DModel", 121, QWEN_SIZES)
Z_IMAGE = told("small_z_image", "lumina.model.NextDiT", 122, Z_IMAGE_SIZES)
