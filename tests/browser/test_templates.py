"""The editor reads each template as it is meant: Run would queue what the file says, and missing files are offered."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from host.client import ComfyClient
from saved_workflows.templates import TEMPLATES
from saved_workflows.ui_format import by_title, to_api

from .comfy_page import EXAMPLE, ComfyPage
from .conftest import Tabs

LOAD = "async (path) => app.loadGraphData(await (await fetch(path)).json())"
# No test's server has the files, so it would offer them each time.
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


@pytest.mark.full
def test_the_editor_offers_to_download_the_files_of_a_template(tabs: Tabs) -> None:
    page = tabs.get("nodes2", nodes2=True).page
    page.evaluate(LOAD, EXAMPLE.format("qwen_image"))
    page.get_by_text("View details").click()
    for name in ("qwen_image_fp8_e4m3fn", "qwen_2.5_vl_7b_fp8_scaled", "qwen_image_vae"):
        expect(page.get_by_title(f"{name}.safetensors").first).to_be_visible()
    expect(page.get_by_text("Download", exact=True)).to_have_count(3)
    tabs.close("nodes2")  # what is offered stays on the page
