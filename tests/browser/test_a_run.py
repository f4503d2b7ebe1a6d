"""A user's way: from an example to the finished picture, looking at what it took, cancelling, and what fails."""

from __future__ import annotations

import io
import json
import os
import re
import signal

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, expect

from demo.pictures import SIZE
from host.client import ComfyClient
from host.workers import worker_pids

from .comfy_page import ComfyPage
from .conftest import Tabs
from .drawn import TIME_LEFT, TIME_RIGHT, lengths_by_row, picture_of

PICTURE = """async (node) => {
  const query = new URLSearchParams(app.nodeOutputs[node].images[0])
  const bitmap = await createImageBitmap(await (await fetch(app.api.apiURL(`/view?${query}`))).blob())
  return [bitmap.width, bitmap.height] }"""
HEAD = 107  # pixels of a saved picture above its rows: title, three lines, legend
FIVE = 5  # steps of one test alone, so that its headline is known
LONG = 1200  # steps: seconds on any machine, ended long before
GAIN = re.compile(r"(faster|slower): .* a step instead of .* m?s|As fast as one device")
STEP = re.compile(rf"step \d+ of {LONG}")
IN_FULL_VIEW = """(card) => {
  const box = card.getBoundingClientRect()
  const points = [[0.02, 0.1], [0.5, 0.5], [0.98, 0.9]].map(([x, y]) => [box.x + x * box.width, box.y + y * box.height])
  return points.every(([x, y]) => card.contains(document.elementFromPoint(x, y))) }"""


def test_from_an_example_to_the_picture_its_figures_and_a_reload(comfy: ComfyPage) -> None:
    width = 144 if comfy.nodes2 else 160  # of which the server knows no run on one device yet
    comfy.load_example(width=width)
    comfy.open_sidebar()
    comfy.run()
    picture = comfy.page.evaluate(PICTURE, comfy.page.evaluate(f"{comfy.node('SaveImage')}.id"))
    assert picture == [width, SIZE]
    headline = comfy.page.get_by_test_id("pdit-headline")
    expect(headline).to_contain_text(re.compile(r"\d (m?s|µs) a step .*uly2"))
    expect(comfy.sidebar).to_contain_text("cpu:1")
    expect(comfy.sidebar.locator(".pdit-mesh circle")).to_have_count(2)
    results = comfy.page.get_by_test_id("pdit-result")
    expect(results.first).to_contain_text("a step")
    expect(results.last).to_contain_text("decode")
    comfy.open_timeline()
    canvas = comfy.page.get_by_test_id("pdit-rows")
    expect(canvas).to_have_attribute("data-drawn", "2x3")
    rows = lengths_by_row(picture_of(canvas))
    assert len(rows) == 2
    assert all(row["compute"] > 50 and row["communication"] > 5 for row in rows), rows
    gained = expect_gain_once_measured(comfy)
    comfy.no_toasts()
    comfy.shot("run")
    before = headline.inner_text()
    comfy.reload()
    comfy.open_sidebar()
    expect(comfy.page.get_by_test_id("pdit-headline")).to_have_text(before)
    for place in (comfy.sidebar, results.first):
        expect(place.get_by_test_id("pdit-hero")).to_have_text(gained)
    expect(results.first).to_contain_text("uly2")
    expect(results.last).to_contain_text("decode")


def expect_gain_once_measured(comfy: ComfyPage) -> str:
    """The figure over one device, on the node and in the sidebar, which the run itself cannot have; of the server's
    own reports, and no picture is made for it.
    """
    client, measure = ComfyClient(comfy.server.url), "Measure against one device"
    before = len(client.get("/history"))
    for place in (comfy.sidebar, comfy.page.get_by_test_id("pdit-result").first):
        expect(place).to_contain_text(re.compile(r"\d % computing, \d+ % waiting: (good|fair|poor)"))
        expect(place.get_by_role("button", name=measure)).to_be_visible()
    comfy.sidebar.get_by_role("button", name=measure).click()
    figure = comfy.sidebar.get_by_test_id("pdit-hero")
    expect(figure).to_have_text(GAIN)
    (prompt,) = list(client.get("/history").values())[before:]
    assert not [output for output in prompt["outputs"].values() if "images" in output]
    runs = [entry for entry in client.get("/parallel_dit/state")["reports"] if entry["kind"] == "denoise"]
    run, alone = (entry["summary"] for entry in runs[-2:])
    assert (run["ranks"], alone["ranks"], runs[-1]["reference"]) == (2, 1, True)
    assert run["speedup"]["factor"] == pytest.approx(alone["step_s"] / run["step_s"])
    expect(comfy.sidebar).to_contain_text(f"#{runs[-1]['number']} on one device")
    text = figure.inner_text()
    expect(comfy.page.get_by_test_id("pdit-result").first.get_by_test_id("pdit-hero")).to_have_text(text)
    return text


