"""A class for which nobody wrote a plan is looked at when first loaded, and shares its tokens once proven."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, Event, PromptResult, Workflow
from host.fetch import comfyui_path
from host.outcomes import StockFailsError
from host.pack_workflows import latent_of, saved_latent, to_latent
from host.server import ComfyServer
from parallel_runtime.models.specs.found import FoundKey, FoundSpecs
from parallel_runtime.proof import relative_error
from tools import ship_plans
from tools.found_graphs import server

from .conftest import MIXING, NEW, NEW_FILE, Drifted
from .graphs import node
from .test_self_proof import ours
from .variant import Variant
from .variants import BY_NAME

FOUND, EDIT, REFUSED = BY_NAME["joyimage"], BY_NAME["joyimage edit"], BY_NAME["kandinsky 5 t2v"]
T2V, I2V = BY_NAME["wan 2.1 t2v"], BY_NAME["wan 2.2 5b i2v"]
COPY = replace(I2V, file="copy_of_tiny_wan_22_5b.safetensors")
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
    report = found.report()
    assert report["plan"]["name"] == "uly2" and report["proof"]["verdict"] == "proven"
    assert report["proof"]["error"] <= ROUNDING < report["proof"]["control"] / 10
    assert report["proof"]["found"].startswith("cut once, relative error")
    assert report["proof"]["calls"] == 6  # of two sizes, and for each side of cfg, whose texts differ in length
    arguments = [argument for each in proofs_of(drifted, NEW) for argument in each["key"]["arguments"]]
    assert {argument[-2:] for argument in arguments if "cond_or_uncond" in argument} == {"=0", "=1"}
    assert any("found, proven with this ComfyUI: error" in line for line in found.outputs["show"]["text"])
    assert relative_error(latent_of(client, automatic(stock)), latent_of(client, stock)) <= ROUNDING
    again = client.queue(ours(FOUND.graph(cfg=1.0, seed=2, steps=1), ulysses=1, ring=2))
    assert again.report()["plan"]["name"] == "ring2"
    assert not any(LOOKS in text for text in told_by_loader(again))  # it was loaded again, and the plan was kept


def test_calls_with_references_are_proven_anew_and_shared_by_the_plan_that_holds_for_them_too(
    found: PromptResult, drifted: Drifted
) -> None:
    """Where a plan is looked for, calls with references are made up too."""
    client, stock = drifted.client, EDIT.graph(cfg=3.0, seed=1, steps=2)
    known = len(drifted.proofs)
    report = client.queue(automatic(stock)).report()
    assert len(drifted.proofs) == known + 2
    assert report["proof"]["verdict"] == "proven" and report["plan"]["name"] == "uly2", report["warnings"]
    assert relative_error(latent_of(client, automatic(stock)), latent_of(client, stock)) <= ROUNDING


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
    report = client.queue(automatic(stock, weights="sharded")).report()
    assert report["plan"]["name"] == "cfg2-ring1-uly1-sharded"
    assert f"the proof of uly2-sharded failed for {NEW}" in report["warnings"][0]
    right = latent_of(client, stock)
    assert relative_error(latent_of(client, automatic(stock, weights="sharded")), right) <= ROUNDING
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
    assert shared.report()["proof"]["verdict"] == "proven"
    assert shared.report()["proof"]["found"].startswith("cut once, relative error")
    right = latent_of(client, stock)
    assert relative_error(saved_latent(client, shared), right) <= ROUNDING
    entry["plan"]["cut"]["double_blocks.*"] = {}  # ranks raise, and start again
    ship_plans.ship(drifted.shipped, path, source, entry)
    looked = client.queue(automatic(stock, weights="sharded"))
    assert {name for name, text in looked.texts if LOOKS in text} == {"sampler"}
    assert (looked.report()["plan"]["name"], looked.report()["proof"]["verdict"]) == ("uly2-sharded", "proven")
    assert relative_error(saved_latent(client, looked), right) <= ROUNDING
    key = FoundKey(**kept_of(drifted, NEW)["key"])
    assert FoundSpecs(drifted.plans_file).save_refusal(key, "blocks.0 mixes tokens")
    for seed in (6, 7):
        stock = FOUND.graph(cfg=3.0, seed=seed, steps=2)
        refused = client.queue(automatic(stock))
        assert not any(LOOKS in text for _, text in refused.texts)
        (line,) = refused.report()["warnings"]
        assert f"the proof of uly2 failed for {NEW}" in line and "RuntimeError: The size" in line
        assert "; with this file no plan was found: blocks.0 mixes tokens" in line
        assert relative_error(saved_latent(client, refused), latent_of(client, stock)) <= ROUNDING
    source_text = file.read_text()
    file.write_text(f"{source_text}# another one\n")
    ended = client.queue(ours(stock), on_event=lambda event: cancel(drifted, event))
    assert ended.status == "interrupted"
    file.write_text(source_text)
    (drifted.shipped / f"{path}.json").unlink()
    drifted.plans_file.write_text(before)


@dataclass(frozen=True)
class Unwritten:
    """The server of a ComfyUI in which no class has a written plan, and where it keeps those that were found."""

    server: ComfyServer
    plans_file: Path


@pytest.fixture(scope="module")
def unwritten(family_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unwritten]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COMFYUI_PATH", str(comfyui_path()))
        folder = tmp_path_factory.mktemp("unwritten")
        with server(family_models, folder) as started:
            yield Unwritten(started, folder / "cache" / "parallel-dit" / "found_plans.json")


@pytest.mark.full  # that a look replaces a plan that a proof refuses, the test of a shipped one shows
def test_files_of_one_class_that_need_different_plans_have_one_each(unwritten: Unwritten) -> None:
    """Wan 2.2 5B has a timestep for each token, which Wan 2.1's plan cuts nowhere: without a look with its own file it
    was refused. A copy is of the same kind, and the plan of 5B's file serves Wan 2.1's."""
    client, models = ComfyClient(unwritten.server.url), unwritten.server.models / "diffusion_models"

    def looked_at(variant: Variant, weights: str = "replicated") -> set[str]:
        """The nodes on which a plan was looked for, once the latent is stock's."""
        stock = variant.graph(cfg=3.0, seed=1, steps=2)
        result = client.queue(ours(stock, weights=weights))
        proof = result.report()["proof"]
        assert proof["verdict"] == "proven" and proof["found"].startswith("cut once"), variant.name
        assert relative_error(saved_latent(client, result), latent_of(client, stock)) <= ROUNDING < proof["control"]
        return {name for name, text in result.texts if LOOKS in text}

    shutil.copy(models / I2V.file, models / COPY.file)
    assert (looked_at(T2V), looked_at(I2V), looked_at(COPY)) == ({"model"}, {"sampler"}, set())
    assert unwritten.server.log.count("another plan, found with this file, is used: relative error") == 1
    kept = json.loads(unwritten.plans_file.read_text())
    first, second = kept["plans"].items()
    assert {"instead_of"} == second[1].keys() - first[1].keys()
    unwritten.plans_file.write_text(json.dumps({**kept, "plans": dict([second])}))
    assert looked_at(T2V, "sharded") == set()


def test_where_none_is_found_auto_goes_on_without_and_a_plan_by_hand_is_refused(drifted: Drifted) -> None:
    client, stock = drifted.client, REFUSED.graph(cfg=3.0, seed=1, steps=2)
    result = client.queue(automatic(stock))
    told = told_by_loader(result)
    assert LOOKS in told[0] and told[-1].startswith("cfg2-ring1-uly1\n")
    assert f"ranks cannot share an image of {MIXING}: {NONE}" in told[-1]
    assert result.report()["proof"]["verdict"] == "not needed"
    assert relative_error(latent_of(client, automatic(stock)), latent_of(client, stock)) <= ROUNDING
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
