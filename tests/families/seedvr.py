"""SeedVR2 by one tensor of a block and the two that its node reads: with 3 billion weights more, nobody runs it."""

from host.client import Workflow
from host.layouts import Row

from .graphs import through
from .variant import Variant


def video_to_video(graph: Workflow) -> None:
    """SeedVR2's own prompts, which its node reads from the model."""
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", width=64, height=64, length=5, batch_size=1)
    inputs = {"model": ["model", 0], "vae_conditioning": ["latent", 0]}
    through(graph, "prompts", "SeedVR2Conditioning", "positive", "negative", **inputs)


SEEDVR2 = Variant(name="seedvr2", family="SeedVR2", file="tiny_seedvr2.safetensors", add=video_to_video)
ROWS = [Row("blocks.31.mlp.all.proj_in_gate.weight", (8, 8), 0.1)]
ROWS += [Row("positive_conditioning", (58, 5120), 1.0), Row("negative_conditioning", (64, 5120), 1.0)]
