"""The editor reads each template as it is meant: Run would queue what the file says, and missing files are offered.

So with blueprints: each is among the nodes, and as a node of a graph it stands for its template; one is run.
"""

from typing import Any

import pytest
from playwright.sync_api import expect

from host.client import ComfyClient
from host.outcomes import OURS, StockFailsError
from host.tiny_models import TinyModels
from saved_workflows.test_blueprints import saved
from saved_workflows.test_saved_workflows import adds_defaults_alone
from saved_workflows.test_templates import saved as template
from saved_workflows.ui_format import NOTE, by_title, to_api
from tools.blueprints import BLUEPRINTS, inside
from tools.templates import TEMPLATES

from .comfy_page import EXAMPLE, ComfyPage
from .conftest import Tabs
from .made_up import MadeUp
from .test_a_run import PICTURE

LOAD = "async (path) => app.loadGraphData(await (await fetch(path)).json())"
# No test's server has the files, so it would offer them each time.
READ = """async (path) => {
  const file = await (await fetch(path)).json()
  await app.loadGraphData(structuredClone(file), true, true, null, { skipAssetScans: true })
  const shown = app.graph.nodes.map((node) => [node.type, node.title])
  return { file, shown, queued: (await app.graphToPrompt()).output } }"""

# As dropped from the list of nodes: the editor's store of blueprints, and the canvas that pastes what it gives.
DROPPED = """async (name) => {
  const pinia = document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia
  const store = pinia._s.get('subgraph')
  const all = store.subgraphBlueprints ?? [...pinia._s.get('nodeDef').blueprintNodeDefsByName.values()]
  const listed = all.find((each) => each.display_name === name)
  const held = store.getBlueprint(listed.name)
  app.graph.clear()
  app.canvas._deserializeItems({ nodes: held.nodes, subgraphs: held.definitions.subgraphs }, { position: [100, 100] })
  const { category, description } = listed
  return { category, description, queued: (await app.graphToPrompt()).output } }"""
RUN_ONE = """async ([file, given]) => {
  await app.loadGraphData(file, true, true, null, { skipAssetScans: true })
  const node = app.graph.nodes[0], save = LiteGraph.createNode('SaveImage')
  app.graph.add(save)
  node.connect(0, save, 0)
  for (const [name, value] of Object.entries(given)) {
    const widget = () => node.widgets?.find((each) => each.name === name)
    while (widget() === undefined) await new Promise(requestAnimationFrame) // the editor shows what is inside by and by
    widget().value = value
  }
  return (await app.graphToPrompt()).output }"""


def lacks(file: dict[str, Any], info: dict[str, Any]) -> bool:
    """Whether a file has a node that ComfyUI does not: the editor asks for it, in front of the page."""
    return not {node["type"] for node in file["nodes"]} <= {*info, *OURS, NOTE}


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
def test_the_editor_queues_what_a_template_says(every: int, comfy: ComfyPage, client: ComfyClient) -> None:
    info = client.object_info()
    lacking = [name for name in TEMPLATES if lacks(template(name), info)]
    for name in sorted(TEMPLATES.keys() - lacking)[::every]:
        read = comfy.page.evaluate(READ, EXAMPLE.format(name))
        assert sorted(read["shown"]) == sorted([node["type"], node["title"]] for node in read["file"]["nodes"])
        queued, said = by_title(read["queued"]), by_title(to_api(read["file"], info))
        assert adds_defaults_alone(queued, said, info), name
    if lacking:
        raise StockFailsError(f"this ComfyUI lacks nodes of {lacking}")


@pytest.mark.full
def test_the_editor_offers_to_download_the_files_of_a_template(tabs: Tabs) -> None:
    page = tabs.get("nodes2", nodes2=True).page
    page.evaluate(LOAD, EXAMPLE.format("qwen_image"))
    page.get_by_text("View details").click()
    for name in ("qwen_image_fp8_e4m3fn", "qwen_2.5_vl_7b_fp8_scaled", "qwen_image_vae"):
        expect(page.get_by_title(f"{name}.safetensors").first).to_be_visible()
    expect(page.get_by_text("Download", exact=True)).to_have_count(3)
    tabs.close("nodes2")  # what is offered stays on the page


