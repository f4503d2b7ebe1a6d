"""Templates as ComfyUI's own editor queues them: in API form, their subgraphs expanded, bypassed nodes left out.

Owns: the page that is asked. Does not own: which templates there are (package.py), the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Error, Page, sync_playwright

from browser.conftest import FLAGS, chromium
from host.client import Workflow

READY_MS, EXPAND_MS = 120_000, 60_000
READY = "() => Boolean(window.app?.extensionManager && window.LiteGraph && app.graph)"
# Nobody looks at the page: drawing takes more than the rest.
QUIET = """async () => {
  await app.extensionManager.setting.set('Comfy.VueNodes.Enabled', false)
  await app.extensionManager.setting.set('Comfy.Minimap.Visible', false)
  app.canvas.draw = () => {}
}"""
EXPAND = """async (graph) => {
  await app.loadGraphData(graph, true, false)
  const { output } = await app.graphToPrompt()
  return output
}"""


class Editor:
    """ComfyUI's page on one server. While it is open, this thread may not run asyncio."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def expand(self, graph: dict[str, Any]) -> Workflow:
        """A saved graph in API form. Raises ValueError with what the page said when it cannot."""
        try:
            return dict(self._page.evaluate(EXPAND, graph))
        except (Error, TypeError) as error:
            raise ValueError(f"the editor cannot open it: {error}") from error


@contextmanager
def editor(url: str) -> Iterator[Editor]:
    """The page of a server that runs at `url`, in a browser of its own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 400, "height": 300})
        page.set_default_timeout(EXPAND_MS)
        page.goto(url, wait_until="domcontentloaded")
        page.wait_for_function(READY, timeout=READY_MS)
        page.evaluate(QUIET)
        yield Editor(page)
        browser.close()
