"""Stable Audio, which ComfyUI loads from checkpoints alone, and ACE-Step 1.5, with Parallelize Model beside stock.

Latents of sound have no previews, so these are no `Variant`s, whose runs are compared in them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from host.client import ComfyClient, Workflow
from host.layouts import Row
from host.pack_workflows import TOLERANCE, latent_of, relative_error
from host.tiny_models import write_layout

from .comfy_classes import shapes_of
from .conftest import Stock
from .files import ModelFile, Rule, row, write_model_files
from .graphs import node, plain, prompts, second_text
from .hosted import VISIBLE, parallelized

CLASS, WIDTH = "comfy.ldm.audio.dit.AudioDiffusionTransformer", 768  # of text and of the seconds, as ComfyUI fixes it
RULES = (Rule(r"gamma$", std=0.1, mean=1.0), Rule(r"inv_freq$", std=0.3), Rule(r"to_scale_shift_gate", std=0.3))
# 3: differential attention, 20 tokens of its own, what is to be kept added in each block. 1: as wide as it is made.
THREE = {"io_channels": 256, "embed_dim": 192, "num_heads": 3, "depth": 2, "global_cond_dim": WIDTH}
THREE |= {"attn_kwargs": {"qk_norm": "rms", "differential": True}, "norm_type": "rms_norm", "num_memory_tokens": 20}
THREE |= {"global_cond_shared_embed": True, "global_cond_type": "adaLN", "local_add_cond_dim": 257}
THREE |= {"timestep_features_type": "expo", "project_cond_tokens": True}
STABLE = {"stable_audio_1": {"depth": 1}, "stable_audio_3": THREE}
SECONDS = {"seconds_start": (128, 257), "seconds_total": (128, 257)}

# What ComfyUI's detection fixes of 1.5 makes a file of 0.6 GB in bf16; of 150 tokens, half of the layers attend to 128.
ACE = ModelFile(
    name="tiny_ace_step_15.safetensors",
    class_path="comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
    arguments={"hidden_size": 128, "num_heads": 8, "intermediate_size": 256, "num_dit_layers": 2}
    | {"encoder_num_heads": 8, "encoder_intermediate_size": 64},
    seed=96,
    dtype=torch.bfloat16,
)


def rows(arguments: dict) -> list[Row]:
    """A checkpoint: the transformer, and what ComfyUI makes its seconds of."""
    transformer = shapes_of({"": (CLASS, arguments)})[""]
    found = [row(f"model.model.{name}", tuple(shape), RULES) for name, shape in transformer.items()]
    for name in ("seconds_start", "seconds_total"):
        path = f"conditioner.conditioners.{name}.embedder.embedding"
        learned = arguments.get("timestep_features_type") != "expo"
        found += [Row(f"{path}.0.weights", (128,), 1.0)] if learned else []
        found += [Row(f"{path}.1.weight", (WIDTH, 257 if learned else 256), 0.05), Row(f"{path}.1.bias", (WIDTH,), 0.1)]
    return found


@pytest.fixture(scope="module", autouse=True)
def files(family_models: Path) -> Iterator[None]:
    """The checkpoints."""
    folder = family_models / "checkpoints"
    folder.mkdir(exist_ok=True)
    made = [write_layout(folder / f"{name}.safetensors", rows(each), seed=95) for name, each in STABLE.items()]
    yield
    for path in made:
        path.unlink()


def sound(file: str, *, seconds: float = 1.6, seed: int = 7) -> Workflow:
    """A stock graph at cfg 3, of 34 tokens; prompts of unequal length."""
    graph = plain(file, cfg=3.0, seed=seed, steps=2)
    graph["model"] = node("CheckpointLoaderSimple", ckpt_name=f"{file}.safetensors")
    prompts(graph, width=WIDTH, tokens=11, negative_tokens=7)
    graph["latent"] = node("EmptyLatentAudio", seconds=seconds, batch_size=1)
    return graph


@pytest.mark.full
@pytest.mark.parametrize("plan", ["ulysses 2", "cfg 2"])
@pytest.mark.parametrize("file", STABLE)
def test_stable_audio_equals_stock(file: str, plan: str, hosted_client: ComfyClient, stock: Stock) -> None:
    right = stock(sound(file))
    assert relative_error(stock(sound(file, seed=8)), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, parallelized(sound(file), plan)), right) <= TOLERANCE


@pytest.mark.full
def test_ace_step_15_equals_stock(family_models: Path, hosted_client: ComfyClient, stock: Stock) -> None:
    (path,) = write_model_files(family_models / "diffusion_models", [ACE])
    graph = plain(ACE.name, cfg=3.0, seed=7, steps=1)
    prompts(graph, width=1024, tokens=11, negative_tokens=7)
    second_text(graph, "conditioning_lyrics", tokens=5, width=1024)
    graph["latent"] = node("EmptyAceStep1.5LatentAudio", seconds=12.0, batch_size=1)
    right = stock(graph)
    other = {**graph, "positive": node("RandomConditioning", tokens=11, width=1024, seed=99)}
    assert relative_error(stock(other), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, parallelized(graph)), right) <= TOLERANCE
    path.unlink()
