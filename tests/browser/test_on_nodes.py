"""What stands on nodes: plans, results and tables in boxes of their own, SP Config's inputs in the order of use."""

import json
import re
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import expect

from .comfy_page import ComfyPage
from .made_up import MadeUp, a_pool, a_report
from .test_what_is_shown import kept_by

TEXT_OF_COMFYUI = "$$node-text-preview"
HEIGHT = "(node) => document.querySelector(`[data-node-id='${node.id}']`)?.offsetHeight ?? node.size[1]"
HEIGHTS = f"""() => Object.fromEntries(app.graph.nodes
  .filter((node) => ['SPConfig', 'ParallelModelLoader', 'ParallelBenchmark'].includes(node.comfyClass))
  .map((node) => [node.comfyClass, ({HEIGHT})(node)]))"""
NO_TEXTS = f"""() => app.graph.nodes.flatMap((node) => node.widgets ?? [])
  .filter((widget) => widget.name === '{TEXT_OF_COMFYUI}').length"""
SHOWN = """(kind) => {
  const node = app.graph.nodes.find((each) => each.comfyClass === kind)
  const element = document.querySelector(`[data-node-id='${node.id}']`)
  if (!element)
    return node.widgets.filter((w) => w.last_y !== undefined && node.isWidgetVisible(w) && !w.element)
      .sort((a, b) => a.last_y - b.last_y).map((w) => w.name)
  const names = new Set(node.widgets.map((widget) => widget.name))
  const labels = [...element.querySelectorAll('*')].filter((each) => !each.children.length && each.checkVisibility())
    .filter((each) => names.has(each.textContent.trim()))
  labels.sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
  return [...new Set(labels.map((each) => each.textContent.trim()))] }"""
FEW = {"steps": 1, "width": 128, "height": 128, "warmup": 0, "runs": 1, "stock": False}


def test_texts_stand_in_the_boxes_of_nodes_and_reports_in_tables(comfy: ComfyPage) -> None:
    comfy.load_example("flux_benchmark", plans="ulysses=2", **FEW)
    plan = comfy.page.get_by_test_id("pdit-plan")
    expect(plan).to_contain_text("uly2")
    comfy.page.evaluate("new Promise(requestAnimationFrame)")
    assert plan.evaluate("(box) => box.scrollHeight - box.clientHeight") <= 0, "the last of four lines is cut"
    before = comfy.page.evaluate(HEIGHTS)
    comfy.run()
    expect(comfy.page.get_by_test_id("pdit-result")).to_contain_text("uly2")
    assert comfy.page.evaluate(HEIGHTS) == before, "a node that grows covers the one below"
    assert comfy.page.evaluate(NO_TEXTS) == 0
    told = comfy.page.get_by_text(re.compile("cpu:1: 1/2 of the attention heads"))
    expect(told).to_have_count(1)
    assert "cpu:0: 1/2 of the attention heads\ncpu:1: 1/2 of the attention heads" in plan.inner_text(), (
        "lines stay lines"
    )
    expect(plan.locator("code")).to_have_count(0)
    table = comfy.page.get_by_test_id("pdit-tables").locator("table")
    expect(table.locator("caption")).to_contain_text("128 × 128 · 1 step")
    rows = [row.locator("th, td").all_inner_texts() for row in table.locator("tr").all()]
    cases = comfy.newest_report("benchmark")["contenders"]
    assert [row[0] for row in rows[1:3]] == [each["name"] for each in cases] == ["one rank", "uly2"]
    assert rows[1][2] == "1.00×"
    assert rows[2][2] == f"{cases[0]['median_s'] / cases[1]['median_s']:.2f}×"
    comfy.shot("table")


TOLD = """([kind, reports]) => app.graph.nodes.find((each) => each.comfyClass === kind)
  .onExecuted({ parallel_dit: reports })"""