def test_a_blueprint_is_among_the_nodes_and_stands_for_its_template(comfy: ComfyPage, client: ComfyClient) -> None:
    info = client.object_info()
    lacking, other = [name for name in BLUEPRINTS if lacks(inside(saved(name)), info)], []
    for name in sorted(BLUEPRINTS.keys() - lacking):
        dropped = comfy.page.evaluate(DROPPED, BLUEPRINTS[name])
        (definition,) = saved(name)["definitions"]["subgraphs"]
        assert dropped["category"].endswith(definition["category"])
        assert dropped["description"] == definition["description"]
        if by_title(dropped["queued"]) != by_title(to_api(inside(saved(name)), info)):
            other.append(name)
    assert not other
    if lacking:
        raise StockFailsError(f"this ComfyUI lacks nodes of {lacking}")


def test_a_blueprint_runs_with_what_its_node_is_given(comfy: ComfyPage, tiny_models: TinyModels) -> None:
    tiny, file = tiny_models, saved("flux_parallel")
    replace_type(file, "DualCLIPLoader", "TinyDualCLIPLoader")
    given = {"width": 128, "height": 96, "steps": 2, "devices": "cpu:2", "prompt": "a lighthouse"}
    given |= {"unet_name": tiny.dev, "clip_name1": tiny.clip_l, "clip_name2": tiny.t5, "vae_name": tiny.vae}
    queued = comfy.page.evaluate(RUN_ONE, [file, given])
    values = [node["inputs"] for node in queued.values()]
    for name, value in given.items():
        assert any(inputs.get("text" if name == "prompt" else name) == value for inputs in values), name
    comfy.run()
    (saved_as,) = (node for node, each in queued.items() if each["class_type"] == "SaveImage")
    assert comfy.page.evaluate(PICTURE, saved_as) == [128, 96]


def replace_type(file: dict[str, Any], kind: str, other: str) -> None:
    """Nodes of a kind inside a blueprint become nodes of another; of its values those that both have stay."""
    for node in file["definitions"]["subgraphs"][0]["nodes"]:
        if node["type"] == kind:
            node["type"] = other
            node["widgets_values"] = node["widgets_values"][:3]


# Pairs of nodes that lie over one another as they are drawn.
COVERED = """() => {
  const nodes = app.graph.nodes.filter((node) => node.comfyClass)
  const over = (a, b) => a.pos[0] < b.pos[0] + b.size[0] && b.pos[0] < a.pos[0] + a.size[0]
    && a.pos[1] < b.pos[1] + b.size[1] && b.pos[1] < a.pos[1] + a.size[1]
  return nodes.flatMap((a, at) => nodes.slice(at + 1).filter((b) => over(a, b)).map((b) => [a.title, b.title])) }"""


BESIDE = """() => {
  const { canvas, ds } = app.canvas
  const least = Math.min(...app.graph.nodes.map((node) => node.pos[0]))
  const { right } = document.querySelector('[data-testid="pdit-sidebar"]').getBoundingClientRect()
  return canvas.getBoundingClientRect().left + (least + ds.offset[0]) * ds.scale >= right }"""


def test_the_first_runs_button_opens_the_first_template_whose_nodes_cover_nothing(told_comfy: MadeUp) -> None:
    comfy = told_comfy.comfy  # of a server that has run nothing: after a run nobody needs files
    comfy.setting("ParallelDiT.FirstRun.Over", False)
    first = comfy.open_sidebar().get_by_test_id("pdit-first")
    words = first.locator("[data-step=files] > span").nth(1).bounding_box()
    first.get_by_role("button", name="Open Z-Image Turbo").click()
    comfy.page.wait_for_function("() => app.graph.nodes.some((node) => node.comfyClass === 'ParallelModelLoader')")
    assert words["width"] > 200, "the button takes the room of its words"
    config = comfy.page.get_by_test_id("pdit-plan")
    expect(config).not_to_have_attribute("data-verdict", "bad")
    assert comfy.page.evaluate(COVERED) == []
    comfy.page.wait_for_function(BESIDE)  # the sidebar covers nothing, either
    comfy.setting("ParallelDiT.FirstRun.Over", True)
