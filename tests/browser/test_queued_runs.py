"""Ten queued runs in two tabs: each figure is of its own run, the panel answers meanwhile, nothing piles up."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from host.client import ComfyClient

from .comfy_page import RUN_MS, ComfyPage
from .conftest import Tabs

STEPS = range(30, 40)  # of the ten runs, each other ones, so that no figure of one could be another's
KEPT = 6  # reports of a kind, as nodes/host/panel/report_history.py has it
OF_STEPS = re.compile(r"step \d+(?:/| of )(\d+)")  # in what a node says of a run
GRAPH = """async () => {
  const { output, workflow } = await app.graphToPrompt()
  return { prompt: output, client_id: app.api.clientId, extra_data: { extra_pnginfo: { workflow } } }
}"""
# What the node says right after each word of the server, beside the run that this word was of.
WATCH = """() => {
  window.heard = []
  window.rows = []
  app.api.addEventListener('parallel_dit.state', ({ detail: { run } }) => {
    const told = document.querySelector('[data-testid=pdit-result]').textContent
    if (run?.class !== 'ParallelSampler' || !(run.steps > 1)) return
    window.heard.push([run.steps, told])
    window.rows.push([...document.querySelectorAll('.pdit-live-text')].map((each) => each.textContent))
  })
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


def queue(client: ComfyClient, graph: dict[str, Any], steps: Iterable[int], *, gates: Mapping[int, Path]) -> None:
    """Queue the graph of the page once for each of these numbers of steps, as the page does.

    Those with a gate stay before their first step until the file is there.
    """
    (sampler,) = [name for name, node in graph["prompt"].items() if node["class_type"] == "ParallelSampler"]
    for each in steps:
        asked = copy.deepcopy(graph)
        inputs = asked["prompt"][sampler]["inputs"]
        inputs |= {"steps": each, "seed": inputs["seed"] + each}
        if each in gates:
            held = {"latent": inputs["latent_image"], "gate": str(gates[each])}
            asked["prompt"]["gate"] = {"class_type": "HoldLatent", "inputs": held}
            inputs["latent_image"] = ["gate", 0]
        client.post("/prompt", asked)


def queued(client: ComfyClient) -> int:
    """How many prompts run or wait."""
    queue = client.get("/queue")
    return len(queue["queue_running"]) + len(queue["queue_pending"])


def test_ten_queued_runs_keep_their_figures_in_both_tabs(comfy: ComfyPage, tabs: Tabs, tmp_path: Path) -> None:
    other, client, page = tabs.get("second", nodes2=not comfy.nodes2), ComfyClient(comfy.server.url), comfy.page
    comfy.load_example(width=64, height=64, steps=2)
    for each in (comfy, other):
        each.open_sidebar()
        each.open_timeline()
    page.evaluate(WATCH)
    graph = page.evaluate(GRAPH)
    queue(client, graph, [2], gates={})  # all that a run adds to the page is there from now on
    settle(page, client)
    before = [kept_by(each.page) for each in (comfy, other)]
    page.evaluate("window.heard.length = 0")
    gate = tmp_path / "gate"
    try:
        queue(client, graph, STEPS, gates={STEPS[-1]: gate})
        assert "took" in comfy.timeline.evaluate(NEXT_STEP)
        assert queued(client) > 0, "the last of them is held: the timeline answered while they ran"
    finally:
        gate.touch()
    settle(page, client)
    heard = page.evaluate("window.heard")
    assert {steps for steps, _ in heard} & set(STEPS), "the node was never looked at while a run was under way"
    mixed = [(steps, told) for steps, told in heard if set(OF_STEPS.findall(told)) != {str(steps)}]
    assert mixed == [], "what the node says is of the run that is under way"
    rows = [[text for text in texts if text] for texts in page.evaluate("window.rows")]
    assert max(map(len, rows)) == 2, "both ranks' rows say how they spend their time while they do"
    assert all(re.fullmatch(r"\d+ % computing", text) for texts in rows for text in texts), rows
    reports, held = denoised(client), len(client.get("/parallel_dit/state")["reports"])
    assert [report["sampling"]["steps"] for report in reports] == list(reversed(STEPS))[:KEPT]
    for each in (comfy, other):
        each.page.bring_to_front()  # a tab behind another one draws no frame, and a click waits for one
        expect_figures(each, reports)
    for earlier, each in zip(before, (comfy, other), strict=True):
        later = kept_by(each.page)
        assert later["listeners"] == earlier["listeners"]
        assert later["reports"] <= held, "those that the server has"
        assert later["elements"] <= earlier["elements"] + 2 * KEPT, "a choice for each run, in both lists"
    other.sidebar.get_by_role("button", name="Release").click()
    for each in (comfy, other):
        expect(each.page.get_by_test_id("pdit-nothing")).to_contain_text("No workers yet")
    tabs.close("second")


def settle(page: Page, client: ComfyClient) -> None:
    """Until nothing is queued any more, and the page has drawn the last run."""
    end_s = time.monotonic() + RUN_MS / 1000
    while queued(client):
        assert time.monotonic() < end_s, client.get("/queue")
        time.sleep(0.1)
    newest = denoised(client)[0]
    drawn = f"2x{newest['sampling']['steps']}"
    expect(page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", drawn)


def expect_figures(comfy: ComfyPage, reports: list[dict[str, Any]]) -> None:
    """Each run of the list has the steps and rows of its own report; the sidebar has those of the newest."""
    pick, rows = comfy.timeline.get_by_label("Run", exact=True), comfy.page.get_by_test_id("pdit-rows")
    names = [name for name in pick.locator("option").all_inner_texts() if "uly2" in name]
    assert [int(re.match(r"#(\d+),", name)[1]) for name in names] == [report["number"] for report in reports]
    for report in reports:
        steps = report["sampling"]["steps"]
        pick.select_option(str(report["number"]))
        expect(rows).to_have_attribute("data-drawn", f"2x{steps}")
        expect(comfy.timeline.get_by_test_id("pdit-timeline-note")).to_contain_text(f"for {steps} steps")
    expect(comfy.page.get_by_test_id("pdit-headline")).to_contain_text(f"for {reports[0]['sampling']['steps']} steps")