def test_a_table_shows_reports_of_every_kind_and_age(made_up: MadeUp) -> None:
    comfy = made_up.comfy
    comfy.load_example("flux_benchmark")
    tables = comfy.page.get_by_test_id("pdit-tables")
    older = {"schema": 1, "kind": "denoise", "steps": 2, "denoise_s": 1.0, "step_s": [0.5, 0.5]}
    told = [
        ([a_report(2, 3)], ["0.50 s", "1 cuda:1", "0.30 s"]),
        ([a_report(3, 3, plan={"name": "uly2", "ranks": 2})], ["uly2 · cuda:0, cuda:1a step"]),
        ([older, a_report(32, 2)], ["report of an older version", "31 cuda:31"]),
        ([a_report(2, 3, warnings=["rank 1 is slow"], from_cache=True)], ["rank 1 is slow", "cache"]),
        ([{"schema": "parallel-dit/report/9"}, None, 7], ["of a version that this panel does not know"]),
    ]
    for reports, texts in told:
        comfy.page.evaluate(TOLD, ["ShowTimingReport", reports])
        for text in texts:
            expect(tables).to_contain_text(text)
        expect(tables).not_to_contain_text(re.compile("undefined|null|NaN"))


ORDER = ["mode", "devices", "machines", "ulysses", "ring", "cfg", "data", "pipefusion", "patches", "warmup_steps"]
ADVANCED = ["machines", "weights", "lora", "compiled", "step_cache", "loop", "attention", "exchange", "tries", "shares"]
ADVANCED += ["plans"]
ORDER += ADVANCED[1:]
# As saved: in the order of the schema.
SAVED = ["manual", "cpu:4", 1, 2, "side branch", 1, 1, "sharded", 2, 3, 4, "blocks", 0.25, ""]
ADD = """async (values) => {
  const node = LiteGraph.createNode('SPConfig')
  app.graph.add(node)
  const saved = app.graph.serialize()
  saved.nodes[0].widgets_values = values
  await app.loadGraphData(saved) }"""


ROOM = "app.graph.nodes[0].getLayoutWidgets().map((widget) => widget.name)"
OF_ANOTHER_PACK = """() => {
  const node = LiteGraph.createNode('SPConfig')
  const names = () => node.widgets.map((widget) => widget.name)
  node.addWidget('text', 'theirs', 'x', () => {})
  node.widgets.unshift(node.widgets.pop())
  const before = names()
  const saved = node.serialize().widgets_values
  node.configure({ ...node.serialize(), widgets_values: saved })
  return [before, names(), saved[0], node.widgets[0].value] }"""


def test_inputs_are_in_the_order_a_person_fills_and_are_saved_in_the_schemas(comfy: ComfyPage) -> None:
    comfy.page.evaluate(ADD, SAVED)
    assert comfy.page.evaluate("app.graph.nodes[0].showAdvanced"), "what the workflow sets is out of sight"
    for hidden in (ADVANCED, []):
        comfy.page.evaluate(f"app.graph.nodes[0].showAdvanced = {json.dumps(hidden == [])}")
        shown = [name for name in ORDER if name not in hidden]
        comfy.page.wait_for_function(
            "([names, shown]) => eval(shown)('SPConfig').join() === names.join()", arg=[shown, SHOWN]
        )
        assert comfy.page.evaluate(ROOM)[: len(shown)] == shown, "what is not shown has no room in the classic renderer"
    values = comfy.values("SPConfig")
    assert [values[name] for name in ("lora", "data", "cfg", "weights", "compiled")] == [
        "side branch", 1, 1, "sharded", "blocks",
    ]  # fmt: skip
    for saved in ("app.graph.serialize().nodes[0]", "app.graph.nodes[0].clone().serialize()"):
        assert comfy.page.evaluate(f"{saved}.widgets_values.slice(0, 14)") == SAVED
    queued = comfy.page.evaluate("app.graphToPrompt()")["output"]
    assert [each["inputs"]["lora"] for each in queued.values()] == ["side branch"]
    before, after, *values = comfy.page.evaluate(OF_ANOTHER_PACK)
    assert before[:3] == ["theirs", "mode", "devices"]
    assert after == before
    assert values == ["x", "x"]


def test_a_node_shows_the_run_of_a_server_that_began_to_count_anew(made_up: MadeUp) -> None:
    made_up.comfy.load_example()
    result = made_up.comfy.page.get_by_test_id("pdit-result").first
    editor = made_up.comfy.of_node("ParallelSampler")
    for session, step_s, told in (("first", 0.5, "0.50 s a step"), ("second", 0.25, "0.25 s a step")):
        report = a_report(2, 3, timings={"step_s": [step_s] * 3})
        state = {"session": f"made up {session}", "reports": [made_up.report(1, report) | editor]}
        made_up.tell(pools=[a_pool()], **state)
        expect(result).to_contain_text(told)


