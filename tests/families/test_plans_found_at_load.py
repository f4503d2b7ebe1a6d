"""A class for which nobody wrote a plan is looked at when its file is first loaded, and shares its tokens once proven.

Owns: what the user sees of it in a real server, and that its images are stock's. Does not own: what is found
(tests/models/test_found_plans.py), nor a process that is slow or ends (runtime/test_find_plan.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from host.client import Event, PromptResult, Workflow
from host.outcomes import StockFailsError
from host.pack_workflows import TOLERANCE, latent_of, saved_latent, to_latent
from parallel_runtime.proof import relative_error
from tools import ship_plans

from .conftest import MIXING, NEW, NEW_FILE, Drifted
from .graphs import node
from .test_self_proof import ours, report_of
from .variants import BY_NAME

FOUND, EDIT, REFUSED = BY_NAME["joyimage"], BY_NAME["joyimage edit"], BY_NAME["kandinsky 5 t2v"]
LOOKS = "looking how ranks can share an image of"
NONE = "no plan was found: visual_transformer_blocks.0 "


def automatic(graph: Workflow, **config: Any) -> Workflow:
    return ours(graph) | {"config": node("SPConfig", mode="auto", devices="cpu:2", ulysses=1, ring=1, **config)}


def needs(drifted: Drifted) -> None:
    if not (drifted.server.models / "diffusion_models" / FOUND.file).exists():
        raise StockFailsError(f"this ComfyUI does not have the class of {FOUND.file}")


def told_by_loader(result: PromptResult) -> list[str]:
    return [text for name, text in result.texts if name == "model"]


def kept_of(drifted: Drifted, name: str) -> dict[str, Any]:
    entries = json.loads(drifted.plans_file.read_text())["plans"].values() if drifted.plans_file.exists() else []
    return next((each for each in entries if each["key"]["model_class"].endswith(name)), {})


def proofs_of(drifted: Drifted, name: str) -> list[dict[str, Any]]:
    return [each for each in drifted.proofs if each["key"]["model_class"].endswith(name)]


def cancel(drifted: Drifted, event: Event) -> None:
    """End the prompt when it looks for a plan."""
    if event.type == "parallel_dit.text" and LOOKS in event.data["text"]:
        drifted.client.interrupt()


@pytest.fixture(scope="module")
def found(drifted: Drifted) -> PromptResult:
    """The first run of a class whose plan is found; Cancel ended the one before it, while it looked."""

    needs(drifted)
    graph = automatic(FOUND.graph(cfg=3.0, seed=1, steps=2))
    cancelled = drifted.client.queue(graph, on_event=lambda event: cancel(drifted, event))
    assert (cancelled.status, kept_of(drifted, NEW)) == ("interrupted", {})
    return drifted.client.queue(graph).require_success()


def test_auto_shares_a_class_by_the_plan_that_is_found_and_proven(found: PromptResult, drifted: Drifted) -> None:
    client, stock = drifted.client, FOUND.graph(cfg=3.0, seed=1, steps=2)
    first, *_, last = told_by_loader(found)
    assert first == f"{LOOKS} {NEW}: 0 s of at most 300 s"
    assert last.startswith("uly2\n") and "found, proven: cut once, relative error" in last
    report = report_of(found)
    assert report["plan"]["name"] == "uly2" and report["proof"]["verdict"] == "proven"
    assert report["proof"]["error"] <= TOLERANCE < report["proof"]["control"] / 10
    assert report["proof"]["found"].startswith("cut once, relative error")
    assert report["proof"]["calls"] == 6  # of two sizes, and for each side of cfg, whose texts differ in length
    assert {each["key"]["arguments"][-1] for each in proofs_of(drifted, NEW)} == {"sides=0", "sides=1"}
    assert any("found, proven with this ComfyUI: error" in line for line in found.outputs["show"]["text"])
    assert relative_error(latent_of(client, automatic(stock)), latent_of(client, stock)) <= TOLERANCE
    again = client.queue(ours(FOUND.graph(cfg=1.0, seed=2, steps=1), ulysses=1, ring=2))
    assert report_of(again)["plan"]["name"] == "ring2"
    assert not any(LOOKS in text for text in told_by_loader(again))  # it was loaded again, and the plan was kept


def test_calls_with_references_are_proven_anew_and_shared_by_the_plan_that_holds_for_them_too(
    found: PromptResult, drifted: Drifted
) -> None:
    """Where a plan is looked for, calls with references are made up too."""
    client, stock = drifted.client, EDIT.graph(cfg=3.0, seed=1, steps=2)
    known = len(drifted.proofs)
    report = report_of(client.queue(automatic(stock)))
    assert len(drifted.proofs) == known + 2
    assert report["proof"]["verdict"] == "proven" and report["plan"]["name"] == "uly2", report["warnings"]
    assert relative_error(latent_of(client, automatic(stock)), latent_of(client, stock)) <= TOLERANCE


def test_a_kept_plan_that_computes_something_else_is_refused_by_its_proof(
    found: PromptResult, drifted: Drifted
) -> None:
    client, before = drifted.client, drifted.plans_file.read_text()
    wrong = json.loads(before)
    for entry in wrong["plans"].values():
        if entry["key"]["model_class"].endswith(NEW):
            entry["plan"]["attention"] = dict.fromkeys(entry["plan"]["attention"], "local")
    drifted.plans_file.write_text(json.dumps(wrong))
    stock = FOUND.graph(cfg=3.0, seed=4, steps=2)
    by_hand = client.queue(ours(stock, weights="sharded"))
    assert by_hand.error_node == "ParallelSampler"
    assert f"ulysses=2,weights=sharded is refused for {NEW} of ComfyUI" in by_hand.error_message
    report = report_of(client.queue(automatic(stock, weights="sharded")))
    assert report["plan"]["name"] == "cfg2-ring1-uly1-sharded"
    assert f"the proof of uly2-sharded failed for {NEW}" in report["warnings"][0]
    right = latent_of(client, stock)
    assert relative_error(latent_of(client, automatic(stock, weights="sharded")), right) <= TOLERANCE
    drifted.plans_file.write_text(before)


def test_a_plan_that_the_pack_ships_is_not_looked_for_and_proven_like_any_other(
    found: PromptResult, drifted: Drifted
) -> None:
    """It holds for one source of its class; it comes before what is kept, and is trusted no more than that."""
    client, file, before = drifted.client, drifted.comfyui / NEW_FILE, drifted.plans_file.read_text()
    ((path, source, entry),) = [
        each for each in ship_plans.of_kept(drifted.plans_file, drifted.comfyui) if each[0].endswith(NEW)
    ]
    drifted.plans_file.unlink()
    ship_plans.ship(drifted.shipped, path, source, entry)
    stock = FOUND.graph(cfg=3.0, seed=5, steps=2)
    shared = client.queue(ours(stock, weights="sharded"))
    (told,) = told_by_loader(shared)
    assert "found, proven: cut once, relative error" in told and not drifted.plans_file.exists()
    assert report_of(shared)["proof"]["verdict"] == "proven"
    assert report_of(shared)["proof"]["found"].startswith("cut once, relative error")
    right = latent_of(client, stock)
    assert relative_error(saved_latent(client, shared), right) <= TOLERANCE
    entry["plan"]["attention"] = dict.fromkeys(entry["plan"]["attention"], "local")
    ship_plans.ship(drifted.shipped, path, source, entry)
    refused = client.queue(automatic(stock, weights="sharded"))
    assert not any(LOOKS in text for text in told_by_loader(refused))
    assert f"the proof of uly2-sharded failed for {NEW}" in report_of(refused)["warnings"][0]
    assert relative_error(saved_latent(client, refused), right) <= TOLERANCE
    source_text = file.read_text()
    file.write_text(f"{source_text}# another one\n")
    ended = client.queue(ours(stock), on_event=lambda event: cancel(drifted, event))
    assert ended.status == "interrupted"
    file.write_text(source_text)
    (drifted.shipped / f"{path}.json").unlink()
    drifted.plans_file.write_text(before)


def test_where_none_is_found_auto_goes_on_without_and_a_plan_by_hand_is_refused(drifted: Drifted) -> None:
    client, stock = drifted.client, REFUSED.graph(cfg=3.0, seed=1, steps=2)
    result = client.queue(automatic(stock))
    told = told_by_loader(result)
    assert LOOKS in told[0] and told[-1].startswith("cfg2-ring1-uly1\n")
    assert f"ranks cannot share an image of {MIXING}: {NONE}" in told[-1]
    assert report_of(result)["proof"]["verdict"] == "not needed"
    assert relative_error(latent_of(client, automatic(stock)), latent_of(client, stock)) <= TOLERANCE
    by_hand = client.queue(ours(stock))
    assert by_hand.error_node == "ParallelModelLoader" and not any(LOOKS in text for text in told_by_loader(by_hand))
    parts = (f"ulysses=2: {MIXING} has no plan to share its tokens: {NONE}", "ulysses=1 and ring=1")
    assert [part for part in parts if part not in by_hand.error_message.splitlines()[0]] == []


def test_written_plans_alone_look_for_none(drifted: Drifted) -> None:
    needs(drifted)
    client, stock = drifted.client, FOUND.graph(cfg=3.0, seed=1, steps=1)
    result = client.queue(automatic(stock, plans="written"))
    (told,) = told_by_loader(result)
    assert told.startswith("cfg2-ring1-uly1\n") and f"{NEW}: there is no plan for it" in told
    by_hand = client.queue(to_latent(ours(stock, plans="written")))
    assert f"ulysses=2: {NEW} has no plan to share its tokens; use cfg parallel" in by_hand.error_message
