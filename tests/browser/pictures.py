"""Takes the pictures of the help, of the templates and of the README anew, from a real server in a real browser.

`PYTHONPATH=tests python -m browser.pictures [help] [templates] [readme FOLDER]`; FOLDER holds what the browser tests
left there (PARALLEL_DIT_SCREENSHOTS). Owns which picture is of what and how large it is; the page is comfy_page.py's.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import write_tiny_models

from .comfy_page import WAIT_MS, ComfyPage
from .conftest import FLAGS, chromium

HELP = PACK_ROOT / "web" / "docs" / "images"
TEMPLATES = PACK_ROOT / "example_workflows"
README = PACK_ROOT / "docs" / "images"
SCALE = 1.5  # of a node's picture, beside its size on a page
COLOURS = 64  # of a node's picture: it has few, and the file is a third
THUMBNAIL = (640, 400)
README_WIDTH = 1200
# An example is run for what its nodes show then; a node that is in none of them is shown alone.
RUNS = {
    "flux_parallel": ("SPConfig", "ParallelFluxLoader", "ParallelFluxSampler", "TimedVAEDecode"),
    "flux_benchmark": ("ParallelBenchmark", "ShowTimingReport"),
}
ALONE = ("ParallelFluxListSampler", "ParallelizeModel", "ReleaseParallelPool")
SHOTS = ("run-classic", "run-nodes2", "failure-nodes2", "config-nodes2", "light-nodes2")
SHOW = """(kind) => {
  if (!app.graph.nodes.some((node) => node.comfyClass === kind)) {
    app.graph.clear()
    app.graph.add(LiteGraph.createNode(kind))
  }
  const node = app.graph.nodes.find((each) => each.comfyClass === kind)
  node.pos = [0, 0]
  node.setSize([300, node.computeSize()[1]])
  for (const other of app.graph.nodes) if (other !== node) other.pos = [4000, 4000]
  app.canvas.deselectAll?.()
  app.canvas.ds.scale = 1
  app.canvas.ds.offset = [500, 120]
  app.canvas.setDirty(true, true)
  return node.id }"""
BARE = """.side-tool-bar-container, .p-toast, .minimap-main-container, [data-testid], .actionbar-container, header, nav
  { visibility: hidden !important }
  #graph-canvas-container, .graph-canvas-container, #graph-canvas, .lg-node, .lg-node *, .pdit-node, .dom-widget,
  .dom-widget *, .pdit-node * { visibility: visible !important }"""


def main(words: list[str]) -> None:
    """Take the pictures named."""
    if words[:1] == ["readme"]:
        return from_tests(Path(words[1]))
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_models(Path(folder))
        server = ComfyServer(models=tiny.models, flags=("--preview-method", "none"))
        with server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)

            def opened(*, nodes2: bool, scale: float) -> ComfyPage:
                context = browser.new_context(viewport={"width": 1600, "height": 1300}, device_scale_factor=scale)
                context.set_default_timeout(WAIT_MS)
                page = ComfyPage(context.new_page(), server, tiny, nodes2=nodes2)
                page.open()
                page.tidy()
                return page

            for word, take in (("help", of_nodes), ("templates", of_templates)):
                if not words or word in words:
                    take(opened)
            browser.close()


def of_nodes(opened: Callable[..., ComfyPage]) -> None:
    """web/docs/images: every node as it looks, after a run where one of the examples has it."""
    comfy = opened(nodes2=True, scale=SCALE)
    for example, kinds in RUNS.items():
        comfy.load_example(example, steps=8, plans="ulysses=2\nring=2", warmup=1, runs=2)
        comfy.run()
        for kind in kinds:
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


def of_templates(opened: Callable[..., ComfyPage]) -> None:
    """example_workflows/*.jpg: the graph of each, as the template browser shows it."""
    comfy = opened(nodes2=False, scale=1)
    for path in sorted(TEMPLATES.glob("*.json")):
        comfy.load_example(path.stem)
        comfy.page.evaluate("app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        comfy.page.wait_for_timeout(1500)  # the view glides there
        picture = Image.open(io.BytesIO(comfy.page.screenshot(clip={"x": 60, "y": 90, "width": 1500, "height": 937.5})))
        picture.convert("RGB").resize(THUMBNAIL, Image.Resampling.LANCZOS).save(path.with_suffix(".jpg"), quality=80)


def from_tests(folder: Path) -> None:
    """docs/images: what the browser tests saw."""
    for name in SHOTS:
        picture = Image.open(folder / f"{name}.png").convert("RGB")
        size = (README_WIDTH, round(picture.height * README_WIDTH / picture.width))
        kept = name if name.startswith("run") else name.removesuffix("-nodes2")
        picture.resize(size, Image.Resampling.LANCZOS).save(README / f"{kept}.jpg", quality=82)
    picture = Image.open(folder / "timeline-nodes2.png").convert("RGB")
    picture.save(README / "timeline.jpg", quality=82)


if __name__ == "__main__":
    main(sys.argv[1:])
