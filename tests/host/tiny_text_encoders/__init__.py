"""A ComfyUI node pack for test hosts only: a text-encoder loader that takes files of any width.

Owns: `TinyDualCLIPLoader`, which gives a real CLIP object with the real tokenizers. The stock DualCLIPLoader has the
published widths built in, so it cannot load a tiny file; inputs here are the same, so a workflow only swaps the class.
Does not own: the files (host.tiny_models). Linked into a test host's custom_nodes, never part of the pack.
"""

import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import ComfyExtension, io

StateDict = dict[str, torch.Tensor]


def clip_l_sizes(weights: StateDict) -> dict[str, int]:
    """CLIP-L's configuration read out of its shapes; heads of 16."""
    width = weights["text_model.final_layer_norm.weight"].shape[0]
    return {
        "hidden_size": width,
        "num_hidden_layers": count(weights, "text_model.encoder.layers.", 3),
        "num_attention_heads": max(1, width // 16),
        "intermediate_size": weights["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        "projection_dim": width,
    }


def t5_sizes(weights: StateDict) -> dict[str, int]:
    """T5's configuration read out of its shapes."""
    attention = "encoder.block.0.layer.0.SelfAttention"
    heads = weights[f"{attention}.relative_attention_bias.weight"].shape[1]
    return {
        "d_model": weights["encoder.final_layer_norm.weight"].shape[0],
        "d_kv": weights[f"{attention}.q.weight"].shape[0] // heads,
        "d_ff": weights["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"].shape[0],
        "num_layers": count(weights, "encoder.block.", 2),
        "num_heads": heads,
    }


def count(weights: StateDict, prefix: str, part: int) -> int:
    """How many layers there are: distinct values of the dotted name's `part` among the keys under `prefix`."""
    return len({key.split(".")[part] for key in weights if key.startswith(prefix)})


class TinyDualCLIPLoader(io.ComfyNode):
    """DualCLIPLoader's inputs and output; sizes from the files."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = folder_paths.get_filename_list("text_encoders")
        return io.Schema(
            node_id="TinyDualCLIPLoader",
            display_name="Tiny DualCLIP Loader (tests)",
            category="tests",
            inputs=[
                io.Combo.Input("clip_name1", options=files),
                io.Combo.Input("clip_name2", options=files),
                io.Combo.Input("type", options=["flux"]),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip_name1: str, clip_name2: str, type: str) -> io.NodeOutput:
        paths = [folder_paths.get_full_path_or_raise("text_encoders", name) for name in (clip_name1, clip_name2)]
        weights = [comfy.utils.load_torch_file(path) for path in paths]
        clip_l, t5 = sorted(weights, key=lambda each: "shared.weight" in each)  # either order, as the stock loader
        options = {
            "model_config": clip_l_sizes(clip_l),  # the name ComfyUI's CLIP-L loader reads for its own sizes
            "t5xxl_model_config": t5_sizes(t5),
        }
        clip = comfy.sd.load_text_encoder_state_dicts(weights, clip_type=comfy.sd.CLIPType.FLUX, model_options=options)
        return io.NodeOutput(clip)


class TinyTextEncoders(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TinyDualCLIPLoader]


async def comfy_entrypoint() -> TinyTextEncoders:
    return TinyTextEncoders()
