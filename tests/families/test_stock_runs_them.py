"""Stock ComfyUI recognises every tiny file, loads it whole and runs every graph, and the results are worth comparing.

If one of these fails, a failure of our nodes on that variant says nothing about our nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from host.client import ComfyClient, Workflow
from host.pack_workflows import relative_error, saved_latent
from host.server import ComfyServer
from host.tally import by_stock

from .comfy_classes import detected
from .variants import BY_NAME, FAMILIES, FILES, SMALL, Variant, write_families

VISIBLE = 1e-3  # 100 x the tolerance of parity: what moves the latent less than this could not be judged
SANE_STD = (0.05, 20.0)

Latents = list[torch.Tensor]
# By the module, so that all tests of a variant follow each other and the server loads each file once.
each_variant = pytest.mark.parametrize("variant", FAMILIES, ids=lambda variant: variant.name, scope="module")


@pytest.fixture(scope="module")
def latents(hosted_server: ComfyServer, family_models: Path) -> Callable[..., Latents]:
    """What a variant's graph saves, each graph run once."""
    client, kept = ComfyClient(hosted_server.url), {}

    def run(variant: Variant, edit: Callable[[Workflow], None] = lambda graph: None, **settings: float) -> Latents:
        key = (variant.name, edit, *settings.items())
        if key not in kept:
            write_families(family_models, only=[variant.name])
            graph = variant.graph(**settings)
            edit(graph)
            with by_stock():
                result = client.queue(graph)
                kept[key] = [saved_latent(client, result, node=name) for name in variant.latents]
        return kept[key]

    return run


def in_halves(graph: Workflow) -> None:
    """The sampler's model, without attention between the halves of its tokens."""
    inputs = graph["sampler"]["inputs"]
    graph["halves"] = {"class_type": "AttendInHalves", "inputs": {"model": inputs["model"]}}
    inputs["model"] = ["halves", 0]


@dataclass(frozen=True)
class Other:
    """An edit of a graph: another value for one input of one node."""

    node: str
    slot: str
    value: Any

    def __call__(self, graph: Workflow) -> None:
        """Edits."""
        graph[self.node]["inputs"][self.slot] = self.value


# Inputs that say what a graph is given; the negative prompt counts above cfg 1 alone.
OTHER_VALUES = {"seed": 99, "prompt": "a market in the sun", "camera_pose": "Pan Up", "strength": 0.4}


def given(variant: Variant) -> list[Other]:
    """An edit for everything that a graph is given."""
    return [
        Other(name, slot, value)
        for name, node in variant.graph().items()
        for slot, value in OTHER_VALUES.items()
        if slot in node["inputs"] and name != "sampler" and not name.startswith("negative")
    ]


def differences(some: Latents, others: Latents) -> list[float]:
    """The relative error of each saved latent."""
    return [relative_error(one, other) for one, other in zip(some, others, strict=True)]


@pytest.mark.full
@each_variant
def test_the_result_is_finite_and_of_a_sane_size(variant: Variant, latents: Callable[..., Latents]) -> None:
    for cfg in (1.0, 3.0):
        for latent in latents(variant, cfg=cfg):
            assert torch.isfinite(latent).all()
            assert SANE_STD[0] < latent.std() < SANE_STD[1]


@pytest.mark.full
@each_variant
def test_seed_and_cfg_change_the_result(variant: Variant, latents: Callable[..., Latents]) -> None:
    plain = latents(variant, cfg=1.0)
    for other in (latents(variant, cfg=1.0, seed=8), latents(variant, cfg=3.0)):
        assert min(differences(plain, other)) > 10 * VISIBLE


@pytest.mark.full
@each_variant
def test_attention_between_distant_tokens_shows_in_every_latent(
    variant: Variant, latents: Callable[..., Latents]
) -> None:
    assert min(differences(latents(variant, cfg=1.0), latents(variant, in_halves, cfg=1.0))) > VISIBLE


@pytest.mark.full
@each_variant
def test_whatever_a_graph_is_given_shows_in_its_latents(variant: Variant, latents: Callable[..., Latents]) -> None:
    plain = latents(variant, cfg=1.0)
    moved = {other: min(differences(plain, latents(variant, other, cfg=1.0))) for other in given(variant)}
    assert moved
    assert {other: error for other, error in moved.items() if error <= VISIBLE} == {}


@pytest.mark.parametrize(
    "names", [SMALL, pytest.param([name for name in BY_NAME if name not in SMALL], marks=pytest.mark.full)]
)
def test_every_file_is_detected_as_its_class_with_exactly_its_tensors(names: list[str], family_models: Path) -> None:
    folder = write_families(family_models, only=names) / "diffusion_models"
    files = {str(folder / BY_NAME[name].file): FILES[BY_NAME[name].file] for name in names}
    files = {path: file for path, file in files.items() if Path(path).exists()}  # of classes that this ComfyUI has
    for path, found in detected(list(files)).items():
        assert found == {"class": files[path].class_path, "missing": [], "unexpected": []}
