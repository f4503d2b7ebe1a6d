"""Queued runs in two tabs: each figure is of its own run, the panel answers meanwhile, nothing piles up."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from host.client import ComfyClient

from .comfy_page import RUN_MS, ComfyPage
from .conftest import Tabs

STEPS = range(3, 6)  # of the runs, each other ones, so that no figure of one could be another's
GRAPH = """async () => {
  const { output, workflow } = await app.graphToPrompt()
  return { prompt: output, client_id: app.api.clientId, extra_data: { extra_pnginfo: { workflow } } }
}"""
NEXT_STEP = """(timeline) => {
  timeline.querySelector('[title="The next step"]').click()
  return timeline.querySelector('[data-testid=pdit-details]').textContent
}"""
STORE = """async () => {
  const href = [...document.styleSheets].map((each) => each.href).find((each) => each?.endsWith('panel/style.css'))
  return (await import(new URL('store.mjs', href))).Store.prototype
}"""
SIZES = """function () {
  return this.map((store) => ({ reports: store._reports.size, listeners: store._listeners.size,
    elements: document.querySelectorAll('.pdit, .pdit *').length }))
}"""


def kept_by(page: Page) -> dict[str, int]:
    """Of the page's one store: reports and listeners; and how many elements of ours there are."""
    session = page.context.new_cdp_session(page)
    prototype = session.send("Runtime.evaluate", {"expression": f"({STORE})()", "awaitPromise": True})["result"]
    stores = session.send("Runtime.queryObjects", {"prototypeObjectId": prototype["objectId"]})["objects"]
    call = {"functionDeclaration": SIZES, "objectId": stores["objectId"], "returnByValue": True}
    (sizes,) = session.send("Runtime.callFunctionOn", call)["result"]["value"]
    session.detach()
    return sizes


def denoised(client: ComfyClient) -> list[dict[str, Any]]:
    """The server's reports of sampling runs that it still has, the newest first."""
    entries = [entry for entry in client.get("/parallel_dit/state")["reports"] if entry["kind"] == "denoise"]
    return [client.get(f"/parallel_dit/reports/{entry['number']}") | entry for entry in reversed(entries)]


def queue(client: ComfyClient, graph: dict[str, Any], gates: Mapping[int, Path]) -> None:
    """Queue the graph of the page once for each of these numbers of steps, held at its gate, as the page does."""
    (sampler,) = [name for name, node in graph["prompt"].items() if node["class_type"] == "ParallelSampler"]
    for steps, gate in gates.items():
        asked = copy.deepcopy(graph)
        inputs = asked["prompt"][sampler]["inputs"]
        held = {"model": inputs["model"], "gate": str(gate)}
        asked["prompt"]["hold"] = {"class_type": "HoldSteps", "inputs": held}
        inputs |= {"steps": steps, "seed": inputs["seed"] + steps, "model": ["hold", 0]}
        client.post("/prompt", asked)


def test_queued_runs_keep_their_figures_in_both_tabs(comfy: ComfyPage, tabs: Tabs, tmp_path: Path) -> None:
    other, client = tabs.get("second", nodes2=not comfy.nodes2), ComfyClient(comfy.server.url)
    both = (comfy, other)
    comfy.load_example(width=64, height=64, steps=2)
    for each in both:
        each.open_sidebar()
        each.open_timeline()
    graph = comfy.page.evaluate(GRAPH)
    comfy.run()  # all that a run adds to the page is there from now on
    expect(other.page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", "2x2")
    before = [kept_by(each.page) for each in both]
    gates = {steps: tmp_path / str(steps) for steps in STEPS}
    queue(client, graph, gates)
    for steps, gate in gates.items():
        expect_running(comfy, other, steps)
        gate.touch()
    drawn = re.compile(f"2x{STEPS[-1]}$")
    expect(comfy.page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", drawn, timeout=RUN_MS)
    reports, held = denoised(client), len(client.get("/parallel_dit/state")["reports"])
    newest = reports[: len(STEPS)]
    assert [report["sampling"]["steps"] for report in newest] == list(reversed(STEPS))
    for each in both:
        each.page.bring_to_front()  # a tab behind another one draws no frame, and a click waits for one
        expect_figures(each, newest)
    for earlier, each in zip(before, both, strict=True):
        later = kept_by(each.page)
        assert later["listeners"] == earlier["listeners"]
        assert later["reports"] <= held, "those that the server has"
        assert later["elements"] <= earlier["elements"] + 2 * len(STEPS), "a choice for each run, in both lists"
    other.sidebar.get_by_role("button", name="Release").click()
    for each in both:
        expect(each.page.get_by_test_id("pdit-nothing")).to_contain_text("No workers yet")
    tabs.close("second")


def expect_running(comfy: ComfyPage, other: ComfyPage, steps: int) -> None:
    """The run is held in its second step: node and sidebars say so, and the timeline answers meanwhile."""
    places = (comfy.page.get_by_test_id("pdit-result").first, comfy.sidebar, other.sidebar)
    for place in places:
        expect(place).to_contain_text(f"step 2 of {steps}", timeout=RUN_MS)
    for each in (comfy, other):
        expect(each.sidebar.locator(".pdit-live-text")).to_have_text([re.compile(r"^\d+ % computing$")] * 2)
    assert "took" in comfy.timeline.evaluate(NEXT_STEP)


def expect_figures(comfy: ComfyPage, reports: list[dict[str, Any]]) -> None:
    """Each run of the list has the steps and rows of its own report; the sidebar has those of the newest."""
    pick, rows = comfy.timeline.get_by_label("Run", exact=True), comfy.page.get_by_test_id("pdit-rows")
    names = [name for name in pick.locator("option").all_inner_texts() if "uly2" in name]
    numbers = [int(re.match(r"#(\d+),", name)[1]) for name in names]
    assert numbers[: len(reports)] == [report["number"] for report in reports]
    for report in reports:
        steps = report["sampling"]["steps"]
        pick.select_option(str(report["number"]))
        expect(rows).to_have_attribute("data-drawn", f"2x{steps}")
        expect(comfy.timeline.get_by_test_id("pdit-timeline-note")).to_contain_text(f"for {steps} steps")
    expect(comfy.page.get_by_test_id("pdit-headline")).to_contain_text(f"for {reports[0]['sampling']['steps']} steps")
