"""A plan is proven with the ComfyUI that runs before its first step counts, kept, and refused where that has drifted.

Owns: who asks, in a real server whose ComfyUI is not the one that Wan's plan was made for; what the user sees. Does not
own: how a call is judged (runtime/test_proving.py), nor the file of proofs (test_proof.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from host.client import ComfyClient, PromptResult, Workflow
from host.fetch import comfyui_path
from host.forked_ranks import FOR_COMFYUI
from host.outcomes import StockFailsError
from host.pack_workflows import TOLERANCE, latent_of, parallel
from host.quantised import quantised
from host.server import ComfyServer
from parallel_runtime.proof import NOT_PROVEN, Proof, ProofKey, ProofStore, relative_error

from .graphs import node
from .hosted import PLANS, WAN
from .variants import BY_NAME, write_families

PLAIN, REFERENCES = BY_NAME["minimax h3 t2v"], BY_NAME["minimax h3 references"]
# A later ComfyUI, in which a block of Wan mixes neighbouring tokens: what no plan of ours can know.
BEFORE = "        x = x + self.cross_attn("
DRIFT = "        x = x + 0.1 * x.roll(1, dims=1)\n" + BEFORE


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI of links, with one file changed."""
    path = tmp_path_factory.mktemp("drifted") / "ComfyUI"
    shutil.copytree(comfyui_path(), path, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    for name, change in {"main.py": ("import", "import"), "comfy/ldm/wan/model.py": (BEFORE, DRIFT)}.items():
        text = (path / name).read_text()
        assert change[0] in text
        (path / name).unlink()  # Python looks for modules beside what a script's link names
        (path / name).write_text(text.replace(*change))
    return path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the server's proofs."""
    return tmp_path_factory.mktemp("cache") / "parallel-dit" / "proofs.json"


@pytest.fixture(scope="module")
def server(drifted: Path, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A server of that ComfyUI, with nothing proven yet."""
    models = write_families(tmp_path_factory.mktemp("models"), only=[each.name for each in (WAN, PLAIN, REFERENCES)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COMFYUI_PATH", str(drifted))
        with ComfyServer(models=models, environment={"XDG_CACHE_HOME": str(kept.parents[1]), **FOR_COMFYUI}) as made:
            yield made


@pytest.fixture
def client(server: ComfyServer) -> ComfyClient:
    return ComfyClient(server.url)


def ours(graph: Workflow, plan: str = "ulysses 2") -> Workflow:
    """The graph with our loader and sampler, whose report says what is known of the plan."""
    graph = parallel(graph, mode="manual", loader="ParallelModelLoader", sampler="ParallelSampler", **PLANS[plan])
    graph["show"] = node("ShowTimingReport", timing=["sampler", 1], chart=False)
    return graph


def report_of(result: PromptResult) -> dict[str, Any]:
    (report,) = result.require_success().outputs["sampler"]["parallel_dit"]
    return report


def proofs(kept: Path) -> list[dict[str, Any]]:
    return list(json.loads(kept.read_text())["proofs"].values()) if kept.exists() else []


def test_a_plan_is_proven_once_for_each_kind_of_call(server: ComfyServer, client: ComfyClient, kept: Path) -> None:
    first = client.queue(ours(PLAIN.graph(seed=1, steps=2)))
    proof = report_of(first)["proof"]
    assert (proof["verdict"], proof["calls"]) == ("proven", 3)
    assert proof["error"] <= proof["tolerance"] == TOLERANCE < proof["control"] / 10
    assert "proven with this ComfyUI: error" in first.outputs["show"]["text"][0]
    (entry,) = proofs(kept)
    assert entry["key"]["plan"] == "ulysses=2" and entry["key"]["model_class"].startswith("comfy.ldm.minimax")
    said = server.log.count("under uly2 is proven")
    again = report_of(client.queue(ours(PLAIN.graph(seed=2, steps=2))))
    assert again["proof"] == proof and server.log.count("under uly2 is proven") == said == 1
    report_of(client.queue(ours(REFERENCES.graph(seed=1, steps=2))))  # references beside the same latent
    assert server.log.count("under uly2 is proven") == 2
    (_, other) = proofs(kept)
    assert set(other["key"]["arguments"]) > set(entry["key"]["arguments"])


def test_a_quantised_file_has_a_proof_of_its_own(server: ComfyServer, client: ComfyClient, kept: Path) -> None:
    """Its key has the format; where layers round what they are given, a last digit may move more."""
    folder = server.models / "diffusion_models"
    if not (folder / PLAIN.file).exists():
        raise StockFailsError(f"this ComfyUI does not have the class of {PLAIN.file}")
    with safe_open(folder / PLAIN.file, framework="pt") as file:
        whole = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata() or {}
    for kind, name, tolerance in (("int8", "int8_tensorwise", 2e-2), ("nvfp4", "nvfp4", TOLERANCE)):
        tensors, said = quantised(whole, kind)
        save_file(tensors, folder / "quantised.safetensors", metadata=metadata | said)
        graph = PLAIN.graph(seed=8, steps=1)
        graph["model"]["inputs"]["unet_name"] = "quantised.safetensors"
        proof = report_of(client.queue(ours(graph)))["proof"]
        assert (proof["verdict"], proof["tolerance"]) == ("proven", tolerance), proof
        assert proof["error"] <= tolerance < proof["control"] / 3
        assert name in proofs(kept)[-1]["key"]["weights"].split(", ")
        (folder / "quantised.safetensors").unlink()


def test_a_plan_that_the_present_comfyui_does_not_fit_is_refused_by_name(
    server: ComfyServer, client: ComfyClient, kept: Path
) -> None:
    report_of(client.queue(ours(PLAIN.graph(seed=3, steps=1))))
    generations = [pool["generation"] for pool in client.get("/parallel_dit/state")["pools"]]
    graph = WAN.graph(cfg=3.0, seed=1, steps=2)
    for _ in range(2):  # found, then known
        result = client.queue(ours(graph))
        assert (result.status, result.error_node) == ("error", "ParallelSampler")
        line = result.error_message.splitlines()[0]
        parts = ("ulysses=2 is refused for WanModel of ComfyUI", "relative error", "at most 1.0e-05 in float32")
        parts += ("mode manual with ulysses=1 and ring=1", "report this line")
        assert [part for part in parts if part not in line] == [], line
    assert [pool["generation"] for pool in client.get("/parallel_dit/state")["pools"]] == generations
    assert [entry["proof"]["verdict"] for entry in proofs(kept)].count("refused") == 1
    report = report_of(client.queue(ours(graph, "cfg 2")))
    assert report["proof"]["verdict"] == "not needed" and "cuts no tokens" in report["proof"]["reason"]


def test_auto_goes_on_without_such_a_plan_and_gives_the_picture_of_one_device(client: ComfyClient) -> None:
    stock = WAN.graph(cfg=3.0, seed=1, steps=2)
    graph = ours(stock) | {"config": node("SPConfig", mode="auto", devices="cpu:2", ulysses=1, ring=1)}
    report = report_of(client.queue(graph))
    assert relative_error(latent_of(client, graph), latent_of(client, stock)) <= TOLERANCE
    (warning,) = report["warnings"]
    parts = ("the proof of uly2 failed for WanModel of ComfyUI", "(relative error ", "goes on with cfg2-ring1-uly1")
    assert [part for part in parts if part not in warning] == [], warning
    assert report["plan"]["name"] == "cfg2-ring1-uly1" and report["proof"]["verdict"] == "not needed"


def test_a_plan_that_could_not_be_proven_runs_and_says_so(client: ComfyClient, kept: Path) -> None:
    report_of(client.queue(ours(REFERENCES.graph(seed=5, steps=1))))
    known = max((entry["key"] for entry in proofs(kept)), key=lambda key: len(key["arguments"]))
    key = ProofKey(**{**known, "plan": "ring=2", "arguments": tuple(known["arguments"])})
    ProofStore(kept).save(key, Proof(verdict=NOT_PROVEN, reason="it cannot be judged", calls=3))
    graph = ours(REFERENCES.graph(seed=6, steps=2))
    graph["config"]["inputs"] |= {"ulysses": 1, "ring": 2}
    result = client.queue(graph)
    report = report_of(result)
    assert report["proof"]["verdict"] == "not proven"
    assert report["warnings"] == ["with this ComfyUI the plan is not proven: it cannot be judged"]
    assert "warning: with this ComfyUI the plan is not proven" in result.outputs["show"]["text"][0]
    assert any(text.endswith("not proven: it cannot be judged") for node, text in result.texts if node == "sampler")


def test_a_broken_file_of_proofs_costs_a_warning_and_another_proof(
    server: ComfyServer, client: ComfyClient, kept: Path
) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("{")
    graph = ours(PLAIN.graph(seed=4, steps=1))
    graph["config"]["inputs"] |= {"ulysses": 1, "ring": 2}
    assert report_of(client.queue(graph))["proof"]["verdict"] == "proven"
    assert "proofs.json is damaged or of another version and is not believed" in server.log
    assert [entry["key"]["plan"] for entry in proofs(kept)] == ["ring=2"]
