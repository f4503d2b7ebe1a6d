"""Step caches under every plan: ComfyUI's EasyCache and LazyCache, our first-block cache; and heads as fp8."""

import re
from typing import Any

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, PromptRefusedError, PromptResult, Workflow
from host.pack_workflows import parallel, parallelized, relative_error, saved_latent
from host.server import ComfyServer

from .conftest import Stock
from .hosted import VISIBLE, between
from .variants import BY_NAME

STEPS = 6
WAN, FLUX = "wan 2.1 t2v", "flux.1 t2i"
LOADER = "ParallelModelLoader"
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ulysses 2": {"ulysses": 2},
    "ring 2": {"ring": 2},
    "cfg 2": {"cfg": 2},
    "pipefusion 2": {"pipefusion": 2, "warmup_steps": STEPS},  # warm-up throughout, which is exact
}
SKIPPED = re.compile(r"(\w+) - skipped (\d+)/(\d+) steps")
LOOPS = {"host": "host", "auto": "resident"}
THRESHOLD = 0.3
INPUTS = {"reuse_threshold": 0.5, "start_percent": 0.1, "end_percent": 0.95, "verbose": False}


def ours(graph: Workflow, plan: str, *, loop: str = "auto", sampler: str = "ParallelSampler", **more: Any) -> Workflow:
    config = {"devices": "cpu:4", "mode": "manual", **PLANS[plan], **more}
    graph = parallel(graph, loader=LOADER, sampler=sampler, **config)
    graph["sampler"]["inputs"]["loop"] = loop
    return graph


STAGED = "a step cache decides between the steps of a pipeline"
CASES = [(FLUX, "EasyCache", "cfg 2"), (FLUX, "LazyCache", "ring 2"), (WAN, "EasyCache", "pipefusion 2")]


@pytest.mark.parametrize(("family", "cache", "plan"), CASES)
def test_stocks_caches_skip_the_same_steps_under_every_plan_and_are_counted(
    family: str, cache: str, plan: str, hosted_client: ComfyClient, hosted_server: ComfyServer, stock: Stock
) -> None:
    plain = BY_NAME[family].graph(cfg=3.0, seed=500 + CASES.index((family, cache, plan)), steps=STEPS)
    graph, before = between(plain, "cache", cache, **INPUTS), len(hosted_server.log)
    right = stock(graph)
    result = hosted_client.queue(ours(graph, plan))
    assert relative_error(saved_latent(hosted_client, result), right) <= ROUNDING
    one, two = SKIPPED.findall(hosted_server.log[before:])
    assert one == two, "other steps than stock's"
    assert one[0] == cache and 0 < int(one[1]) < STEPS
    assert relative_error(stock(plain), right) > VISIBLE
    report = result.report()
    told = {"name": cache, "threshold": 0.5, "counts": "steps", "skipped": int(one[1]), "of": STEPS}
    assert report["step_caches"] == [told]
    staged = plan == "pipefusion 2"
    assert report["loop"] == ({"kind": "host", "reason": STAGED} if staged else {"kind": "resident"})


def test_a_cache_that_is_another_in_the_ranks_is_seen(hosted_client: ComfyClient, stock: Stock) -> None:
    """The negative control: a quarter of the threshold."""
    graph = BY_NAME[FLUX].graph(cfg=3.0, seed=510, steps=STEPS)
    graph = between(graph, "cache", "EasyCache", **INPUTS)
    result = hosted_client.queue(ours(between(graph, "wrong", "SwitchLoopWrong", way="threshold"), "cfg 2"))
    assert result.report()["loop"]["kind"] == "resident"
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) > VISIBLE


def first_block(result: PromptResult) -> dict[str, Any]:
    """What the report says of the first-block cache, the only one."""
    (told,) = result.report()["step_caches"]
    assert (told["name"], told["threshold"], told["counts"]) == ("first block", THRESHOLD, "calls")
    return dict(told)


