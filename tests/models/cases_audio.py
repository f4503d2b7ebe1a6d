"""ACE-Step 1.5, Stable Audio 1 and 3, MiniMax Music 3: mostly 35 tokens."""

from typing import Any

import torch
from torch import nn

from .tiny import Case, at, build, case, noise


@case("ACE-Step 1.5")
def _() -> Case:
    """Every second layer attends to the 4 tokens before and after."""
    sizes = {"in_channels": 48, "hidden_size": 96, "text_hidden_dim": 48, "timbre_hidden_dim": 16, "num_heads": 8}
    sizes |= {"audio_acoustic_hidden_dim": 16, "num_dit_layers": 2, "num_lyric_layers": 1, "num_timbre_layers": 1}
    sizes |= {"num_tokenizer_layers": 1, "num_kv_heads": 4, "head_dim": 16, "intermediate_size": 128, "fsq_dim": 96}
    sizes |= {"sliding_window": 4, "encoder_hidden_size": 96, "encoder_intermediate_size": 128, "encoder_num_heads": 8}
    model = build("comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel", **sizes, fsq_levels=[8, 5])
    given = {"x": noise(2, 16, 69), "timestep": at(0.7, 0.7), "context": noise(2, 9, 48)}
    return model, given | {"lyric_embed": noise(2, 5, 48), "refer_audio": noise(2, 16, 69), "is_covers": False}


def stable_audio(**config: Any) -> nn.Module:
    """Stable Audio."""
    sizes = {"io_channels": 16, "embed_dim": 192, "cond_token_dim": 64, "global_cond_dim": 32, "depth": 2}
    model = build("comfy.ldm.audio.dit.AudioDiffusionTransformer", **sizes | {"num_heads": 3} | config)
    for name, weight in model.named_parameters():
        if name.endswith("gamma"):
            weight.add_(2.0 if "q_norm" in name else 1.0)  # scales, which are called so here alone
    model.transformer.rotary_pos_emb.inv_freq.copy_(10000 ** -(torch.arange(16) / 16))  # files hold it
    return model


def sound(tokens: int, **more: Any) -> dict[str, Any]:
    """A call of Stable Audio."""
    given = {"x": noise(2, 16, tokens), "timestep": at(0.7, 0.7), "context": noise(2, 9, 64)}
    return given | {"global_embed": noise(2, 32)} | more


case("Stable Audio 1")(lambda: (stable_audio(num_heads=6), sound(34)))


@case("Stable Audio 3, what is to be kept, more tokens of its own than one rank has")
def _() -> Case:
    config = {"global_cond_type": "adaLN", "global_cond_shared_embed": True, "local_add_cond_dim": 17}
    config |= {"num_memory_tokens": 20, "timestep_features_type": "expo", "norm_type": "rms_norm"}
    model = stable_audio(**config, attn_kwargs={"qk_norm": "rms", "differential": True})
    return model, sound(33, local_add_cond=noise(2, 17, 33))


MUSIC = ("comfy.ldm.minimax_music.dit", "class MiniMaxMusic3DiT")


def music(frames: int) -> Case:
    """MiniMax Music 3, whose class fixes all sizes: its transformer is put together anew, small, of the class's parts.

    `frames` of the text model's, of which 200 make a window of 689 latents.
    """
    from comfy.ldm.minimax_music import dit
    from comfy.ops import manual_cast

    whole, small = dit.ContinuousTransformer, {"dtype": torch.float32, "device": "cpu", "operations": manual_cast}

    class Small(nn.Module):
        """Two blocks of 6 heads of 16 in the place of 36 of 32 of 64; its forward is the class's."""

        def __init__(self, *_: object) -> None:
            super().__init__()
            self.project_in = nn.Linear(2304, 96, bias=False)
            self.project_out = nn.Linear(96, 128, bias=False)
            self.rotary_pos_emb = dit.RotaryEmbedding(8, torch.float32, "cpu")
            self.layers = nn.ModuleList([dit.TransformerBlock(96, 16, 192, **small) for _ in range(2)])

        forward = whole.forward

    dit.ContinuousTransformer = Small
    try:
        model = build("comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT")
    finally:
        dit.ContinuousTransformer = whole
    transformer = model.diffusion_transformer
    for part in transformer.to_timestep_embed[2].parameters():  # to as wide a token
        part.data = part.data[:96]
    for name, weight in (*transformer.named_parameters(), *transformer.named_buffers()):
        if name.endswith("gamma"):
            weight.add_(1.0)
        elif name.endswith("beta"):  # files hold it
            weight.copy_(noise(96) * 0.1)
    transformer.transformer.rotary_pos_emb.inv_freq.copy_(10000 ** -(torch.arange(4) / 4))  # files hold it
    given = {"x": noise(1, 128, dit.latent_length(frames)), "timestep": at(0.7), "context": noise(1, frames, 8 * 4096)}
    return model, given | {"conditioning_scale": torch.ones(1, 1, 1)}


case("MiniMax Music 3, 10 frames", of=MUSIC)(lambda: music(10))
case("MiniMax Music 3, windows of two lengths", of=MUSIC)(lambda: music(210))
