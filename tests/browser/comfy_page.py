"""ComfyUI's page as a user has it before him: loads graphs, queues, opens our tabs."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, TimeoutError, expect

from demo.graphs import AUTOENCODER, TRANSFORMER
from demo.pictures import SIZE
from host.client import ComfyClient
from host.server import ComfyServer

WAIT_MS = 180_000  # of anything that shall be seen: a loaded machine is slow, and who has it sooner goes on sooner
RUN_MS = 600_000
SHOTS = "PARALLEL_DIT_SCREENSHOTS"  # a folder to leave pictures in
PROMPT = "a rocket on blue, centre"
EXAMPLE = "/api/workflow_templates/parallel-dit/{}.json"
READY = """() => {
  const { extensionManager } = window.app ?? {}
  const there = extensionManager?.getSidebarTabs?.().some((tab) => tab.id === 'parallel-dit')
  return there && !extensionManager.spinner }"""  # which turns until that graph is there
QUEUE = """(ends) => {
  window.ended = null
  const keep = (kind) => (event) => { window.ended ??= [kind, event.detail] }
  for (const kind of ends) app.api.addEventListener(kind, keep(kind), { once: true })
  const refused = (why) => { window.ended ??= ['not queued', String(why)] } // of which no event tells
  window.queueing = true
  app.queuePrompt(0, 1)
    .then((sent) => sent === false && refused(JSON.stringify(app.lastNodeErrors)), refused)
    .finally(() => { window.queueing = false })
}"""
QUEUEING = """() => JSON.stringify({
  asking: window.queueing, ended: window.ended, hidden: document.hidden,
  busy: app.processingQueue, waiting: app.queueItems?.length,
  socket: app.api.socket?.readyState, client: app.api.clientId,
  requests: performance.getEntriesByType('resource').slice(-5).map(({ name, duration }) => [name, duration]) })"""
SET = """([kind, name, value]) => {
  const node = app.graph.nodes.find((each) => each.comfyClass === kind)
  const widget = node.widgets.find((each) => each.name === name)
  widget.value = value
  widget.callback?.(value)
}"""
NO_TOASTS = """() => {
  const { toast } = app.extensionManager
  toast[toast.dismissAll ? 'dismissAll' : 'removeAll']()  // a frontend has one of them
}"""
# A node that takes and gives a MODEL, between our loader and what it fed.
BETWEEN = """(kind) => {
  const loader = app.graph.nodes.find((each) => each.comfyClass === 'ParallelModelLoader')
  const node = LiteGraph.createNode(kind)
  app.graph.add(node)
  for (const link of [...loader.outputs[0].links]) {
    const { target_id, target_slot } = app.graph.links.get?.(link) ?? app.graph.links[link]
    node.connect(0, app.graph.getNodeById(target_id), target_slot)
  }
  loader.connect(0, node, 0)
  node.pos = [4000, 4000]
  return node.id }"""
TIDY = """async (nodes2) => {
  const { sidebarTab, bottomPanel, setting } = app.extensionManager
  app.graph.clear()
  if (sidebarTab.activeSidebarTabId) sidebarTab.toggleSidebarTab(sidebarTab.activeSidebarTabId)
  if (bottomPanel.activeBottomPanelTabId === 'parallel-dit.timeline')
    bottomPanel.toggleBottomPanelTab('parallel-dit.timeline')
  await setting.set('Comfy.VueNodes.Enabled', nodes2)
  await setting.set('Comfy.ColorPalette', 'dark')
}"""
PALETTE = """(name) => {
  const probe = document.body.appendChild(document.createElement('i'))
  probe.style.color = 'var(--input-text)'
  const [red, green, blue] = getComputedStyle(probe).color.match(/\\d+/g).map(Number)
  probe.remove()
  return (red + green + blue > 382) === (name === 'dark') }"""
ENDS = ("execution_success", "execution_error", "execution_interrupted")
DEMO = """([graph, files, small]) => {
  for (const node of graph.nodes) {
    if (node.type === 'DualCLIPLoader')
      Object.assign(node, { type: 'DemoTextEncoderLoader', inputs: [], widgets_values: [] })
    node.widgets_values = (node.widgets_values ?? []).map((value) => files[value] ?? value)
  }
  const takes = ({ name, options }) => name in small  // two nodes have an input of one name and other values
    && (!Array.isArray(options?.values) || options.values.includes(small[name]))
  return app.loadGraphData(graph, true, true, 'example').then(() => {
    for (const node of app.graph.nodes) for (const widget of node.type === 'MarkdownNote' ? [] : node.widgets ?? [])
      if (takes(widget)) { widget.value = small[widget.name]; widget.callback?.(widget.value) }
  })
}"""


class ComfyPage:
    """One tab. `errors` are the texts of everything that was thrown and not caught in it."""

    def __init__(self, page: Page, server: ComfyServer, *, nodes2: bool) -> None:
        self.page, self.server, self.nodes2 = page, server, nodes2
        self.errors: list[str] = []
        self._seeds = itertools.count(time.time_ns() % 2**40)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    @property
    def sidebar(self) -> Locator:
        return self.page.get_by_test_id("pdit-sidebar")

    @property
    def tab(self) -> Locator:
        """The button of our sidebar tab, which may have a badge."""
        return self.page.locator('.parallel-dit-tab-button, [data-testid="parallel-dit-tab-button"]')

    @property
    def timeline(self) -> Locator:
        return self.page.get_by_test_id("pdit-timeline")

    def end_runs(self) -> None:
        """Take all prompts out of the server's queue, and end the one that runs."""
        client = ComfyClient(self.server.url)
        client.post("/queue", {"clear": True})
        client.post("/interrupt", {})

    def open(self) -> None:
        """ComfyUI's page, until our extension is there."""
        self.page.goto(self.server.url, wait_until="domcontentloaded")
        self.wait_ready()

    def tidy(self) -> None:
        """As a test finds it: an empty graph, no panel, no toast, the dark theme."""
        self.errors.clear()
        self.no_toasts()
        self.page.evaluate(TIDY, self.nodes2)
        for panel in (self.sidebar, self.timeline):
            expect(panel).to_have_count(0)

    def no_toasts(self) -> None:
        self.page.evaluate(NO_TOASTS)

    def toast(self, text: str) -> Locator:
        """A toast that says `text`, whichever of its two kinds this frontend has."""
        return self.page.locator('.p-toast-message, [data-testid="toast"]', has_text=text)

    def reload(self) -> None:
        self.page.reload(wait_until="domcontentloaded")
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until the frontend has set our extension up and, after that, opened the graph that it begins with."""
        self.page.wait_for_function(READY, timeout=WAIT_MS)
        self.setting("Comfy.VueNodes.Enabled", self.nodes2)  # the server keeps that of whichever page set it last

    def setting(self, name: str, value: Any) -> None:
        self.page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])

    def palette(self, name: str) -> None:
        """Another theme, `light` or `dark`, once the page has it."""
        self.setting("Comfy.ColorPalette", name)
        self.page.wait_for_function(PALETTE, arg=name)

    def load_example(self, name: str = "flux_parallel", **values: Any) -> None:
        """An example of Flux.1 as the template browser loads it, with the demo's model and these values of widgets."""
        graph = self.page.evaluate("(path) => fetch(path).then((answer) => answer.json())", EXAMPLE.format(name))
        files = {"flux1-dev.safetensors": TRANSFORMER, "ae.safetensors": AUTOENCODER}
        seed = next(self._seeds)  # another one each time: what ComfyUI has in its cache says nothing of a run
        small = {"text": PROMPT, "width": SIZE, "height": SIZE, "steps": 3, "seed": seed}
        small |= {"mode": "manual", "ulysses": 2, "devices": "cpu:2"}
        self.page.evaluate(DEMO, [graph, files, small | values])

    def queue(self) -> None:
        """What the Run button does, until the server has answered; its end is kept for `ended`."""
        self.page.evaluate(QUEUE, list(ENDS))
        self._until("() => !window.queueing", WAIT_MS)

    def ended(self) -> tuple[str, dict]:
        """How the prompt ended: the event's name and its data."""
        self._until("() => window.ended", RUN_MS)
        kind, detail = self.page.evaluate("window.ended")
        return kind, detail

    def _until(self, holds: str, limit_ms: float) -> None:
        try:
            self.page.wait_for_function(holds, timeout=limit_ms)
        except TimeoutError as error:
            client = ComfyClient(self.server.url)
            ended = [entry["status"]["messages"] for entry in list(client.get("/history").values())[-2:]]
            page, waiting = self.page.evaluate(QUEUEING), client.get("/queue")
            raise AssertionError(f"{holds} does not hold; the page: {page}; {waiting}; {ended}") from error

    def run(self) -> None:
        """Queue, and wait for a good end."""
        self.queue()
        kind, detail = self.ended()
        assert kind == "execution_success", detail

    def open_sidebar(self) -> Locator:
        if not self.sidebar.is_visible():
            self.page.get_by_role("button", name="Parallel DiT").first.click()
        self.sidebar.wait_for()
        return self.sidebar

    def open_timeline(self) -> Locator:
        if not self.timeline.is_visible():
            self.page.evaluate("app.extensionManager.bottomPanel.toggleBottomPanelTab('parallel-dit.timeline')")
        self.timeline.wait_for()
        return self.timeline

    def node(self, kind: str) -> str:
        """A JavaScript expression for the one node of a class."""
        return f"app.graph.nodes.find((node) => node.comfyClass === '{kind}')"

    def values(self, kind: str) -> dict[str, Any]:
        """What the widgets of the one node of a class have, by their names."""
        pairs = f"{self.node(kind)}.widgets.map((widget) => [widget.name, widget.value])"
        return self.page.evaluate(f"Object.fromEntries({pairs})")

    def of_node(self, kind: str) -> dict[str, str]:
        """How a report says that it is of this graph and of the one node of a class."""
        return self.page.evaluate(f"({{ graph: app.graph.id, node_id: String({self.node(kind)}.id) }})")

    def widget(self, kind: str, name: str, value: Any) -> None:
        """Set a widget of the one node of a class, as a user does."""
        self.page.evaluate(SET, [kind, name, value])

    def edit(self, kind: str, name: str, value: Any) -> None:
        """Set a widget of the one node of a class, as a step of the editor's undo."""
        self.page.evaluate("app.canvas.emitBeforeChange()")
        self.widget(kind, name, value)
        self.page.evaluate("app.canvas.emitAfterChange()")

    def between(self, kind: str) -> int:
        """Put a node that takes and gives a MODEL behind our loader; returns its id."""
        return self.page.evaluate(BETWEEN, kind)

    def hold(self, gate: Path) -> None:
        """Have the run stay in its second step until the file is there, or it is cancelled."""
        self.between("HoldSteps")
        self.widget("HoldSteps", "gate", str(gate))

    def newest_report(self, kind: str) -> dict[str, Any]:
        client = ComfyClient(self.server.url)
        number = [entry["number"] for entry in client.get("/parallel_dit/state")["reports"] if entry["kind"] == kind][
            -1
        ]
        return client.get(f"/parallel_dit/reports/{number}")

    def shot(self, name: str, part: Locator | None = None) -> None:
        """A picture of the page or of a part of it, where somebody wants to look at it."""
        folder = os.environ.get(SHOTS)
        if folder:
            path = Path(folder) / f"{name}-{'nodes2' if self.nodes2 else 'classic'}.png"
            (part or self.page).screenshot(path=path, animations="disabled")