def test_a_first_block_cache_skips_the_same_calls_under_every_plan_and_in_both_loops(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """Prompt and negative are one call here, which batch groups of cfg share."""
    graph = BY_NAME[WAN].graph(cfg=3.0, seed=531, steps=STEPS)
    exact = stock(graph)
    one = hosted_client.queue(ours(graph, "one rank", loop="host", step_cache=THRESHOLD))
    latent, skipped = saved_latent(hosted_client, one), first_block(one)["skipped"]
    assert first_block(one)["of"] == STEPS and 0 < skipped < STEPS
    assert VISIBLE < relative_error(latent, exact) < 0.5
    for plan, loop in (("one rank", "auto"), ("ulysses 2", "auto"), ("cfg 2", "host"), ("cfg 2", "auto")):
        result = hosted_client.queue(ours(graph, plan, loop=loop, step_cache=THRESHOLD))
        assert result.report()["loop"]["kind"] == LOOPS[loop]
        assert relative_error(saved_latent(hosted_client, result), latent) <= ROUNDING, (plan, loop)
        told, groups = first_block(result), PLANS[plan].get("cfg", 1)
        assert (told["skipped"], told["of"]) == (skipped * groups, STEPS * groups), (plan, loop)


def test_heads_that_travel_as_fp8_change_the_picture_and_are_named_by_the_report(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """Where ranks share no tokens nothing travels, and nothing is named."""
    graph = BY_NAME[WAN].graph(cfg=3.0, seed=533, steps=2)
    for plan, loop, rounded in (("ulysses 2", "auto", True), ("ring 2", "host", True), ("cfg 2", "auto", False)):
        result = hosted_client.queue(ours(graph, plan, loop=loop, exchange="fp8"))
        report, error = result.report(), relative_error(saved_latent(hosted_client, result), stock(graph))
        assert (report.get("exchange"), report["loop"]) == ("fp8" if rounded else None, {"kind": LOOPS[loop]})
        assert rounded == any("heads travel as fp8" in each for each in report.get("warnings", ()))
        assert (ROUNDING < error < 0.1) if rounded else error <= ROUNDING, (plan, error)


def test_with_ksampler_and_parallelize_model_on_one_device_too(hosted_client: ComfyClient) -> None:
    graph = BY_NAME[WAN].graph(cfg=3.0, seed=531, steps=STEPS)
    want = saved_latent(hosted_client, hosted_client.queue(ours(graph, "one rank", step_cache=THRESHOLD)))
    graph = parallelized(graph, mode="manual", devices="cpu:1", step_cache=THRESHOLD)
    assert relative_error(saved_latent(hosted_client, hosted_client.queue(graph)), want) <= ROUNDING


REFUSED = {
    "a U-Net": ("sdxl koala", "cfg 2", ("step_cache=0.3: UNetModel cannot skip blocks", "set step_cache to 0")),
    "blocks that take turns": ("wan 2.1 vace", "ulysses 2", ("VaceWanModel cannot skip", "take turns", "set step_cac")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_cannot_work_it_is_refused_in_one_line(name: str, hosted_client: ComfyClient) -> None:
    """By the route that SP Config's text on the page asks, too."""
    family, plan, parts = REFUSED[name]
    graph = ours(BY_NAME[family].graph(), plan, step_cache=THRESHOLD)
    result = hosted_client.queue(graph)
    said = result.error_line(LOADER)
    assert [part for part in parts if part not in said] == [], said
    values = graph["config"]["inputs"] | {"unet_name": graph["model"]["inputs"]["unet_name"]}
    assert hosted_client.get("/parallel_dit/plan", **values).get("error") == said


def test_with_stages_it_is_refused_before_anything_is_queued(hosted_client: ComfyClient) -> None:
    with pytest.raises(
        PromptRefusedError, match=r"SPConfig.*\n?.*step_cache=0.3 needs all blocks .* pipefusion=2 .*set st"
    ):
        hosted_client.queue(ours(BY_NAME[WAN].graph(), "pipefusion 2", step_cache=THRESHOLD))
