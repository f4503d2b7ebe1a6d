"""Files of classes whose published sizes ComfyUI's detection fixes, small: the test host tells it (host/told_sizes.py).

The variants of these families have files of the published widths; these are for what needs many models at once.
"""

from .files import Rule
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
QWEN_LAYERED = told(
    "small_qwen_layered",
    "qwen_image.model.QwenImageTransformer2DModel",
    124,
    QWEN_SIZES | {"use_additional_t_cond": True, "default_ref_method": "negative_index"},
)
LUMINA = told("small_lumina", "lumina.model.NextDiT", 125, LUMINA_SIZES | {"n_kv_heads": 2})
NEWBIE = told("small_newbie", "lumina.model.NextDiT", 134, LUMINA_SIZES | {"n_kv_heads": 2, "clip_text_dim": 32})
OMNIGEN_SIZES = {"patch_size": 2, "in_channels": 16, "hidden_size": 96, "num_layers": 2, "num_refiner_layers": 1}
OMNIGEN_SIZES |= {"num_attention_heads": 6, "num_kv_heads": 2, "multiple_of": 32, "axes_dim_rope": AXES}
OMNIGEN = told(
    "small_omnigen2", "omnigen.omnigen2.OmniGen2Transformer2DModel", 126, OMNIGEN_SIZES | {"text_feat_dim": TEXT}
)
CHROMA_SIZES = {"hidden_size": 96, "num_heads": 6, "axes_dim": AXES, "depth": 2, "depth_single_blocks": 2}
CHROMA_SIZES |= {"in_channels": 64, "out_channels": 64, "context_in_dim": TEXT, "vec_in_dim": None, "mlp_ratio": 2.0}
CHROMA_SIZES |= {"theta": 10000, "patch_size": 2, "qkv_bias": True, "txt_ids_dims": [], "in_dim": 64, "out_dim": 96}
CHROMA = told("small_chroma", "chroma.model.Chroma", 127, CHROMA_SIZES | {"hidden_dim": 48, "n_layers": 1})
LONGCAT_SIZES = {"hidden_size": 96, "mlp_ratio": 2.0, "num_heads": 6, "depth": 2, "depth_single_blocks": 2}
LONGCAT_SIZES |= {"qkv_bias": True, "in_channels": 16, "out_channels": 16, "vec_in_dim": None, "context_in_dim": 3584}
LONGCAT_SIZES |= {"patch_size": 2, "axes_dim": AXES, "theta": 10000, "guidance_embed": False, "txt_ids_dims": [1, 2]}
LONGCAT = told("small_longcat", "flux.model.Flux", 128, LONGCAT_SIZES)
OVIS_SIZES = LONGCAT_SIZES | {"context_in_dim": TEXT, "yak_mlp": True, "txt_norm": True}
OVIS = told("small_ovis", "flux.model.Flux", 129, OVIS_SIZES)
HIDREAM_SIZES = {"patch_size": 2, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
HIDREAM_SIZES |= {"num_attention_heads": 6, "caption_channels": [TEXT, 40], "text_emb_dim": 32, "axes_dims_rope": AXES}
HIDREAM_SIZES |= {"max_resolution": [64, 64], "llama_layers": [0, 1, 2, 2]}
HIDREAM = told("small_hidream", "hidream.model.HiDreamImageTransformer2DModel", 130, HIDREAM_SIZES)
IDEOGRAM_SIZES = {"in_channels": 128, "num_layers": 2, "num_attention_heads": 6, "attention_head_dim": 16}
IDEOGRAM_SIZES |= {"intermediate_size": 128, "llm_features_dim": TEXT, "mrope_section": [4, 2, 2], "adaln_dim": 32}
IDEOGRAM = told("small_ideogram_4", "ideogram4.model.Ideogram4Transformer2DModel", 131, IDEOGRAM_SIZES)
ACE_SIZES = {"num_layers": 2, "inner_dim": 80, "attention_head_dim": 16, "num_attention_heads": 5, "mlp_ratio": 2.0}
ACE_SIZES |= {"text_embedding_dim": TEXT, "lyric_encoder_vocab_size": 6681, "ssl_encoder_depths": [8, 8]}
ACE = told("small_ace", "ace.model.ACEStepTransformer2DModel", 132, ACE_SIZES)
ACE_15_SIZES = {"hidden_size": 96, "text_hidden_dim": TEXT, "num_heads": 6, "num_dit_layers": 2, "num_lyric_layers": 1}
ACE_15_SIZES |= {"num_timbre_layers": 1, "num_tokenizer_layers": 1, "num_kv_heads": 2, "head_dim": 16, "fsq_dim": 96}
ACE_15_SIZES |= {"intermediate_size": 128, "encoder_hidden_size": 96, "encoder_intermediate_size": 128}
ACE_15 = told(
    "small_ace_15", "ace.ace_step15.AceStepConditionGenerationModel", 133, ACE_15_SIZES | {"encoder_num_heads": 6}
)
SOUND_RULES = (Rule(r"gamma$", std=0.1, mean=1.0), Rule(r"inv_freq$", std=0.1, mean=0.4))
SOUND_SIZES = {"io_channels": 64, "embed_dim": 768, "cond_token_dim": 768, "global_cond_dim": 1536, "depth": 2}
SOUND_SIZES |= {"num_heads": 12}
SOUND_3_SIZES = SOUND_SIZES | {"io_channels": 256, "global_cond_dim": 768, "global_cond_type": "adaLN"}
SOUND_3_SIZES |= {"global_cond_shared_embed": True, "local_add_cond_dim": 257, "num_memory_tokens": 20}
SOUND_3_SIZES |= {"timestep_features_type": "expo", "norm_type": "rms_norm"}
SOUND_3_SIZES |= {"attn_kwargs": {"qk_norm": "rms", "differential": True}}
SOUND_CLASS = "audio.dit.AudioDiffusionTransformer"
SOUND = told("small_stable_audio", SOUND_CLASS, 135, SOUND_SIZES, rules=SOUND_RULES)
SOUND_3 = told("small_stable_audio_3", SOUND_CLASS, 136, SOUND_3_SIZES, rules=SOUND_RULES)
