"""The editor reads each template as it is meant: what Run would queue is what the file says, and nothing is missing."""

from __future__ import annotations

from host.client import ComfyClient
from saved_workflows.templates import TEMPLATES
from saved_workflows.ui_format import by_title, to_api

from .comfy_page import EXAMPLE, ComfyPage

# The files are on no test's server; that it offers them is not what this asks.
READ = """async (path) => {
  const file = await (await fetch(path)).json()
  await app.loadGraphData(structuredClone(file), true, true, null, { skipAssetScans: true })
  const shown = app.graph.nodes.map((node) => [node.type, node.title])
  return { file, shown, queued: (await app.graphToPrompt()).output } }"""


def test_the_editor_queues_what_a_template_says(comfy: ComfyPage, client: ComfyClient) -> None:
    info = client.object_info()
    for name in TEMPLATES:
        read = comfy.page.evaluate(READ, EXAMPLE.format(name))
        assert sorted(read["shown"]) == sorted([node["type"], node["title"]] for node in read["file"]["nodes"])
        assert by_title(read["queued"]) == by_title(to_api(read["file"], info)), name