def test_the_timeline_looks_at_a_step_and_saves_what_it_shows(comfy: ComfyPage) -> None:
    comfy.load_example(steps=4)
    comfy.run()
    timeline = comfy.open_timeline()
    canvas = comfy.page.get_by_test_id("pdit-rows")
    expect(canvas).to_have_attribute("data-drawn", "2x4")
    whole = canvas.evaluate("(canvas) => canvas.toDataURL()")
    timeline.get_by_title("The next step").click()
    expect(timeline.get_by_label("Step to look at, 0 for all")).to_have_value("1")
    assert canvas.evaluate("(canvas) => canvas.toDataURL()") != whole
    canvas.focus()
    comfy.page.keyboard.press("0")
    assert canvas.evaluate("(canvas) => canvas.toDataURL()") == whole
    expect_links(timeline)
    comfy.shot("timeline", timeline)
    report = expect_files(comfy)
    assert [len(rank["compute_s"]) for rank in report["ranks"]] == [4, 4]
    comfy.page.evaluate("window.open = (address) => { window.asked = address; return null }")  # a browser that blocks
    timeline.get_by_role("button", name="Perfetto").click()
    assert comfy.page.evaluate("window.asked") == "https://ui.perfetto.dev"
    expect(comfy.toast("blocked the new tab")).to_be_visible()


