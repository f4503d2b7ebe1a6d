"""Stock latents of the families, each run once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from host.client import ComfyClient, Workflow
from host.pack_workflows import saved_latent
from host.server import ComfyServer
from host.tally import by_stock

from .hosted import QWEN
from .variants import write_families

Stock = Callable[[Workflow], torch.Tensor]


@pytest.fixture(scope="package")
def stock(hosted_server: ComfyServer) -> Stock:
    """Runs a stock graph and returns its latent; equal graphs run once."""
    client, kept = ComfyClient(hosted_server.url), {}

    def run(graph: Workflow) -> torch.Tensor:
        key = json.dumps(graph, sort_keys=True)
        if key not in kept:
            with by_stock():
                kept[key] = saved_latent(client, client.queue(graph))
        return kept[key]

    return run


@pytest.fixture
def qwen(family_models: Path) -> None:
    """Qwen-Image's file, which tests of the full tier alone write."""
    write_families(family_models, only=[QWEN.name])
