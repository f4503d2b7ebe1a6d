"""Where a plan's proof fails, a run of auto goes on with what works and says so; a plan named by hand is refused.

Owns: a real server whose ComfyUI calls Wan's blocks otherwise than the plan knows. Does not own: how a call is judged
and which failures are none of a proof (runtime/test_proving.py), nor a block that computes otherwise
(test_self_proof.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from host.client import ComfyClient, Workflow
from host.fetch import comfyui_path
from host.forked_ranks import FOR_COMFYUI
from host.pack_workflows import TOLERANCE, latent_of, parallel
from host.server import ComfyServer
from parallel_runtime.proof import relative_error

from .hosted import PLANS, WAN
from .variants import write_families

FILE, CALL = "comfy/ldm/wan/model.py", "x = block(x, e=e0, freqs=freqs, context=context, "
# Later ComfyUIs, whose blocks take their rotary table by another name, what modulates them in a list, or one more.
HEAD = """

def _forward(self, x, {}, context, context_img_len=257, transformer_options={{}}{}, _forward=WanAttentionBlock.forward):
    return _forward(self, x, {}, context, context_img_len, transformer_options)


WanAttentionBlock.forward = _forward
"""
DRIFTS = {
    "renamed": (CALL.replace("freqs=", "rope="), HEAD.format("e, rope", "", "e, rope")),
    "in a list": (CALL.replace("e=e0", "e=[e0]"), HEAD.format("e, freqs", "", "e[0], freqs")),
    "one more": (f"{CALL}strength=1.0, ", HEAD.format("e, freqs", ", strength=1.0", "e, freqs")),
}


class Drifted:
    """A running server of a ComfyUI of links with one file changed, and the folder that its proofs are kept in."""

    def __init__(self, folder: Path, drift: str) -> None:
        call, more = DRIFTS[drift]
        self.path, self.cache = folder / "ComfyUI", folder / "cache"
        shutil.copytree(
            comfyui_path(), self.path, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
        )
        for name in ("main.py", FILE):
            text = (self.path / name).read_text()
            (self.path / name).unlink()  # Python looks for modules beside what a script's link names
            assert name == "main.py" or CALL in text
            (self.path / name).write_text(text if name == "main.py" else text.replace(CALL, call) + more)

    @property
    def proofs(self) -> list[dict[str, Any]]:
        file = self.cache / "parallel-dit" / "proofs.json"
        return list(json.loads(file.read_text())["proofs"].values()) if file.exists() else []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_families(tmp_path_factory.mktemp("models"), only=[WAN.name])


@pytest.fixture(scope="module", params=list(DRIFTS))
def drifted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drifted:
    return Drifted(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def server(drifted: Drifted, models: Path) -> Iterator[ComfyServer]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COMFYUI_PATH", str(drifted.path))
        with ComfyServer(models=models, environment={"XDG_CACHE_HOME": str(drifted.cache), **FOR_COMFYUI}) as made:
            yield made


@pytest.fixture
def client(server: ComfyServer) -> ComfyClient:
    return ComfyClient(server.url)


def sampled(client: ComfyClient, graph: Workflow, loop: str = "auto") -> tuple[dict[str, Any], torch.Tensor, list[str]]:
    """The report, the latent and the texts on the sampler of a run with our nodes, under auto."""
    ours = parallel(graph, loader="ParallelModelLoader", sampler="ParallelSampler")
    ours["sampler"]["inputs"]["loop"] = loop
    result = client.queue(ours)
    (report,) = result.require_success().outputs["sampler"]["parallel_dit"]
    return report, latent_of(client, ours), [text for node, text in result.texts if node == "sampler"]


@pytest.mark.parametrize("drifted", ["in a list"], indirect=True)
@pytest.mark.parametrize("loop", ["auto", "host"])
@pytest.mark.parametrize(("cfg", "plan"), [(3.0, "cfg2-ring1-uly1"), (1.0, "single")])
def test_auto_goes_on_without_a_plan_whose_ranks_raise_and_says_so(
    loop: str, cfg: float, plan: str, server: ComfyServer, client: ComfyClient, drifted: Drifted
) -> None:
    graph = WAN.graph(cfg=cfg, seed=len(loop), steps=2)
    stock = latent_of(client, graph)
    report, latent, texts = sampled(client, graph, loop)
    assert relative_error(latent, stock) <= TOLERANCE
    assert report["plan"]["name"] == plan and report["proof"]["verdict"] == "not needed"
    assert report["loop"]["kind"] == ("resident" if loop == "auto" else "host"), report["loop"]
    (warning,) = report["warnings"]
    parts = ("the proof of uly2 failed for WanModel of ComfyUI", "Error: ", f"on with {plan}", "one device computes")
    assert [part for part in parts if part not in warning] == [], warning
    assert any(warning in text for text in texts)
    assert {entry["proof"]["verdict"] for entry in drifted.proofs} == {"refused"}
    assert server.log.count(warning) == 1  # however often it runs
    assert [pool["last_failure"] for pool in client.get("/parallel_dit/state")["pools"]] == [None]


@pytest.mark.parametrize("drifted", ["in a list"], indirect=True)
def test_a_plan_named_by_hand_is_refused_by_name_and_cause(client: ComfyClient, drifted: Drifted) -> None:
    """Twice: found by ranks, which count as no failure of the workers, and known."""
    config = {"mode": "manual", **PLANS["ulysses 2"], "weights": "sharded"}
    graph = WAN.graph(cfg=3.0, seed=1, steps=2)
    for _ in range(2):
        result = client.queue(parallel(graph, loader="ParallelModelLoader", sampler="ParallelSampler", **config))
        assert (result.status, result.error_node) == ("error", "ParallelSampler")
        line, *more = result.error_message.splitlines()
        parts = ("ulysses=2,weights=sharded is refused for WanModel of ComfyUI", "Error: ", "ulysses=1 and ring=1")
        assert [part for part in parts if part not in line] == [] and more == [], result.error_message
        assert [pool["last_failure"] for pool in client.get("/parallel_dit/state")["pools"]] == [None]
    assert [entry["key"]["plan"] for entry in drifted.proofs].count("ulysses=2,weights=sharded") == 1


@pytest.mark.parametrize("drifted", ["renamed"], indirect=True)
def test_a_renamed_argument_is_known_before_anything_runs(client: ComfyClient, drifted: Drifted) -> None:
    graph = WAN.graph(cfg=3.0, seed=1, steps=2)
    stock = latent_of(client, graph)
    report, latent, _ = sampled(client, graph)
    assert relative_error(latent, stock) <= TOLERANCE
    assert report["plan"]["name"] == "cfg2-ring1-uly1"
    assert "takes no argument 'freqs', which the plan names" in " ".join(report["plan"]["reasons"])
    by_hand = parallel(graph, loader="ParallelModelLoader", mode="manual", **PLANS["ulysses 2"])
    result = client.queue(by_hand)
    assert (result.status, result.error_node) == ("error", "ParallelModelLoader")
    assert "ulysses=2: WanModel: blocks.0 of this ComfyUI takes no argument 'freqs'" in result.error_message
    assert drifted.proofs == []


@pytest.mark.parametrize("drifted", ["one more"], indirect=True)
def test_one_argument_more_is_no_matter(client: ComfyClient) -> None:
    graph = WAN.graph(cfg=1.0, seed=1, steps=2)
    stock = latent_of(client, graph)
    report, latent, _ = sampled(client, graph)
    assert relative_error(latent, stock) <= TOLERANCE
    assert (report["plan"]["name"], report["proof"]["verdict"]) == ("uly2", "proven") and "warnings" not in report
