"""Inputs that are rare or wrong, with models of any family, beside stock ComfyUI in a real server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from host.client import ComfyClient, PromptRefusedError, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent
from host.server import ComfyServer
from parity.runner import Bench, seen

from .cases import CFG, CONTROL_PLAN, PLANS, Case
from .conftest import Stock
from .graphs import node
from .hosted import ours, small
from .variants import BY_NAME


def one_frame(graph: Workflow) -> None:
    """35 tokens."""
    graph["latent"]["inputs"]["length"] = 1


def uneven_sides(graph: Workflow) -> None:
    """15 x 9 latent pixels, of which patches take 2 x 2."""
    graph["latent"]["inputs"] |= {"width": 120, "height": 72}


def two_prompts_for_two(graph: Workflow) -> None:
    """Two videos; a second prompt, longer and for half of the steps, beside the first: calls of unequal rows."""
    graph["latent"]["inputs"]["batch_size"] = 2
    graph["more"] = node("RandomConditioning", tokens=17, width=48, seed=31)
    graph["half"] = node("ConditioningSetTimestepRange", conditioning=["more", 0], start=0.0, end=0.5)
    graph["both"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["half", 0])
    graph["sampler"]["inputs"]["positive"] = ["both", 0]


def no_sound(graph: Workflow) -> None:
    """A thousandth of a second, which is no frame of sound."""
    graph["sound"]["inputs"] |= {"frames_number": 1, "frame_rate": 1000.0}


def odd(name: str, what: str, edit: Callable[[Workflow], None]) -> Case:
    """A variant with another input, at a cfg scale that asks for both prompts."""
    variant = BY_NAME[name]

    def add(graph: Workflow) -> None:
        variant.add(graph)
        edit(graph)

    return Case(replace(variant, name=f"{name}, {what}", add=add, latents=("save",)), CFG)


ODD = (
    (odd("wan 2.1 t2v", "one frame", one_frame), "ulysses 3"),
    (odd("wan 2.1 t2v", "sides that patches do not divide", uneven_sides), "ulysses 2"),
    (odd("wan 2.1 t2v", "a batch whose conditionings differ", two_prompts_for_two), "cfg 2 x ulysses 2, sharded"),
)


@pytest.fixture(scope="module")
def bench(hosted_server: ComfyServer) -> Bench:
    return Bench(ComfyClient(hosted_server.url), PLANS)


@pytest.mark.parametrize(("case", "plan"), [pytest.param(*each, id=each[0].name) for each in ODD])
def test_a_rare_input_equals_stock(case: Case, plan: str, bench: Bench) -> None:
    row, control = bench.compare(case, plan), bench.control(case, CONTROL_PLAN)
    row.require_equal()
    assert seen(control), control


def test_sound_of_no_seconds_is_refused_before_a_run_as_in_stock(hosted_client: ComfyClient) -> None:
    for graph in (BY_NAME["ltx-2 t2v"].graph(), parallel(BY_NAME["ltx-2 t2v"].graph(), mode="manual", ulysses=2)):
        graph["sound"]["inputs"]["frames_number"] = 0
        with pytest.raises(PromptRefusedError, match=r"smaller than min of 1: frames_number"):
            hosted_client.queue(graph)


def test_sound_of_no_frames_runs_where_stock_fails_in_the_model_and_the_next_prompt_is_right(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """LTX-2 gives the video alone then, which stock cannot pair with two latents; here no numbers are no numbers."""
    graph = BY_NAME["ltx-2 t2v"].graph(steps=2)
    no_sound(graph)
    result = hosted_client.queue(graph)
    assert (result.status, result.error_node) == ("error", "KSampler")
    assert saved_latent(hosted_client, hosted_client.queue(ours(graph))).isfinite().all()
    graph = BY_NAME["ltx-2 t2v"].graph(steps=2, seed=92)
    assert relative_error(saved_latent(hosted_client, hosted_client.queue(ours(graph))), stock(graph)) <= TOLERANCE


def test_a_file_in_another_familys_graph_is_one_error_and_the_next_prompt_is_right(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """Wan's nodes and texts with LTX's file, by the loader's earlier name too, which takes files of any family."""
    for loader in ("ParallelModelLoader", "ParallelFluxLoader"):
        wrong = ours(small(), loader=loader)
        wrong["model"]["inputs"]["unet_name"] = BY_NAME["ltx-video t2v"].file
        result = hosted_client.queue(wrong)
        said = result.error_line("KSampler")
        assert "LTXVModel is called with" in said and "as graphs of another model do" in said, said
        assert "attention_mask" in said, said
        right = ours(small(seed=91), loader=loader)
        assert relative_error(latent_of(hosted_client, right), stock(small(seed=91))) <= TOLERANCE
    plain = small()
    plain["model"]["inputs"]["unet_name"] = BY_NAME["ltx-video t2v"].file
    assert hosted_client.queue(plain).status == "error", "stock runs it"
