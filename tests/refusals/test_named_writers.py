"""The node that a refusal names is the one that did it: among several of its class, and behind somebody's `except`."""

import copy
import itertools

import pytest
import torch

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import latent_of
from host.server import ComfyServer
from host.tiny_models import TinyModels
from host.workflows import node

from .cases import LATER, REACH, between, ours, patched_by


def test_a_node_that_hides_the_cause_shows_it_as_its_text(client: ComfyClient, tiny_models: TinyModels) -> None:
    result = client.queue(between(LATER, way="compile or say little")(tiny_models))
    assert "Failed to compile model" in result.error_message
    texts = "\n".join(text for name, text in result.texts if name == "between")
    assert "RefusedLater (node between): it compiles the transformer in this process" in texts
    assert "set compiled=blocks in SP Config" in texts


def test_a_refusal_that_a_node_caught_goes_with_the_node(client: ComfyClient, tiny_models: TinyModels) -> None:
    """The MODEL that it asked is the loader's, which ComfyUI keeps."""
    graph = between(LATER, way="read and go on")(tiny_models)
    for _ in range(2):  # the second time ComfyUI has the node's result
        assert "RefusedLater (node between): it reads" in client.queue(graph).error_line("KSampler")
    client.queue(ours(tiny_models)).require_success()


def two_samplers(tiny: TinyModels, *, refused: str) -> Workflow:
    """The latent of one sampler goes into another, each behind a node of its own; one of both writes an override."""
    graph = ours(tiny)
    for name, source in (("first", "sampler"), ("second", "next")):
        way = "override attention" if name == refused else "none"
        graph[name] = node(REACH, model=["model", 0], way=way)
        if source == "next":
            graph["next"] = copy.deepcopy(graph["sampler"])
            graph["next"]["inputs"] |= {"latent_image": ["sampler", 0], "seed": 5}
        graph[source]["inputs"]["model"] = [name, 0]
    graph["save"]["inputs"]["samples"] = ["next", 0]
    return graph


@pytest.mark.parametrize("refused", ["first", "second"])
def test_of_two_nodes_of_a_class_the_one_that_wrote_is_named(
    refused: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    said = client.queue(two_samplers(tiny_models, refused=refused)).error_line("KSampler")
    assert said.startswith(f"ReachIntoModel (node {refused}): it patches"), said


@pytest.mark.parametrize("ways", [("override attention", "none"), ("none", "override attention")], ids=str)
def test_of_two_nodes_of_a_class_behind_each_other_the_one_that_wrote_is_named(
    ways: tuple[str, str], client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = workflows.between(between(REACH, way=ways[0])(tiny_models), "other", REACH, way=ways[1])
    wrote = "other" if ways[0] == "none" else "between"
    assert client.queue(graph).error_line("KSampler").startswith(f"ReachIntoModel (node {wrote}): it patches")


def test_two_nodes_that_patch_blocks_have_a_line_each(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = between(REACH, way="override attention")(tiny_models)
    graph = workflows.between(graph, "other", LATER, way="write a block")
    lines = client.queue(graph).error_message.splitlines()
    assert any(line.startswith("RefusedLater (node other): it patches") and "single_block 1" in line for line in lines)
    assert any(line.startswith("ReachIntoModel (node between): it patches") for line in lines), lines


def test_an_object_in_the_options_is_told_by_the_node_that_put_it_there(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    said = client.queue(patched_by(LATER, way="keep object")(tiny_models)).error_line("KSampler")
    assert said.startswith("RefusedLater (node between): it adds "), said
    assert "transformer_options.frames_kept, a Projector" in said


KNOWN = ("method for good", "value for good", "hook", "class", "wrapped")  # whose it is
FOR_GOOD = (*KNOWN, "layer of torch")


def test_what_a_node_changed_for_good_is_taken_back_once_the_node_is_gone(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """The loader's MODEL is kept, and with it what the node did to its modules."""
    right = latent_of(client, ours(tiny_models))
    for way in FOR_GOOD:
        graph = between("ChangeModules", way=way)(tiny_models)
        for _ in range(2):  # the second time ComfyUI has the node's result
            assert "ChangeModules (node between): it " in client.queue(graph).error_line("KSampler")
        assert torch.equal(latent_of(client, ours(tiny_models)), right), way


def test_what_was_taken_back_is_refused_again_where_comfyui_keeps_older_results(tiny_models: TinyModels) -> None:
    """As it does by default on a machine of more than 128 GiB: it does not run the node again, nor what it changed."""
    plain = ours(tiny_models)
    with ComfyServer(models=tiny_models.models, flags=("--cache-lru", "50")) as server:
        client = ComfyClient(server.url)
        for way in KNOWN:
            graph = between("ChangeModules", way=way)(tiny_models)
            said = client.queue(graph).error_line("KSampler")
            for _ in range(2):
                plain["sampler"]["inputs"]["seed"] += 1  # or its result is kept, too
                assert "sampler" not in client.queue(plain).require_success().cached, way
                assert client.queue(graph).error_line("KSampler") == said, way
            plain["sampler"]["inputs"]["seed"] += 1
            client.queue(plain).require_success()


def test_a_node_of_the_same_pack_is_not_blamed_once_the_one_that_changed_the_model_is_gone(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    for way in KNOWN:
        graph = workflows.between(between("ChangeModules", way=way)(tiny_models), "other", REACH, way="none")
        assert client.queue(graph).error_line("KSampler").startswith("ChangeModules (node between): it "), way
        client.queue(workflows.between(ours(tiny_models), "other", REACH, way="none")).require_success()


def test_a_node_that_does_the_same_in_the_place_of_a_refused_one_is_refused(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    for way in FOR_GOOD:
        for name in ("ChangeModules", "ChangeInPlace"):
            said = client.queue(between(name, way=way)(tiny_models)).error_line("KSampler")
            assert said.startswith(f"{name} (node between): it "), way


def test_what_a_node_changed_is_refused_where_a_sampler_ran_before_that_has_no_such_node(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """ComfyUI runs the node, then the first sampler, for which what the node did is taken back, then the second."""
    for number, (name, way) in enumerate(itertools.product(("ChangeModules", "ChangeInPlace"), KNOWN[:4])):
        graph = ours(tiny_models)
        graph["sampler"]["inputs"]["seed"] += 1 + number  # or its result is kept
        graph["between"] = node(name, model=["model", 0], way=way)
        again = {**graph["sampler"]["inputs"], "model": ["between", 0], "latent_image": ["sampler", 0]}
        graph["next"] = node("KSampler", **again)
        graph["save"]["inputs"]["samples"] = ["next", 0]
        for _ in range(2):  # the second time ComfyUI has the node's result
            result = client.queue(graph)
            assert result.error_line("KSampler").startswith(f"{name} (node between): it "), way
            assert result.error["node_id"] == "next", "the first sampler computes what stock does without the node"


def test_what_a_node_changed_for_good_does_not_refuse_the_next_loader(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    right = latent_of(client, ours(tiny_models))
    for way in FOR_GOOD:
        client.queue(between("ChangeModules", way=way)(tiny_models)).error_line("KSampler")
        graph = ours(tiny_models)
        graph["config"]["inputs"]["again"] = way  # as a setting that changes nothing: the loader runs once more
        assert torch.equal(latent_of(client, graph), right), way
