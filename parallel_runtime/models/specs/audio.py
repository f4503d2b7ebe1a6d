"""Plans of models of sound: ACE-Step 1.5, Stable Audio, MiniMax Music 3."""

from .spec import ShardingSpec

MUSIC = "diffusion_transformer.transformer"

SPECS = {
    "comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel": ShardingSpec(
        attention={"decoder.layers": {"self_attn": "x within sliding_window", "cross_attn": "local"}},
        cut={"decoder.layers.0": {"hidden_states": "x"}, "decoder.layers.*": {"position_embeddings": "x@0"}},
        gather={"decoder.layers.-1": "x"},
    ),
    "comfy.ldm.audio.dit.AudioDiffusionTransformer": ShardingSpec(
        attention={"transformer.layers": {"self_attn": "x", "cross_attn": "local"}},
        cut={
            "transformer.layers.0": {"x": "x"},
            # before the tokens of sound there are some of the model's own, for which nothing is added
            "transformer.layers.*": {"rotary_pos_emb": "x@0", "local_add_cond": "last:x"},
        },
        gather={"transformer.layers.-1": "x"},
        unless={"transformer.layers.*.self_attn": "feat_scale"},
    ),
    "comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT": ShardingSpec(
        each_call="diffusion_transformer",  # once for each 8 seconds
        attention={f"{MUSIC}.layers": "x"},
        cut={f"{MUSIC}.layers.0": {"x": "x"}, f"{MUSIC}.layers.*": {"rotation_matrix": "x@2"}},
        gather={f"{MUSIC}.layers.-1": "x"},  # the first token, of the timestep, is left out next
        unstaged="it runs all of its blocks for one part of the sound after another",
    ),
}
