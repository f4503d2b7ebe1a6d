"""A plan is proven with the ComfyUI that runs before its first step counts, kept, and refused where it drifted."""

from typing import Any

import pytest
from rounding import ROUNDING
from safetensors import safe_open
from safetensors.torch import save_file

from host.client import Workflow
from host.outcomes import StockFailsError
from host.pack_workflows import latent_of, parallel
from host.quantised import quantised
from parallel_runtime.proof import NOT_PROVEN, TOLERANCES, Proof, ProofKey, ProofStore, relative_error

from .conftest import Drifted
from .graphs import node
from .hosted import PLANS, WAN
from .variants import BY_NAME

PLAIN, REFERENCES = BY_NAME["minimax h3 t2v"], BY_NAME["minimax h3 references"]
MIXES, RAISES = WAN, BY_NAME["wan 2.1 i2v"]  # with the drifted ComfyUI of conftest.py


def ours(graph: Workflow, plan: str = "ulysses 2", **config: Any) -> Workflow:
    """The graph with our loader and sampler, whose report says what is known of the plan."""
    config = {"mode": "manual", **PLANS.get(plan, {}), **config}
    graph = parallel(graph, loader="ParallelModelLoader", sampler="ParallelSampler", **config)
    graph["show"] = node("ShowTimingReport", timing=["sampler", 1], chart=False)
    return graph


def test_a_plan_is_proven_once_for_each_kind_of_call(drifted: Drifted) -> None:
    client, server = drifted.client, drifted.server
    first = client.queue(ours(PLAIN.graph(seed=1, steps=2)))
    proof = first.report()["proof"]
    assert (proof["verdict"], proof["calls"]) == ("proven", 3)
    assert proof["error"] <= proof["tolerance"] == TOLERANCES["float32"] < proof["control"] / 10
    assert "proven with this ComfyUI: error" in first.outputs["show"]["text"][0]
    entry = drifted.proofs[-1]
    assert entry["key"]["plan"] == "ulysses=2" and entry["key"]["model_class"].startswith("comfy.ldm.minimax")
    said = server.log.count("under uly2 is proven")
    again = client.queue(ours(PLAIN.graph(seed=2, steps=2))).report()
    assert again["proof"] == proof and server.log.count("under uly2 is proven") == said
    client.queue(ours(REFERENCES.graph(seed=1, steps=2))).report()  # references beside the same latent
    assert server.log.count("under uly2 is proven") == said + 1
    assert set(drifted.proofs[-1]["key"]["arguments"]) > set(entry["key"]["arguments"])


def test_a_quantised_file_has_a_proof_of_its_own(drifted: Drifted) -> None:
    """Its key has the format; where layers round what they are given, a last digit may move more."""
    folder = drifted.server.models / "diffusion_models"
    if not (folder / PLAIN.file).exists():
        raise StockFailsError(f"this ComfyUI does not have the class of {PLAIN.file}")
    with safe_open(folder / PLAIN.file, framework="pt") as file:
        tensors, said = quantised({name: file.get_tensor(name) for name in file.keys()}, "int8")
        save_file(tensors, folder / "quantised.safetensors", metadata=(file.metadata() or {}) | said)
    graph = PLAIN.graph(seed=8, steps=1)
    graph["model"]["inputs"]["unet_name"] = "quantised.safetensors"
    proof = drifted.client.queue(ours(graph)).report()["proof"]
    (folder / "quantised.safetensors").unlink()
    assert (proof["verdict"], proof["tolerance"]) == ("proven", 2e-2), proof
    assert proof["error"] <= proof["tolerance"] < proof["control"] / 3
    assert "int8_tensorwise" in drifted.proofs[-1]["key"]["weights"].split(", ")


REFUSED = {
    "another picture": (MIXES, ("relative error", "at most 1.0e-05 in float32", "report this line")),
    "ranks that raise": (RAISES, ("Error: ", " (in blocks.0")),
}


