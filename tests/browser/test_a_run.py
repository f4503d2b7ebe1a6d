"""A user's way: from an example to the finished picture, looking at what it took, cancelling, and what fails."""

import os
import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import expect

from demo.pictures import SIZE
from host.client import ComfyClient
from host.workers import worker_pids

from .comfy_page import ComfyPage
from .drawn import areas_by_row, picture_of

PICTURE = """async (node) => {
  const query = new URLSearchParams(app.nodeOutputs[node].images[0])
  const bitmap = await createImageBitmap(await (await fetch(app.api.apiURL(`/view?${query}`))).blob())
  return [bitmap.width, bitmap.height] }"""
FEW = 7  # steps of runs that are held in their second one
SECOND_STEP = f"step 2 of {FEW}"
GAIN = re.compile(r"(faster|slower): .* a step instead of .* m?s|As fast as one device")
KEEP_STATE = "() => app.api.addEventListener('parallel_dit.state', ({ detail }) => (window.told = detail))"
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
    timeline = comfy.open_timeline()
    canvas = comfy.page.get_by_test_id("pdit-rows")
    expect(canvas).to_have_attribute("data-drawn", "2x3")
    rows = areas_by_row(picture_of(canvas))
    assert len(rows) == 2
    assert all(row["compute"] > 5 and row["communication"] > 5 for row in rows), rows
    gained = expect_gain_once_measured(comfy)
    comfy.no_toasts()
    comfy.shot("run")
    comfy.shot("timeline", timeline)
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


def test_cancel_ends_the_run_and_the_workers_rest(comfy: ComfyPage, tmp_path: Path) -> None:
    comfy.load_example(steps=FEW)
    comfy.hold(tmp_path / "gate")
    sidebar = comfy.open_sidebar()
    comfy.queue()
    result, strip = comfy.page.get_by_test_id("pdit-result").first, comfy.page.get_by_test_id("pdit-strip")
    for place in (sidebar, result, strip):
        expect(place).to_contain_text(SECOND_STEP)
    (tmp_path / "gate.1").touch()
    for place in (sidebar, result, strip):
        expect(place).to_contain_text(re.compile(rf"step 3 of {FEW}.*about .* left"))
    comfy.shot("step")
    comfy.page.evaluate("app.extensionManager.command.execute('Comfy.Interrupt')")
    assert comfy.ended()[0] == "execution_interrupted"
    expect(sidebar).to_contain_text("2 CPU ranks ready")
    expect(result).to_contain_text("stopped before its end")
    expect(strip).not_to_contain_text("left")


def test_a_worker_that_dies_is_told_with_the_remedy_in_full_view(comfy: ComfyPage, tmp_path: Path) -> None:
    comfy.load_example(steps=FEW)
    comfy.hold(tmp_path / "gate")
    sidebar = comfy.open_sidebar()
    comfy.queue()
    expect(sidebar).to_contain_text(SECOND_STEP)
    os.kill(worker_pids(comfy.server)[0], signal.SIGKILL)
    (tmp_path / "gate").touch()
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
    comfy.page.evaluate(KEEP_STATE)
    comfy.run()
    expect(sidebar.locator(".pdit-failure")).to_be_hidden()
    expect(card).to_have_count(0)
    expect(comfy.tab).not_to_contain_text("!")
    expect(sidebar.locator(".pdit-rank-row .pdit-state")).to_have_text(["idle"] * 2)
    comfy.page.wait_for_function("window.told?.run === null")  # before, Release asks whether to
    sidebar.get_by_role("button", name="Release").click()
    expect(sidebar).to_contain_text("No workers yet")
