"""A class for which nobody wrote a plan is looked at when its file is first loaded, and shares its tokens once proven.

Owns: what the user sees of it in a real server, and that its images are stock's. Does not own: what is found
(tests/models/test_found_plans.py), nor what becomes of a process that is slow, ends or is cancelled
(runtime/test_find_plan.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from host.client import PromptResult, Workflow
from host.pack_workflows import TOLERANCE, latent_of
from parallel_runtime.proof import relative_error

from .conftest import NEW, Drifted
from .graphs import node
from .test_self_proof import ours, report_of
from .variants import BY_NAME

FOUND, EDIT, REFUSED = BY_NAME["joyimage"], BY_NAME["joyimage edit"], BY_NAME["kandinsky 5 t2v"]
LOOKS = "looking how ranks can share an image of"


def automatic(graph: Workflow, **config: Any) -> Workflow:
    return ours(graph) | {"config": node("SPConfig", mode="auto", devices="cpu:2", ulysses=1, ring=1, **config)}


def told_by_loader(result: PromptResult) -> list[str]:
    return [text for name, text in result.texts if name == "model"]


@pytest.fixture(scope="module")
def found(drifted: Drifted) -> PromptResult:
    """The first run of a class whose plan is found."""
    return drifted.client.queue(automatic(FOUND.graph(cfg=3.0, seed=1, steps=2))).require_success()


def test_auto_shares_a_class_by_the_plan_that_is_found_and_proven(found: PromptResult, drifted: Drifted) -> None:
    client, stock = drifted.client, FOUND.graph(cfg=3.0, seed=1, steps=2)
    *looking, last = told_by_loader(found)
    assert looking[0] == f"{LOOKS} {NEW}: 0 s of at most 300 s"
    assert last.startswith("uly2\n") and "found, proven: cut once, relative error" in last
    report = report_of(found)
    assert report["plan"]["name"] == "uly2" and report["proof"]["verdict"] == "proven"
    assert report["proof"]["error"] <= TOLERANCE < report["proof"]["control"] / 10
    right = latent_of(client, stock)
    assert relative_error(latent_of(client, automatic(stock)), right) <= TOLERANCE
    (entry,) = json.loads(drifted.plans_file.read_text())["plans"].values()
    assert entry["key"]["model_class"].endswith(NEW)
    again = client.queue(ours(FOUND.graph(cfg=1.0, seed=2, steps=1), ulysses=1, ring=2))  # loaded again, not looked at
    assert report_of(again)["plan"]["name"] == "ring2" and not any(LOOKS in text for text in told_by_loader(again))