@pytest.mark.parametrize("drift", REFUSED)
def test_a_plan_that_the_present_comfyui_does_not_fit_is_refused_by_name_and_cause(
    drift: str, drifted: Drifted
) -> None:
    """Twice: found by ranks, which count as no failure of the workers, and known."""
    (variant, more), client = REFUSED[drift], drifted.client
    client.queue(ours(PLAIN.graph(seed=3, steps=1), weights="sharded")).report()
    generations = [pool["generation"] for pool in client.get("/parallel_dit/state")["pools"]]
    known = [entry["proof"]["verdict"] for entry in drifted.proofs].count("refused")
    graph = variant.graph(cfg=3.0, seed=1, steps=2)
    for _ in range(2):
        result = client.queue(ours(graph, weights="sharded"))
        assert (result.status, result.error_node) == ("error", "ParallelSampler")
        line, *rest = result.error_message.splitlines()
        parts = ("ulysses=2,weights=sharded is refused for WanModel of ComfyUI", "ulysses=1 and ring=1", *more)
        assert [part for part in parts if part not in line] == [] and rest == [], result.error_message
    pools = client.get("/parallel_dit/state")["pools"]
    assert drift == "ranks that raise" or [pool["generation"] for pool in pools] == generations
    assert [pool["last_failure"] for pool in pools] == [None] * len(pools)
    assert [entry["proof"]["verdict"] for entry in drifted.proofs].count("refused") == known + 1
    report = client.queue(ours(graph, "cfg 2")).report()
    assert report["proof"]["verdict"] == "not needed" and "cuts no tokens" in report["proof"]["reason"]


@pytest.mark.parametrize(
    ("variant", "cfg", "devices", "weights", "plan", "how"),
    [
        (MIXES, 3.0, 2, "replicated", "cfg2-ring1-uly1", "where one device computes"),
        (RAISES, 1.0, 2, "replicated", "single", "where one device computes"),
        (MIXES, 1.0, 3, "sharded", "uly3-sharded", "each device computes each image whole"),
    ],
)
def test_auto_goes_on_without_such_a_plan_and_gives_the_picture_of_stock(
    variant: Any, cfg: float, devices: int, weights: str, plan: str, how: str, drifted: Drifted
) -> None:
    stock = variant.graph(cfg=cfg, seed=1, steps=2)
    config = {"mode": "auto", "devices": f"cpu:{devices}", "ulysses": 1, "ring": 1, "weights": weights}
    graph = ours(stock) | {"config": node("SPConfig", **config)}
    result = drifted.client.queue(graph)
    report = result.report()
    assert relative_error(latent_of(drifted.client, graph), latent_of(drifted.client, stock)) <= ROUNDING
    assert report["plan"]["name"] == plan and report["proof"]["verdict"] == "not needed"
    assert report["loop"] == {"kind": "resident"}
    (warning,) = report["warnings"]
    parts = ("the proof of ", " failed for WanModel of ComfyUI", "rror", f"on with {plan}, ", how)
    assert [part for part in parts if part not in warning] == [], warning
    assert any(warning in text for name, text in result.texts if name == "sampler")
    assert drifted.server.log.count(warning) == 1  # however often it runs


def test_a_plan_that_could_not_be_proven_runs_and_says_so(drifted: Drifted) -> None:
    client = drifted.client
    client.queue(ours(REFERENCES.graph(seed=5, steps=1), weights="sharded")).report()
    of_class = [entry["key"] for entry in drifted.proofs if "minimax" in entry["key"]["model_class"]]
    known = max(of_class, key=lambda key: len(key["arguments"]))
    key = ProofKey(**{**known, "plan": "ring=2", "arguments": tuple(known["arguments"])})
    ProofStore(drifted.proofs_file).save(key, Proof(verdict=NOT_PROVEN, reason="it cannot be judged", calls=3))
    graph = ours(REFERENCES.graph(seed=6, steps=2), ulysses=1, ring=2)
    result = client.queue(graph)
    report = result.report()
    assert report["proof"]["verdict"] == "not proven"
    assert report["warnings"] == ["with this ComfyUI the plan is not proven: it cannot be judged"]
    assert "warning: with this ComfyUI the plan is not proven" in result.outputs["show"]["text"][0]
    assert any(text.endswith("not proven: it cannot be judged") for node, text in result.texts if node == "sampler")
