"""Qwen-Image 2.1 in a server: what its class keeps between steps is used by the workers, never by another run."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from host.adapters import write_adapter
from host.client import ComfyClient, Workflow
from host.pack_workflows import parallel, relative_error, saved_latent, to_latent
from host.server import ComfyServer

from . import qwen21
from .calibrated import calibrate
from .graphs import node
from .hosted import VISIBLE, between, with_loras
from .variants import BY_NAME, NEWER, write_families

STEPS, PICTURE, PROMPTS = 3, 35, (11 + 35, 7 + 35)  # tokens; of the text and of the reference
LORA = "keys.safetensors"
PLANS: dict[str, dict[str, int]] = {"ulysses 2": {"ulysses": 2}, "cfg 2": {"cfg": 2}}

if qwen21 in NEWER:

    @pytest.fixture(scope="module")
    def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyClient]:
        """A server with the model and a LoRA of its keys, and nothing proven yet."""
        models = write_families(tmp_path_factory.mktemp("models"), only=["qwen-image 2.1 edit"])
        write_adapter(models / "loras" / LORA, "lora_alpha", {"transformer_blocks.0.attn.to_k": (640, 640)})
        cache = tmp_path_factory.mktemp("cache")
        calibrate(cache, "cpu:2")
        environment = {"XDG_CACHE_HOME": str(cache)}
        with ComfyServer(models=models, environment=environment) as server:
            yield ComfyClient(server.url)

    def edit(*, seed: int = 7) -> Workflow:
        """A stock graph: a picture of 35 tokens by a reference of as many, prompt and negative."""
        return to_latent(BY_NAME["qwen-image 2.1 edit"].graph(cfg=3.0, seed=seed, steps=STEPS))

    def run(client: ComfyClient, graph: Workflow, **plan: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The latent of the graph with our nodes, and its report."""
        ours = parallel(graph, mode="manual", loader="ParallelModelLoader", sampler="ParallelSampler", **plan)
        result = client.queue(ours).require_success()
        report = result.report()
        return saved_latent(client, result), report

    def stock(client: ComfyClient, graph: Workflow) -> torch.Tensor:
        return saved_latent(client, client.queue(graph))

    @pytest.mark.parametrize("plan", PLANS)
    def test_a_lora_between_runs_finds_nothing_of_them(client: ComfyClient, plan: str) -> None:
        plain, changed = edit(), with_loras(edit(), (LORA, 1.0))
        wanted = [stock(client, graph) for graph in (plain, changed)]
        assert relative_error(*wanted) > VISIBLE, "the LoRA changes nothing"
        for graph, want in zip((plain, changed), wanted, strict=True):
            latent, report = run(client, graph, **PLANS[plan])
            assert relative_error(latent, want) <= ROUNDING
            kept, ranks = report["kept"], PLANS[plan].get("ulysses", 1)
            assert (kept["calls"], kept["found"]) == (2 * STEPS, 2 * (STEPS - 1))
            assert sum(kept["tokens"]) == 2 * STEPS * PICTURE + ranks * sum(PROMPTS)
        if plan == "ulysses 2":
            assert (report["proof"]["verdict"], report["proof"]["calls"]) == ("proven", 6)

    @pytest.mark.parametrize(
        ("device", "dtype"), [("cpu", "default"), ("gpu", "int8"), ("auto", "int4"), ("off", "default")]
    )
    def test_the_cache_node_says_where_and_how_workers_keep_it(client: ComfyClient, device: str, dtype: str) -> None:
        graph = between(edit(seed=8), "cache", "QwenImage21Cache", device=device, dtype=dtype)
        latent, report = run(client, graph, ulysses=2)
        assert relative_error(latent, stock(client, graph)) <= ROUNDING
        kept = report["kept"]
        assert kept["found"] == (0 if device == "off" else 2 * (STEPS - 1))
        whole = 2 * 2 * 640 * 4 * sum(PROMPTS)  # keys and values of two blocks in fp32
        assert kept["bytes"] / whole == pytest.approx(
            {"int8": 0.27, "int4": 0.15}.get(dtype, 1.02) * (device != "off"), abs=0.02
        )

    def test_pictures_of_a_batch_are_kept_apart(client: ComfyClient) -> None:
        graph = edit(seed=9)
        graph["two"] = node("RepeatLatentBatch", samples=graph["sampler"]["inputs"]["latent_image"], amount=2)
        graph["sampler"]["inputs"]["latent_image"] = ["two", 0]
        latent, report = run(client, graph, data=2)
        assert relative_error(latent, stock(client, graph)) <= ROUNDING
        assert report["kept"]["found"] == 2 * 2 * (STEPS - 1)

    def test_auto_weighs_steps_that_find_text_and_references(client: ComfyClient) -> None:
        graph = between(edit(seed=10), "cache", "QwenImage21Cache", device="cpu", dtype="int8")
        ours = parallel(graph, mode="auto", loader="ParallelModelLoader", sampler="ParallelSampler")
        result = client.queue(ours).require_success()
        report = result.report()
        said = f"35 image tokens, {max(PROMPTS)} of text and references, prompt and negative, one image, {STEPS} steps"
        assert report["plan"]["chosen_for"] == said
        assert report["kept"]["found"] == 2 * (STEPS - 1)
        assert relative_error(saved_latent(client, result), stock(client, graph)) <= ROUNDING