def expect_files(comfy: ComfyPage) -> dict:
    """What the timeline saves is the server's report; that as a trace; and as a picture, a row a rank, to scale."""
    report, trace = json.loads(saved(comfy, "JSON", ".json")), json.loads(saved(comfy, "Trace", ".trace.json"))
    assert report == comfy.newest_report("denoise")
    events = trace["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert tracks == {0: "rank 0 cpu:0", 1: "rank 1 cpu:1"}
    slices = [(x["tid"], x["name"], x["args"]["step"], x["ts"], x["dur"]) for x in events if x["ph"] == "X"]
    assert slices == [
        (rank["rank"], name, step + 1, pytest.approx(at * 1e6), pytest.approx(length * 1e6))
        for rank in report["ranks"]
        for name, step, at, length in parts_of(rank)
    ]
    picture = Image.open(io.BytesIO(saved(comfy, "PNG", ".png"))).convert("RGB")
    width, height = comfy.page.get_by_test_id("pdit-rows").evaluate("(canvas) => [canvas.width, canvas.height]")
    rows = lengths_by_row(picture.crop((0, HEAD, width, HEAD + height)))
    edges = 2 * len(report["timings"]["step_s"])  # of each colour, between two pixels
    assert rows == [pytest.approx(lengths_of(rank, report["ranks"], width), abs=edges) for rank in report["ranks"]]
    return report


def saved(comfy: ComfyPage, button: str, ending: str) -> bytes:
    """What is in the file that one of the timeline's buttons saves."""
    with comfy.page.expect_download() as found:
        comfy.timeline.get_by_role("button", name=button, exact=True).click()
    assert found.value.suggested_filename.endswith(ending)
    return found.value.path().read_bytes()


def parts_of(rank: dict) -> list[tuple[str, int, float, float]]:
    """Each part of each step that took any time: what it is, the step, when it began, how long it took."""
    parts = []
    for step, at in enumerate(rank["begin_s"]):
        for name in ("compute", "communication", "idle"):
            length = rank[f"{name}_s"][step]
            parts += [(name, step, at, length)] if length > 0 else []
            at += length
    return parts


def lengths_of(rank: dict, ranks: list[dict], width: int) -> dict[str, float]:
    """How many pixels of a rank's row have which colour, later parts over earlier ones."""
    end_s = max(at + length for each in ranks for *_, at, length in parts_of(each)[-1:])
    fine, there = 20, width - TIME_LEFT - TIME_RIGHT
    row = np.full(there * fine, "", dtype="U13")
    for name, _, at, length in parts_of(rank):
        row[round(at / end_s * len(row)) : round((at + length) / end_s * len(row))] = name
    return {name: float((row == name).sum() / fine) for name in ("compute", "communication", "idle")}


def expect_links(timeline: Locator) -> None:
    """Both ranks sent and waited, and it says how much: bytes were counted in the run, seconds measured."""
    rows = timeline.locator("[data-chart=links] tr")
    expect(rows).to_have_count(3)
    for row in (1, 2):
        expect(rows.nth(row).locator("[data-axis=ulysses]")).to_have_text("ulysses")
        for figure, unit in (("sent", r"\d+ [kM]?B"), ("waited", r"[\d.]+ (m?s|µs)"), ("rate", r"[\d.]+ [kMG]?B/s")):
            expect(rows.nth(row).locator(f"[data-figure={figure}]")).to_have_text(re.compile(f"^{unit}$"))


def test_cancel_ends_the_run_and_the_workers_rest(comfy: ComfyPage) -> None:
    comfy.load_example(steps=LONG)
    sidebar = comfy.open_sidebar()
    comfy.queue()
    result, strip = comfy.page.get_by_test_id("pdit-result").first, comfy.page.get_by_test_id("pdit-strip")
    for place in (sidebar, result, strip):
        expect(place).to_contain_text(STEP)
        expect(place).to_contain_text(re.compile(r"about .* left"))
    comfy.shot("step")
    comfy.page.evaluate("app.extensionManager.command.execute('Comfy.Interrupt')")
    assert comfy.ended()[0] == "execution_interrupted"
    expect(sidebar).to_contain_text("2 CPU ranks ready")
    expect(result).to_contain_text("stopped before its end")
    expect(strip).not_to_contain_text("left")


def test_a_worker_that_dies_is_told_with_the_remedy_in_full_view(comfy: ComfyPage) -> None:
    comfy.load_example(steps=LONG)
    sidebar = comfy.open_sidebar()
    expect(sidebar).not_to_contain_text(STEP)  # of a run before, whose workers may end unseen
    comfy.queue()
    expect(sidebar).to_contain_text(STEP)
    os.kill(worker_pids(comfy.server)[0], signal.SIGKILL)
    assert comfy.ended()[0] == "execution_error"
    card = comfy.page.get_by_test_id("pdit-error-card")
    expect(card).to_contain_text("Parallel Sampler")
    expect(card).to_contain_text("rank 0")
    expect(card).to_contain_text("The next prompt starts fresh workers")
    comfy.page.wait_for_function(IN_FULL_VIEW, arg=card.element_handle())
    expect(comfy.page.get_by_test_id("error-overlay")).to_be_hidden()  # ComfyUI's own card of the node
    expect(sidebar.locator(".pdit-failure")).to_contain_text("rank 0")
    expect(comfy.tab).to_contain_text("!")
    expect(comfy.page.get_by_test_id("pdit-result").first).to_contain_text("stopped before its end")
    comfy.shot("failure")
    comfy.load_example()
    comfy.run()
    expect(sidebar.locator(".pdit-failure")).to_be_hidden()
    expect(card).to_have_count(0)
    expect(comfy.tab).not_to_contain_text("!")


@pytest.mark.full
def test_two_tabs_agree(tabs: Tabs) -> None:
    first, second = tabs.get("classic"), tabs.get("nodes2", nodes2=True)
    first.load_example(steps=FIVE)
    for each in (first, second):
        each.open_sidebar()
    first.run()
    headlines = [each.page.get_by_test_id("pdit-headline") for each in (first, second)]
    for headline in headlines:
        expect(headline).to_contain_text(f"for {FIVE} steps")
    assert headlines[0].inner_text() == headlines[1].inner_text()
    second.sidebar.get_by_role("button", name="Release").click()
    for each in (first, second):
        expect(each.page.get_by_test_id("pdit-nothing")).to_contain_text("No workers yet")
