"""Takes the pictures of the help and of the README anew, from a real server in a real browser.

`PYTHONPATH=tests python -m tools.pictures [run | readme FOLDER]`; `run`: those of a run alone, some minutes on two
cores that do nothing else. FOLDER holds what the browser tests left there (PARALLEL_DIT_SCREENSHOTS). Owns which
picture is of what and how large it is; the page is comfy_page.py's.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from browser.comfy_page import WAIT_MS, ComfyPage
from browser.conftest import FLAGS, chromium
from demo.graphs import TEXT_ENCODER, add_demo_model
from host.client import ComfyClient
from host.server import PACK_ROOT, ComfyServer

HELP = PACK_ROOT / "web" / "docs" / "images"
README = PACK_ROOT / "docs" / "images"
SCALE = 1.5  # of a node's picture, beside its size on a page
COLOURS = 64  # of a node's picture: it has few, and the file is a third
README_WIDTH = 1200
# An example is run for what its nodes show then; a node that is in none of them is shown alone.
RUNS = {
    "flux_parallel": ("SPConfig", "ParallelModelLoader", "ParallelSampler", "TimedVAEDecode"),
    "flux_benchmark": ("ParallelBenchmark", "ShowTimingReport"),
}
# The first of them again, with the names that these had before.
RENAMED = {"ParallelModelLoader": "ParallelFluxLoader", "ParallelSampler": "ParallelFluxSampler"}
ALONE = ("ParallelFluxListSampler", "ParallelizeModel", "ReleaseParallelPool")
# Prompt and negative prompt of 16 pictures on a rank each: what two ranks gain most by. `cfg` is degree and scale. One
# rank takes 7.2 s of a core for it, each of two 3.6 s; of four pictures it is 2.1 s and 1.4 s.
WINS = {"steps": 20, "ulysses": 1, "cfg": 2, "batch_size": 16}
RANKS = 2
MEASURED = re.compile("faster|slower|As fast as one device")
FASTER = re.compile(r"([\d.]+)× faster")
LEAST = 1.5  # times as fast as one rank, else no picture of the run is kept
MEASURE = "Measure against one device"
SHOTS = ("error-card-nodes2",)
SHOW = """(kind) => {
  if (!app.graph.nodes.some((node) => node.comfyClass === kind)) {
    app.graph.clear()
    app.graph.add(LiteGraph.createNode(kind))
  }
  const node = app.graph.nodes.find((each) => each.comfyClass === kind)
  node.pos = [0, 0]
  node.showAdvanced = true
  node.setSize([300, node.computeSize()[1]])
  for (const other of app.graph.nodes) if (other !== node) other.pos = [4000, 4000]
  app.canvas.deselectAll?.()
  app.canvas.ds.scale = 1
  app.canvas.ds.offset = [500, 120]
  app.canvas.setDirty(true, true)
  return node.id }"""


# The graph beside the sidebar and above the timeline.
VIEW = """() => {
  app.canvas.ds.scale = 0.65
  app.canvas.ds.offset = [550, 160]
  app.canvas.setDirty(true, true) }"""
RENAME = """async (names) => {
  const graph = app.graph.serialize()
  for (const node of graph.nodes) node.type = names[node.type] ?? node.type
  await app.loadGraphData(graph) }"""


def main(words: list[str]) -> None:
    """Take the help's pictures and a run's, a run's alone, or make the README's of what the tests left."""
    if words[:1] == ["readme"]:
        return from_tests(Path(words[1]))
    if words not in ([], ["run"]):
        raise SystemExit(f"{' '.join(words)}: not known; use run, readme FOLDER, or nothing")
    if len(os.sched_getaffinity(0)) != RANKS:  # each rank of the run has one thread then, as its caption says
        raise SystemExit(f"the run's {RANKS} ranks are to have a core each: begin with taskset -c 0,1")
    with tempfile.TemporaryDirectory() as folder:
        add_demo_model(Path(folder))
        server = ComfyServer(models=Path(folder), packs=(TEXT_ENCODER,), flags=("--preview-method", "none"))
        with server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
            if not words:
                context = browser.new_context(viewport={"width": 1600, "height": 1300}, device_scale_factor=SCALE)
                context.set_default_timeout(WAIT_MS)
                comfy = ComfyPage(context.new_page(), server, nodes2=True)
                comfy.open()
                comfy.tidy()
                of_nodes(comfy)
            context = browser.new_context(viewport={"width": 1600, "height": 950})
            context.set_default_timeout(WAIT_MS)
            comfy = ComfyPage(context.new_page(), server, nodes2=True)
            of_run(comfy)
            of_card(comfy)
            browser.close()


def of_run(comfy: ComfyPage) -> None:
    """docs/images: the page after a run of the demo's model over two ranks, and one on one rank to measure it by."""
    comfy.open()
    comfy.tidy()
    comfy.setting("LiteGraph.Canvas.MinFontSizeForLOD", 0)  # else the classic renderer leaves small text out
    comfy.setting("Comfy.Minimap.Visible", False)  # it would hide the picture
    comfy.open_sidebar()
    comfy.open_timeline()
    measured(comfy, seed=8)
    comfy.page.evaluate(VIEW)
    save(seen(comfy.page), "run-nodes2")
    shot = comfy.timeline.screenshot(animations="disabled")
    Image.open(io.BytesIO(shot)).convert("RGB").save(README / "timeline.jpg", quality=82)


