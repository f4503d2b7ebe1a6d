"""The pictures of docs/panel.md: the same five things done on the page of a version before, and on today's.

In each of the two checkouts, with this file in it: `PYTHONPATH=tests python -m browser.before_after take FOLDER`, or
with the names of some of the five behind it; then `... join BEFORE AFTER` draws docs/images/before-*.jpg. Owns what is
done and what part of the page is shown; the page is comfy_page.py's.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import ViewportSize, sync_playwright

from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import write_tiny_models

from .comfy_page import WAIT_MS, ComfyPage
from .conftest import FLAGS, chromium

IMAGES = PACK_ROOT / "docs" / "images"
WIDTH = 600  # of each half, at most
HEAD, GAP, QUALITY = 34, 12, 75
SIZE: ViewportSize = {"width": 1400, "height": 900}
SETTLED_MS = 3000  # pictures fade in, texts are asked of the server; nothing tells of their end
AT = """([kinds, scale, left, top]) => {
  const node = app.graph.nodes.find((each) => kinds.includes(each.comfyClass))
  app.canvas.ds.scale = scale
  app.canvas.ds.offset = [-node.pos[0] + left / scale, -node.pos[1] + top / scale]
  app.canvas.setDirty(true, true)
  return String(node.id) }"""
LOADERS = ["ParallelModelLoader", "ParallelFluxLoader"]
BENCHMARK = {"steps": 2, "width": 128, "height": 128, "warmup": 1, "runs": 2, "stock": False, "plans": "ulysses=2"}


def faster(comfy: ComfyPage) -> bytes:
    """One device and then two, of the same work: what the page says of it."""
    same = {"steps": 4, "width": 384, "height": 384, "seed": 5}
    for plan in ({"devices": "cpu:1", "ulysses": 1}, {}):
        comfy.load_example(**same, **plan)
        comfy.run()
    comfy.open_sidebar()
    comfy.open_timeline()
    comfy.page.wait_for_timeout(SETTLED_MS)
    return comfy.page.screenshot(animations="disabled")


def templates(comfy: ComfyPage) -> bytes:
    """The templates of the pack."""
    page = comfy.page
    page.set_viewport_size({"width": 1400, "height": 1900})
    page.get_by_role("button", name="Templates").first.click()
    page.get_by_role("button", name=re.compile("parallel.dit", re.IGNORECASE)).last.click()
    page.wait_for_timeout(SETTLED_MS)
    picture = page.screenshot(animations="disabled", clip={"x": 70, "y": 185, "width": 1260, "height": 1520})
    page.keyboard.press("Escape")
    page.set_viewport_size(SIZE)
    return picture


def texts(comfy: ComfyPage) -> bytes:
    """The nodes that say the plan, after a run that no other went before: a cached node says nothing."""
    comfy.load_example(steps=1, width=128, height=128)
    comfy.page.evaluate(AT, [["SPConfig"], 1.0, 120, 100])
    comfy.run()
    comfy.page.wait_for_timeout(SETTLED_MS)
    return comfy.page.screenshot(animations="disabled", clip={"x": 100, "y": 120, "width": 560, "height": 700})


def table(comfy: ComfyPage) -> bytes:
    """Show Timing Report after a benchmark."""
    comfy.load_example("flux_benchmark", **BENCHMARK)
    comfy.run()
    node = comfy.page.evaluate(AT, [["ShowTimingReport"], 1.2, 400, 120])
    comfy.page.wait_for_timeout(SETTLED_MS)
    return comfy.page.locator(f'[data-node-id="{node}"]').screenshot(animations="disabled")


def exported(comfy: ComfyPage) -> bytes:
    """What the timeline's PNG button saves."""
    comfy.load_example(steps=4, width=384, height=384)
    comfy.run()
    timeline = comfy.open_timeline()
    comfy.page.wait_for_timeout(SETTLED_MS)
    with comfy.page.expect_download() as found:
        timeline.get_by_role("button", name="PNG", exact=True).click()
    return found.value.path().read_bytes()


TAKEN: tuple[Callable[[ComfyPage], bytes], ...] = (texts, faster, templates, table, exported)


def main(words: list[str]) -> None:
    """Take the five pictures of this checkout, or put those of two side by side."""
    if words[:1] == ["join"]:
        return join(Path(words[1]), Path(words[2]))
    folder = Path(words[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = write_tiny_models(Path(scratch))
        with ComfyServer(models=tiny.models) as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
            context = browser.new_context(viewport=SIZE)
            context.set_default_timeout(WAIT_MS)
            comfy = ComfyPage(context.new_page(), server, tiny, nodes2=True)
            comfy.open()
            for take in TAKEN:
                if words[2:] and take.__name__ not in words[2:]:
                    continue
                comfy.tidy()
                comfy.page.mouse.move(SIZE["width"] - 5, SIZE["height"] / 2)  # no tooltip in a picture
                (folder / f"{take.__name__}.png").write_bytes(take(comfy))
            browser.close()


def join(before: Path, after: Path) -> None:
    """Draw each picture of two folders beside the other, under their names."""
    font = ImageFont.load_default(18)
    for take in TAKEN:
        name = take.__name__
        halves = [shown(folder / f"{name}.png") for folder in (before, after)]
        size = (sum(half.width for half in halves) + GAP, HEAD + max(half.height for half in halves))
        sheet, left = Image.new("RGB", size, "white"), 0
        for half, title in zip(halves, ("before", "now"), strict=True):
            ImageDraw.Draw(sheet).text((left + 4, 6), title, fill="black", font=font)
            sheet.paste(half, (left, HEAD))
            left += half.width + GAP
        sheet.save(IMAGES / f"before-{name}.jpg", quality=QUALITY, optimize=True)


def shown(path: Path) -> Image.Image:
    """A picture as wide as a half may be."""
    with Image.open(io.BytesIO(path.read_bytes())) as opened:
        picture = opened.convert("RGB")
    if picture.width <= WIDTH:
        return picture
    return picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main(sys.argv[1:])
