"""ComfyUI's own sampler nodes with a parallel MODEL: their loop runs in the workers, unless something looks at a step.

Where a loop ran is seen by a run whose loop in the workers is wrong on purpose: a loop in ComfyUI does not mind.
"""

from typing import Any

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import relative_error, saved_latent
from host.server import ComfyServer
from parity.edits import HERE, custom_sampling
from parity.runner import parallelized

from .conftest import Stock
from .graphs import node
from .hosted import VISIBLE, WAN, between

PLAN: dict[str, Any] = {"devices": "cpu:2", "ulysses": 2}
STEPS = 3


def ksampler() -> Workflow:
    return WAN.graph(cfg=3.0, steps=STEPS)


def advanced() -> Workflow:
    """Some steps of a run, which leaves noise behind."""
    graph = ksampler()
    given = graph["sampler"]["inputs"]
    given.pop("denoise", None)
    seed = given.pop("seed")
    given |= {"add_noise": "enable", "noise_seed": seed, "start_at_step": 1, "end_at_step": STEPS}
    given |= {"return_with_leftover_noise": "enable", "steps": STEPS + 1}
    graph["sampler"]["class_type"] = "KSamplerAdvanced"
    return graph


def custom(select: Any = None) -> Workflow:
    """With SamplerCustom; `select` is the node that makes the SAMPLER, Euler by default."""
    graph = ksampler()
    given = graph["sampler"]["inputs"]
    graph["select"] = select or node("KSamplerSelect", sampler_name="euler")
    model = given["model"]
    graph["sigmas"] = node("BasicScheduler", model=model, scheduler="simple", steps=STEPS, denoise=1.0)
    wanted = {name: given[name] for name in ("model", "positive", "negative", "latent_image", "cfg")}
    links = {"sampler": ["select", 0], "sigmas": ["sigmas", 0]}
    graph["sampler"] = node("SamplerCustom", **wanted, **links, noise_seed=given["seed"], add_noise=True)
    return graph


def with_guider(kind: str, **inputs: Any) -> Workflow:
    """With SamplerCustomAdvanced, a guider of this class, and a sampler that has options of its own."""
    graph = ksampler()
    custom_sampling(kind, **inputs)(graph)
    options = {"solver_type": "midpoint", "eta": 1.0, "s_noise": 1.0, "noise_device": "cpu"}
    return graph | {"select": node("SamplerDPMPP_2M_SDE", **options)}


GRAPHS = {
    "KSampler": ksampler(),
    "KSampler (Advanced)": advanced(),
    "SamplerCustom": custom(),
    "SamplerCustomAdvanced, CFGGuider": with_guider("CFGGuider", positive=HERE, negative=HERE, cfg=HERE),
}


def ours(graph: Workflow, **config: Any) -> Workflow:
    return parallelized(graph, **PLAN, **config)


def wrong(graph: Workflow) -> Workflow:
    """The same graph of ours, its loop in the workers wrong on purpose."""
    return between(graph, "wrong", "SwitchLoopWrong", way="local_attention")


def progress_of(result: PromptResult) -> list[tuple[float, float]]:
    return [(each.value, each.max) for each in result.progress if each.node == "sampler"]


@pytest.mark.parametrize("name", GRAPHS)
def test_stock_samplers_run_their_loop_in_the_workers(name: str, hosted_client: ComfyClient) -> None:
    graph = GRAPHS[name]
    if "Custom" in name:
        graph = graph | {"denoised": node("SaveLatent", samples=["sampler", 1], filename_prefix="denoised")}
    stock, mine = hosted_client.queue(graph), hosted_client.queue(ours(graph))
    for saves in ["save", *(["denoised"] if "Custom" in name else [])]:
        latents = [saved_latent(hosted_client, each, node=saves) for each in (mine, stock)]
        assert relative_error(*latents) <= ROUNDING, saves
    assert progress_of(mine) == progress_of(stock)
    assert len(mine.previews) == len(stock.previews) > 0
    assert not any("The loop stays" in text for _, text in mine.texts)
    seen = hosted_client.queue(wrong(ours(graph)))
    assert relative_error(saved_latent(hosted_client, seen), saved_latent(hosted_client, stock)) > VISIBLE


def test_the_steps_are_drawn_in_the_log_as_comfyuis_loop_draws_them(
    hosted_client: ComfyClient, hosted_server: ComfyServer
) -> None:
    """A run of a number of steps that no other one has."""
    for number, loop in ((7, "auto"), (11, "host")):
        hosted_client.queue(ours(WAN.graph(cfg=3.0, steps=number), loop=loop)).require_success()
        assert f" {number}/{number} [" in hosted_server.log, loop


def test_sp_config_keeps_the_loop_in_comfyui(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = wrong(ours(ksampler(), loop="host"))
    assert relative_error(saved_latent(hosted_client, hosted_client.queue(graph)), stock(ksampler())) <= ROUNDING


LOOKS = {
    "callback": "looks at each step",
    "state": "a node looks at each step (look)",
    "function": "replaces cfg_function of ComfyUI",
    "batch": "replaces _calc_cond_batch of ComfyUI",
    "class": "replaces BaseModel._apply_model of ComfyUI",
    "instance": "replaces process_timestep of ComfyUI",
    "guider": "the guider is a ScaleByStep",
}


@pytest.mark.parametrize("way", LOOKS)
def test_the_loop_stays_where_a_node_looks_at_each_step(way: str, hosted_client: ComfyClient, stock: Stock) -> None:
    graph = between(ksampler(), "look", "LookAtSteps", way=way)
    check_looked(hosted_client, stock(ksampler()), graph, LOOKS[way])


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("function", "the sampler is one of"),
        ("objects", "the sampler is one of"),
        ("instance", "the sampler has its own sample"),
    ],
)
def test_the_loop_stays_with_a_sampler_of_a_pack(
    way: str, reason: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    check_looked(hosted_client, stock(custom()), custom(node("SampleByPack", way=way)), reason)


def test_the_loop_stays_with_a_guider_that_asks_otherwise(hosted_client: ComfyClient) -> None:
    positive = ksampler()["sampler"]["inputs"]["positive"]
    numbers = {"cfg_conds": 2.0, "cfg_cond2_negative": 1.5, "style": "regular"}
    graph = with_guider("DualCFGGuider", cond1=positive, cond2=positive, negative=positive, **numbers)
    stock, mine = hosted_client.queue(graph), check_stays(hosted_client, graph, "the guider is a Guider_DualCFG")
    assert progress_of(mine) == progress_of(stock), "a step is told later, and each is told"
    assert len(mine.previews) == len(stock.previews) > 0


def check_looked(client: ComfyClient, right: Any, graph: Workflow, reason: str) -> None:
    """The run stays in ComfyUI, says why, and whoever looks has seen every step."""
    graph = graph | {"looks": node("ReportLooks", latent=["sampler", 0])}
    result = check_stays(client, graph, reason)
    assert relative_error(saved_latent(client, result), right) <= ROUNDING
    assert result.outputs["looks"]["looks"][0] >= STEPS


def check_stays(client: ComfyClient, graph: Workflow, reason: str) -> PromptResult:
    """The run of ours, whose loop in the workers would be wrong."""
    result = client.queue(wrong(ours(graph))).require_success()
    said = [text for name, text in result.texts if name == "sampler" and "The loop stays in ComfyUI: " in text]
    assert said and all(reason in text for text in said), result.texts
    return result