def measured(comfy: ComfyPage, *, seed: int) -> None:
    """A run over two ranks, after one that starts them, and once more on one of them. The browser rests meanwhile:
    on a machine of two cores it would take one of them from the ranks.
    """
    for number in (seed + 100, seed):
        comfy.load_example(**WINS, seed=number)
        comfy.queue()
        rest(comfy)
        kind, detail = comfy.ended()
        if kind != "execution_success":
            raise RuntimeError(f"{kind}: {detail}")
    measure, figure = comfy.sidebar.get_by_role("button", name=MEASURE), comfy.sidebar.get_by_test_id("pdit-hero")
    expect(measure.or_(figure.filter(has_text=MEASURED))).to_be_visible()
    if measure.count():  # else an earlier picture's run on one rank counts for this one, too
        measure.click()
        rest(comfy)
    expect(figure).to_contain_text(MEASURED)
    found = FASTER.search(figure.inner_text())
    if found is None or float(found.group(1)) < LEAST:
        raise SystemExit(f"{figure.inner_text()!r}: below {LEAST} times; let nothing else run on this machine")


def rest(comfy: ComfyPage) -> None:
    """Have the browser do nothing until the server has done what was queued.

    All of its processes are stopped: a frozen page leaves the one that draws, which takes a core where no GPU does.
    """
    client = ComfyClient(comfy.server.url)
    comfy.page.wait_for_timeout(500)  # the prompt is on its way
    browser = [each for each in psutil.Process().children(recursive=True) if "chrom" in each.name()]
    for process in browser:
        process.suspend()
    try:
        while any(client.get("/queue").values()):
            time.sleep(0.2)
    finally:
        for process in reversed(browser):
            process.resume()


def seen(page: Page) -> Image.Image:
    """The page as it is."""
    page.wait_for_timeout(3000)  # the picture fades in; nothing tells of its end
    return Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")


def of_card(comfy: ComfyPage) -> None:
    """docs/images: the card to share of a run that was measured against one rank."""
    comfy.timeline.get_by_role("button", name="Share").click()
    expect(comfy.page.get_by_test_id("pdit-share-canvas")).to_have_attribute("data-drawn", "with picture")
    with comfy.page.expect_download() as found:
        comfy.page.get_by_role("button", name="Save PNG").click()
    save(Image.open(found.value.path()).convert("RGB"), "share-card")


def of_nodes(comfy: ComfyPage) -> None:
    """web/docs/images: every node as it looks, after a run where one of the examples has it."""
    for example, kinds in RUNS.items():
        comfy.load_example(example, steps=20, plans="ulysses=2\nring=2", warmup=1, runs=2, stock=False)
        comfy.run()
        for kind in kinds:
            of_node(comfy.page, kind)
    comfy.load_example(next(iter(RUNS)), steps=20)
    comfy.page.evaluate(RENAME, RENAMED)
    comfy.widget("ParallelFluxSampler", "modulations", "keep")  # which the newer name has not
    comfy.run()
    for kind in RENAMED.values():
        of_node(comfy.page, kind)
    for kind in ALONE:
        of_node(comfy.page, kind)


def of_node(page: Page, kind: str) -> None:
    """One node, alone on the canvas."""
    number = page.evaluate(SHOW, kind)
    node = page.locator(f'[data-node-id="{number}"]')
    node.wait_for()
    page.wait_for_timeout(1000)  # text that is asked of the server, pictures that fade in; nothing tells of their end
    picture = Image.open(io.BytesIO(node.screenshot(animations="disabled"))).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(HELP / f"{kind}.png", optimize=True)


def from_tests(folder: Path) -> None:
    """docs/images: what the browser tests saw."""
    for name in SHOTS:
        save(Image.open(folder / f"{name}.png").convert("RGB"), name.removesuffix("-nodes2"))


def save(picture: Image.Image, name: str) -> None:
    """A picture of the README, as wide as all of them."""
    size = (README_WIDTH, round(picture.height * README_WIDTH / picture.width))
    picture.resize(size, Image.Resampling.LANCZOS).save(README / f"{name}.jpg", quality=82)


if __name__ == "__main__":
    main(sys.argv[1:])
