"""LoRAs through the stock loader: on one branch of a graph alone, and for another model.

Does not own: that each kind equals stock, merged or beside (families/test_hosted_loras.py).
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import save_file

from host import workflows
from host.adapters import lora
from host.client import ComfyClient, Workflow
from host.pack_workflows import latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels

QKV = "double_blocks.0.img_attn.qkv"


def folder(tiny: TinyModels) -> Path:
    return tiny.models / "loras"


def small(tiny: TinyModels, *, seed: int = 5) -> Workflow:
    return to_latent(workflows.text_to_image(tiny, steps=1, width=96, height=64, seed=seed))


def stacked(graph: Workflow, *loras: tuple[str, float]) -> Workflow:
    """Loaders one behind the other between the model and the sampler."""
    for number, (name, strength) in enumerate(loras):
        inputs = {"model": graph["sampler"]["inputs"]["model"], "lora_name": name, "strength_model": strength}
        graph[f"lora{number}"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
        graph["sampler"]["inputs"]["model"] = [f"lora{number}", 0]
    return graph


def test_a_lora_on_one_branch_and_the_base_on_the_other(client: ComfyClient, tiny_models: TinyModels) -> None:
    """Two samplings in one graph share the weights in the workers and take turns with them."""
    graph = parallel(small(tiny_models))
    plain = latent_of(client, graph)
    both = stacked(copy.deepcopy(graph), (tiny_models.lora_fused, 1.0))
    both["second"] = copy.deepcopy(graph["sampler"])
    both["save second"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": ["second", 0], "filename_prefix": "second"},
    }
    result = client.queue(both)
    with_lora = latent_of(client, stacked(copy.deepcopy(graph), (tiny_models.lora_fused, 1.0)))
    assert relative_error(with_lora, plain) > 1e-2
    for node, expected in (("save", with_lora), ("save second", plain)):
        assert torch.equal(saved_latent(client, result, node=node), expected)


def test_a_lora_for_another_model_is_one_clear_error_and_the_next_prompt_is_fine(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    save_file(
        {f"diffusion_model.{QKV}.{name}": value for name, value in lora(48, 24).items()},
        folder(tiny_models) / "tiny_other_model.safetensors",
    )
    graph = stacked(parallel(small(tiny_models, seed=79)), ("tiny_other_model.safetensors", 1.0))
    result = client.queue(graph)
    assert result.status == "error"
    first_line = result.error_message.splitlines()[0]
    assert "[48, 4]" in first_line and "use one made for this model" in first_line
    client.queue(parallel(small(tiny_models, seed=79))).require_success()