def test_a_first_run_that_stops_is_told_without_one_before_it(made_up: MadeUp) -> None:
    made_up.comfy.load_example()
    result = made_up.comfy.page.get_by_test_id("pdit-result").first
    editor = made_up.comfy.of_node("ParallelSampler")
    run = {"node": editor["node_id"], "graph": editor["graph"], "prompt": "p", "step": 1, "steps": 4}
    made_up.tell(pools=[a_pool(sampling=True, state="busy")], run=run, reports=[])
    expect(result).to_contain_text("step 2 of 4")
    made_up.tell(pools=[a_pool()], run=None, reports=[])
    expect(result).to_have_text("This run stopped before its end.")


def test_whatever_prompt_runs_is_not_ended_without_a_question(made_up: MadeUp) -> None:
    page = made_up.comfy.page
    sidebar = made_up.comfy.open_sidebar()
    for run, asked in ((None, 0), ({"node": "3", "prompt": "p", "class": "KSampler"}, 1)):
        made_up.tell(pools=[a_pool()], run=run)
        page.evaluate("window.confirmed = []")
        sidebar.get_by_role("button", name="Release").click()
        page.wait_for_function(f"window.confirmed.length === {asked}")


NESTED = """() => {
  const made = ['SPConfig', 'ParallelSampler'].map((kind) => LiteGraph.createNode(kind))
  for (const node of made) app.graph.add(node)
  app.graph.convertToSubgraph(new Set(made)) }"""
OPENED_AND_COPIED = """async () => {
  await app.loadGraphData(app.graph.serialize())
  for (const node of app.graph.nodes[0].subgraph.nodes) node.clone().serialize() }"""


LOADER_CHANGES = """() => {
  const loader = LiteGraph.createNode('ParallelModelLoader')
  app.graph.add(loader)
  loader.widgets[0].callback(loader.widgets[0].value) }"""


# As long as a change waits for the next one, and more, by the page's own clock: of two timers the earlier ends first.
QUIET = "() => new Promise((done) => setTimeout(done, 500))"


def test_nodes_in_subgraphs_and_copies_hear_nothing_once_they_are_gone(told_comfy: MadeUp) -> None:
    page, heard, asked = told_comfy.comfy.page, [], []
    page.on("request", lambda request: asked.append(request.url) if "/parallel_dit/plan" in request.url else None)
    page.evaluate(NESTED)
    for _ in range(3):
        page.evaluate(OPENED_AND_COPIED)
        told_comfy.tell()
        heard.append(kept_by(page)["listeners"])
    assert heard == [heard[0]] * 3
    page.evaluate(QUIET)
    asked.clear()
    page.evaluate(LOADER_CHANGES)
    page.evaluate(QUIET)
    assert len(asked) == 1, "the plan of the one SP Config that is there"


LOADERS_LINKED = """(configs) => {
  for (const [devices, files] of configs) {
    const config = LiteGraph.createNode('SPConfig')
    app.graph.add(config)
    config.widgets.find(({ name }) => name === 'devices').value = devices
    for (const [file, mode] of files) {
      const loader = LiteGraph.createNode('ParallelModelLoader')
      app.graph.add(loader)
      loader.widgets.find(({ name }) => name === 'unet_name').value = file
      loader.mode = mode
      config.connect(0, loader, 'sp_config')
    }
  } }"""


def test_a_plan_is_asked_for_a_loaders_file_with_those_of_the_others_on_its_devices(told_comfy: MadeUp) -> None:
    page, asked = told_comfy.comfy.page, []
    page.on("request", lambda request: asked.append(request.url) if "/parallel_dit/plan" in request.url else None)
    alone, both, more = ("cpu:1", [("a", 0)]), ("cpu:2", [("b", 0), ("c", 0)]), ("cpu:2", [("d", 0)])
    some_off = ("cpu:3", [("off", 4), ("e", 0), ("f", 2), ("g", 0)])
    page.evaluate(LOADERS_LINKED, [alone, both, more, some_off, ("cpu:2", [])])
    page.evaluate(QUIET)
    found = {query.get("unet_name", [""])[0]: query.get("beside", []) for query in map(query_of, asked)}
    assert found == {"a": [], "b": ["c\nd"], "d": ["b\nc"], "e": ["g"], "": []}


def query_of(url: str) -> dict[str, list[str]]:
    return parse_qs(urlsplit(url).query)
