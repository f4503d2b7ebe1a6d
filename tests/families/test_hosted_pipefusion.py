"""PipeFusion from ComfyUI of a model that ComfyUI's modules compute: equal to stock while it warms up, refused by name.

Owns Wan in a real server. Other families beside stock are `tools.model_matrix --plan "pipefusion 2"`; what a pipeline
computes after its warm-up is tests/models/test_hosted_pipelines.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, to_latent

from .conftest import Stock
from .graphs import node
from .hosted import VISIBLE, between, small, with_loras
from .test_hosted_loras import file_of, loras  # noqa: F401  a fixture
from .variants import BY_NAME

STEPS = 3
LOADER = "ParallelModelLoader"


def piped(graph: Workflow, **plan: Any) -> Workflow:
    """The same graph in stages."""
    return parallel(graph, loader=LOADER, **{"devices": "cpu:4", "mode": "manual", "pipefusion": 2} | plan)


@pytest.mark.parametrize(
    "plan",
    [
        {"cfg": 2},
        pytest.param({"pipefusion": 3, "patches": 4}, marks=pytest.mark.full),
        pytest.param({"ulysses": 2, "weights": "sharded"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_with_a_lora_and_a_negative_a_pipeline_in_warm_up_equals_stock(
    plan: dict[str, Any],
    hosted_client: ComfyClient,
    stock: Stock,
    loras: Path,  # noqa: F811
) -> None:
    """The LoRA changes blocks of every stage; the two prompts are one batch or two calls."""
    graph = with_loras(small(steps=STEPS), (file_of("Wan", "lora_alpha"), 0.8))
    right = stock(graph)
    assert relative_error(stock(small(steps=STEPS)), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, piped(graph, warmup_steps=STEPS, **plan)), right) <= TOLERANCE


def test_after_its_warm_up_two_stages_and_three_make_the_same_and_not_stocks(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    graph = small(steps=STEPS)
    two, three = (latent_of(hosted_client, piped(graph, pipefusion=stages, patches=4)) for stages in (2, 3))
    assert relative_error(two, three) <= TOLERANCE
    assert 1e-5 < relative_error(two, stock(graph)) < 0.5


def test_prompts_of_unequal_length_have_keys_of_their_own(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = small(steps=STEPS)
    graph["longer"] = node("ConditioningConcat", conditioning_to=["negative", 0], conditioning_from=["positive", 0])
    graph["sampler"]["inputs"]["negative"] = ["longer", 0]
    right = stock(to_latent(graph))
    assert relative_error(stock(to_latent(small(steps=STEPS))), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, piped(graph, warmup_steps=STEPS)), right) <= TOLERANCE
    two, three = (latent_of(hosted_client, piped(graph, pipefusion=stages, patches=3)) for stages in (2, 3))
    assert relative_error(two, three) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "plan", "parts"),
    [
        ("wan 2.1 vace", {}, ("pipefusion=2: VaceWanModel cannot run in stages", "take turns", "use pipefusion=1")),
        ("wan 2.1 t2v", {"pipefusion": 4}, ("pipefusion=4 is more stages than the model's 3 blocks", "at most 3")),
    ],
)
def test_what_cannot_be_in_stages_is_refused_in_one_line_before_workers_are_asked(
    model: str, plan: dict[str, Any], parts: tuple[str, ...], hosted_client: ComfyClient
) -> None:
    before = [pool["generation"] for pool in hosted_client.get("/parallel_dit/state")["pools"]]
    result = hosted_client.queue(piped(BY_NAME[model].graph(), **plan))
    assert (result.status, result.error_node) == ("error", LOADER), result.error_message
    said = result.error_message.splitlines()[0]
    assert [part for part in parts if part not in said] == [], said
    assert [pool["generation"] for pool in hosted_client.get("/parallel_dit/state")["pools"]] == before


def test_windows_of_a_long_video_do_not_read_each_others_keys(hosted_client: ComfyClient, stock: Stock) -> None:
    """Their conditionings are the same and so are their shapes: each goes through whole, after the warm-up too."""
    windows = {"context_length": 9, "context_overlap": 4, "context_schedule": "standard_static", "context_stride": 1}
    windows |= {"closed_loop": False, "fuse_method": "pyramid", "freenoise": True}
    windows |= {"retain_first_frame": False, "split_conds_to_windows": False}
    graph = between(small(steps=STEPS), "windows", "WanContextWindowsManual", **windows)
    right = stock(graph)
    assert relative_error(stock(small(steps=STEPS)), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, piped(graph)), right) <= TOLERANCE
