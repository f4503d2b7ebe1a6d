"""What is told in cards and boxes: texts on nodes, tables, refusals, the doctor, the first run, a picture to share.

Owns: that each is where a user looks, says why and what next, and does what its buttons say. Does not own the words.
"""

from __future__ import annotations

import base64
import io
import re
from typing import Any

from PIL import Image
from playwright.sync_api import expect

from .comfy_page import ComfyPage
from .made_up import MadeUp, a_pool, a_report

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
    return node.widgets.filter((w) => w.last_y !== undefined && !w.hidden && !w.element)
      .sort((a, b) => a.last_y - b.last_y).map((w) => w.name)
  const names = new Set(node.widgets.map((widget) => widget.name))
  const labels = [...element.querySelectorAll('*')].filter((each) => !each.children.length && each.checkVisibility())
    .filter((each) => names.has(each.textContent.trim()))
  labels.sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
  return [...new Set(labels.map((each) => each.textContent.trim()))] }"""
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
IN_VIEW = """(id) => {
  const node = app.graph.getNodeById(id)
  const [x, y, width, height] = app.canvas.visible_area
  const [left, top] = [node.pos[0] - x, node.pos[1] - y]
  return app.canvas.selected_nodes[id] === node && left > 0 && left < width && top > 0 && top < height }"""
FEW = {"steps": 1, "width": 128, "height": 128, "warmup": 0, "runs": 1, "stock": False}


def test_texts_stand_in_the_boxes_of_nodes_and_reports_in_tables(comfy: ComfyPage) -> None:
    comfy.load_example("flux_benchmark", plans="ulysses=2", **FEW)
    plan = comfy.page.get_by_test_id("pdit-plan")
    expect(plan).to_contain_text("uly2")
    comfy.page.evaluate("new Promise(requestAnimationFrame)")
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


def test_a_table_shows_reports_of_every_kind_and_age(comfy: ComfyPage) -> None:
    comfy.load_example("flux_benchmark")
    tables = comfy.page.get_by_test_id("pdit-tables")
    older = {"schema": 1, "kind": "denoise", "steps": 2, "denoise_s": 1.0, "step_s": [0.5, 0.5]}
    told = [
        ([a_report(2, 3)], ["0.50 s", "1 cuda:1", "0.30 s"]),
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
ORDER += ["weights", "lora", "compiled", "step_cache"]
# As saved: in the order of the schema.
SAVED = ["manual", "cpu:4", 1, 2, "side branch", 1, 1, "sharded", 2, 3, 4, "blocks", 0.25, ""]
VALUES = "() => Object.fromEntries(app.graph.nodes[0].widgets.map((widget) => [widget.name, widget.value]))"
ADD = """async (values) => {
  const node = LiteGraph.createNode('SPConfig')
  app.graph.add(node)
  const saved = app.graph.serialize()
  saved.nodes[0].widgets_values = values
  await app.loadGraphData(saved) }"""


def test_inputs_are_in_the_order_a_person_fills_and_are_saved_in_the_schemas(comfy: ComfyPage) -> None:
    comfy.page.evaluate(ADD, SAVED)
    comfy.page.wait_for_function(
        "([names, shown]) => eval(shown)('SPConfig').join() === names.join()", arg=[ORDER, SHOWN]
    )
    values = comfy.page.evaluate(VALUES)
    assert [values[name] for name in ("lora", "data", "cfg", "weights", "compiled")] == [
        "side branch", 1, 1, "sharded", "blocks",
    ]  # fmt: skip
    for saved in ("app.graph.serialize().nodes[0]", "app.graph.nodes[0].clone().serialize()"):
        assert comfy.page.evaluate(f"{saved}.widgets_values.slice(0, 14)") == SAVED
    queued = comfy.page.evaluate("app.graphToPrompt()")["output"]
    assert [each["inputs"]["lora"] for each in queued.values()] == ["side branch"]


OF_ANOTHER_PACK = """() => {
  const node = LiteGraph.createNode('SPConfig')
  const names = () => node.widgets.map((widget) => widget.name)
  node.addWidget('text', 'theirs', 'x', () => {})
  node.widgets.unshift(node.widgets.pop())
  const before = names()
  const saved = node.serialize().widgets_values
  node.configure({ ...node.serialize(), widgets_values: saved })
  return [before, names(), saved[0], node.widgets[0].value] }"""


def test_an_input_that_another_pack_put_in_front_stays_there(made_up: MadeUp) -> None:
    before, after, *values = made_up.comfy.page.evaluate(OF_ANOTHER_PACK)
    assert before[:3] == ["theirs", "mode", "devices"]
    assert after == before
    assert values == ["x", "x"]


def test_a_refusal_says_why_and_leads_to_the_node_that_can_be_bypassed(comfy: ComfyPage) -> None:
    card = comfy.page.get_by_test_id("pdit-error-card")
    comfy.load_example(steps=1, width=128, height=128)
    number = comfy.page.evaluate(BETWEEN, "TorchCompileModel")
    comfy.queue()
    assert comfy.ended()[0] == "execution_error"
    expect(card).to_contain_text("it compiles the transformer in this process, which a parallel MODEL cannot take")
    expect(card).to_contain_text("Remove that node, or set compiled=blocks in SP Config")
    expect(comfy.page.get_by_test_id("error-overlay")).to_be_hidden()  # ComfyUI's own, which does not say why
    comfy.shot("error-card")
    card.get_by_role("button", name="Go to node").click()
    comfy.page.wait_for_function(IN_VIEW, arg=number)
    card.get_by_role("button", name="Bypass node").click()
    expect(card).to_contain_text("is bypassed. Press Run again.")
    expect(card.get_by_role("button", name="Bypass node")).to_have_count(0)
    comfy.run()
    expect(card).to_have_count(0)


def test_values_that_cannot_work_are_told_on_the_card(comfy: ComfyPage) -> None:
    card = comfy.page.get_by_test_id("pdit-error-card")
    comfy.load_example(ulysses=5)
    for value, reason, remedy in (
        (5, "ulysses=5 makes 5 rank(s), devices='cpu:2' names 2", "Make the product of the degrees 2 or less"),
        (0, "ulysses is 0, the least is 1", "Enter 1 or more"),
    ):
        comfy.widget("SPConfig", "ulysses", value)
        comfy.queue()
        expect(card.locator(".pdit-reason")).to_have_text(reason)
        expect(card).to_contain_text(remedy)
        expect(card.get_by_role("button", name="Bypass node")).to_have_count(0)
    card.get_by_role("button", name="Close").click()
    expect(card).to_have_count(0)
    expect(comfy.page.get_by_test_id("error-overlay")).to_have_count(0)


START = "(id) => { app.api.dispatchCustomEvent('execution_start', { prompt_id: id, timestamp: 0 }) }"
QUEUE = "async () => (await app.api.queuePrompt(0, { output: {}, workflow: {} })).prompt_id"


def test_what_a_prompt_was_refused_in_part_stays_while_it_runs(made_up: MadeUp) -> None:
    page = made_up.comfy.page
    card = page.get_by_test_id("pdit-error-card")
    reasons: list[Any] = [{"type": "custom_validation_failed", "details": "too many"}]
    refused = {"1": {"class_type": "SPConfig", "errors": reasons}}
    answer = {"prompt_id": "p", "number": 1, "node_errors": refused}
    page.route(re.compile("/prompt$"), lambda route: route.fulfill(json=answer))
    assert page.evaluate(QUEUE) == "p"
    page.evaluate(START, "p")
    expect(card).to_contain_text("too many")
    page.evaluate(START, "q")
    expect(card).to_have_count(0)
    reasons[0] = None  # nothing that can be told
    assert page.evaluate(QUEUE) == "p"
    expect(card).to_have_count(0)


SLP = "the MODEL carries patches of its blocks (double_block 0), which a parallel MODEL cannot take; remove the node "
SLP += "that adds them (SkipLayerGuidanceDiT, for one), or use Load Diffusion Model for this graph"
# The sentence, on which node it was raised, what stands in the workflow: whether there is something to bypass.
REFUSALS = [
    (SLP, "KSampler", ["KSampler", "SkipLayerGuidanceDiT"], True),
    (SLP, "KSampler", ["KSampler"], False),
    ("x is changed by a LoRA that has a core; remove the LoRA loader that adds it, or use another",
     "LoraLoaderModelOnly", ["LoraLoaderModelOnly"], True),
    ("ring=9 needs 9 devices, 4 are named; use a product of at most 4", "SPConfig", ["SPConfig"], False),
]  # fmt: skip
RAISE = """([text, kind, kinds]) => {
  app.graph.clear()
  for (const each of kinds) app.graph.add(LiteGraph.createNode(each))
  const node = app.graph.nodes.find((each) => each.comfyClass === kind)
  const pack = LiteGraph.registered_node_types.SPConfig.nodeData.python_module.split('.')[1]
  const traceback = [`  File "/comfy/execution.py", line 1`, `  File "/comfy/custom_nodes/${pack}/nodes/a.py", line 2`]
  const detail = { node_id: String(node.id), node_type: kind, exception_message: text, traceback }
  app.api.dispatchCustomEvent('execution_error', detail) }"""
FOREIGN = """() => app.api.dispatchCustomEvent('execution_error', { node_id: '1', node_type: 'KSampler',
  exception_message: 'their fault', traceback: ['  File "/comfy/nodes.py", line 1'] })"""


def test_bypassing_is_offered_where_it_helps_and_errors_of_others_are_left_to_comfyui(made_up: MadeUp) -> None:
    page = made_up.comfy.page
    card = page.get_by_test_id("pdit-error-card")
    page.evaluate(FOREIGN)
    expect(page.get_by_test_id("error-overlay")).to_be_visible()
    expect(card).to_have_count(0)
    for text, kind, there, helps in REFUSALS:
        page.evaluate(RAISE, [text, kind, there])
        expect(card.get_by_role("button", name="Go to node")).to_be_visible()
        expect(card.get_by_role("button", name="Bypass node")).to_have_count(int(helps))
    card.get_by_role("button", name="Close").click()


OF_THE_SAMPLER = """() => ({ graph: app.graph.id, node_id: String(app.graph.nodes
  .find((node) => node.comfyClass === 'ParallelSampler').id) })"""
CHECKS = [
    {"name": "devices", "ok": False, "needed": False, "seen": "one GPU", "remedy": "look at nvidia-smi"},
    *({"name": f"check {n}", "ok": True, "needed": True, "seen": "well", "remedy": ""} for n in range(10)),
]
NOTED = {"state": "done", "can_run": True, "checks": CHECKS, "warnings": ["cuda:9 was left out"]}
NOTED |= {"ended": 1_700_000_000, "took_s": 12.0, "versions": {"torch": "2.13"}}
# As of a page that is not secure, which has none.
NO_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })"
CLIPBOARD = "delete navigator.clipboard"


def test_the_doctor_says_what_to_know_first_and_folds_what_is_well(made_up: MadeUp) -> None:
    doctor = made_up.comfy.open_sidebar().get_by_test_id("pdit-doctor")
    made_up.tell(doctor=NOTED)
    expect(doctor).to_contain_text("It can run here. To know (2):")
    expect(doctor).not_to_contain_text("Everything needed is there")
    expect(doctor.locator("li:visible")).to_contain_text(["cuda:9 was left out", "one GPU"])
    expect(doctor.locator("li:visible")).to_have_count(2)
    expect(doctor).to_contain_text(re.compile(r"at .*\d:\d\d.*, took 12"))
    doctor.get_by_text("10 checks passed").click()
    expect(doctor.locator("li:visible")).to_have_count(12)
    page = made_up.comfy.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    doctor.get_by_role("button", name="Copy").click()
    expect(doctor.get_by_test_id("pdit-doctor-told")).to_have_text("Copied.")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "torch 2.13" in copied and "! devices: one GPU; look at nvidia-smi" in copied and "✓ check 9" in copied
    page.evaluate(NO_CLIPBOARD)
    doctor.get_by_role("button", name="Copy").click()
    expect(doctor.get_by_test_id("pdit-doctor-told")).to_contain_text("does not let this page use the clipboard")
    expect(doctor.locator("textarea")).to_have_value(copied)
    page.evaluate(CLIPBOARD)
    made_up.tell(doctor=NOTED | {"checks": CHECKS[1:], "warnings": []})
    expect(doctor).to_contain_text("Everything needed is there")
    expect(doctor.locator("li:visible")).to_have_count(0 if doctor.locator("details[open]").count() == 0 else 10)


OVER = "app.extensionManager.setting.get('ParallelDiT.FirstRun.Over')"


def test_the_first_run_has_a_list_that_ends_or_is_dismissed_for_good(made_up: MadeUp) -> None:
    comfy = made_up.comfy
    comfy.setting("ParallelDiT.FirstRun.Over", False)
    first = comfy.open_sidebar().get_by_test_id("pdit-first")
    done = first.locator("[data-done]")
    made_up.tell()
    expect(first).to_be_visible()
    expect(done).to_have_count(0)
    comfy.load_example()
    made_up.tell(doctor=NOTED)
    expect(done).to_have_count(2)
    expect(first.locator("[aria-current=step]")).to_contain_text("Run")
    comfy.shot("first-run", comfy.sidebar)
    made_up.tell(doctor=NOTED, reports=[made_up.report(1, a_report(2, 3))])
    expect(done).to_have_count(3)
    first.get_by_role("button", name="Open the timeline").click()
    expect(first).to_be_hidden()
    expect(comfy.timeline).to_be_visible()
    assert comfy.page.evaluate(OVER) is True
    comfy.setting("ParallelDiT.FirstRun.Over", False)
    made_up.tell()
    first.get_by_role("button", name="Do not show this again").click()
    made_up.tell(pools=[a_pool()])
    expect(first).to_be_hidden()
    assert comfy.page.evaluate(OVER) is True


PROMPT = "0" * 8
DRAWN_TEXTS = """() => {
  const write = CanvasRenderingContext2D.prototype.fillText
  window.written = []
  CanvasRenderingContext2D.prototype.fillText = function (text, ...all) {
    window.written.push(String(text))
    return write.call(this, text, ...all)
  }
}"""
NO_WEBGL = """() => {
  const get = HTMLCanvasElement.prototype.getContext
  HTMLCanvasElement.prototype.getContext = function (kind, ...all) {
    return kind.startsWith('webgl') ? null : get.call(this, kind, ...all)
  }
}"""
COPIED = """async () => {
  const [item] = await navigator.clipboard.read()
  const bitmap = await createImageBitmap(await item.getType('image/png'))
  return [bitmap.width, bitmap.height] }"""


def with_picture(made_up: MadeUp) -> None:
    """The history of a prompt whose picture is red, with a chart that is no picture of the run."""
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), (250, 10, 10)).save(picture, "PNG")
    files = [{"filename": name, "subfolder": "", "type": "output"} for name in ("red.png", "chart.png")]
    queued = {"1": {"class_type": "SaveImage"}, "2": {"class_type": "ShowTimingReport"}}
    outputs = {"1": {"images": files[:1]}, "2": {"images": files[1:]}}

    page = made_up.comfy.page
    page.route(
        re.compile(f"/history/{PROMPT}$"),
        lambda r: r.fulfill(json={PROMPT: {"prompt": [0, PROMPT, queued], "outputs": outputs}}),
    )
    page.route(
        re.compile(r"/view\?.*red\.png"),
        lambda r: r.fulfill(body=picture.getvalue(), content_type="image/png"),
    )


def of_a_benchmark(number: int, **sizes: int) -> dict[str, Any]:
    """One rank, stock ComfyUI and two plans, of these sizes."""
    named = {"name": "uly2", "ranks": 2, "weights": "replicated", "degrees": {"ulysses": 2, "ring": 1}}
    ring = named | {"name": "ring2", "degrees": {"ring": 2}}
    cases = [
        {"name": "one rank", "kind": "one_rank", "median_s": 2.0},
        {"name": "ComfyUI, one device", "kind": "one_process", "median_s": 2.5, "speedup": 0.8},
        {"name": "uly2", "kind": "plan", "plan": named, "median_s": 1.25, "speedup": 1.6, "error": 4.7e-7},
        {"name": "ring2", "kind": "plan", "plan": ring, "median_s": 5.0, "speedup": 0.4, "error": 4.7e-7},
    ]
    benchmark = {"schema": "parallel-dit/report/1", "kind": "benchmark", "contenders": cases, "sizes": sizes}
    return benchmark | {"model": {"file": "a.safetensors"}, "sampling": {"steps": number}}


def of_a_run(**sizes: int) -> dict[str, Any]:
    """Two ranks with the plan uly2, of these sizes."""
    run = a_report(2, 4, plan={"name": "uly2", "degrees": {"ulysses": 2}}, sizes=sizes, prompt_id=PROMPT)
    run |= {"model": {"file": "a.safetensors"}, "sampling": {"steps": 4}}
    return run | {"devices": [{"name": f"cuda:{n}", "model": "RTX 3090"} for n in range(2)]}


def test_a_node_shows_the_run_of_a_server_that_began_to_count_anew(made_up: MadeUp) -> None:
    made_up.comfy.load_example()
    result = made_up.comfy.page.get_by_test_id("pdit-result").first
    editor = made_up.comfy.page.evaluate(OF_THE_SAMPLER)
    for session, step_s, told in (("first", 0.5, "0.50 s a step"), ("second", 0.25, "0.25 s a step")):
        report = a_report(2, 3, timings={"step_s": [step_s] * 3})
        state = {"session": f"made up {session}", "reports": [made_up.report(1, report) | editor]}
        made_up.tell(pools=[a_pool()], **state)
        expect(result).to_contain_text(told)


def test_a_card_to_share_shows_the_run_and_survives_what_happens_meanwhile(made_up: MadeUp) -> None:
    page, size = made_up.comfy.page, {"width": 64, "height": 64}
    with_picture(made_up)
    timeline = made_up.comfy.open_timeline()
    reports = [made_up.report(1, of_a_benchmark(4, **size)), made_up.report(2, of_a_run(**size))]
    made_up.tell(pools=[a_pool()], reports=reports)
    expect(page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", "2x4")
    page.evaluate(NO_WEBGL)
    page.evaluate(DRAWN_TEXTS)
    timeline.get_by_role("button", name="Share").click()
    canvas, told = page.get_by_test_id("pdit-share-canvas"), page.get_by_test_id("pdit-share-told")
    made_up.tell(pools=[a_pool(state="failed", last_failure="rank 1: killed", failed_rank=1)], reports=reports)
    expect(canvas).to_have_attribute("data-drawn", "with picture")
    written = " | ".join(page.evaluate("window.written"))
    for text in (
        "Parallel DiT",
        "1.60× as fast as one device",
        "0.31 s a step, one device 0.50 s",
        "uly2 · 2 × RTX 3090",
    ):
        assert text in written
    for text in ("a.safetensors · 64 × 64 · 4 steps", "4.7e-7", "compute", "communication", "idle", "0  cuda:0"):
        assert text in written
    picture = Image.open(io.BytesIO(base64.b64decode(canvas.evaluate("(c) => c.toDataURL()").partition(",")[2])))
    assert picture.size == (1200, 675)
    assert picture.convert("RGB").getpixel((200, 250)) == (250, 10, 10), "the run's picture, not the chart"
    made_up.comfy.shot("share-card", page.get_by_test_id("pdit-share-card"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy picture").click()
    expect(told).to_have_text("The picture is in the clipboard.")
    assert page.evaluate(COPIED) == [1200, 675]
    page.evaluate(NO_CLIPBOARD)
    page.get_by_role("button", name="Copy picture").click()
    expect(told).to_contain_text("Save the picture instead")
    expect(page.get_by_role("button", name="Save PNG")).to_be_focused()
    with page.expect_download() as found:
        page.keyboard.press("Enter")
    assert Image.open(found.value.path()).size == (1200, 675)
    page.evaluate(CLIPBOARD)
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("pdit-share-card")).to_have_count(0)
    expect(page.get_by_test_id("pdit-error-card")).to_contain_text("rank 1: killed")
    page.get_by_test_id("pdit-error-card").get_by_role("button", name="Close").click()


def test_a_card_of_an_older_or_lone_report_shows_what_is_known(made_up: MadeUp) -> None:
    page, timeline = made_up.comfy.page, made_up.comfy.open_timeline()
    card, canvas = page.get_by_test_id("pdit-share-card"), page.get_by_test_id("pdit-share-canvas")
    older = {"schema": 1, "kind": "denoise", "steps": 2, "denoise_s": 1.0, "step_s": [0.5, 0.5], "plan_name": "ring2"}
    for number, report in enumerate([older | {"plan": {"ring": 2}}, a_report(32, 10_000), of_a_benchmark(2)]):
        made_up.tell(reports=[made_up.report(number + 1, report)])
        expect(timeline).to_contain_text(["0.50 s a step", "for 10000 steps", "1.60×"][number])
        timeline.get_by_role("button", name="Share").click()
        expect(canvas).to_have_attribute("data-drawn", "without picture")
        assert not re.search("undefined|null|NaN", canvas.get_attribute("aria-label") or "")
        card.get_by_role("button", name="Close").click()


SAID_OF = """async ([run, benchmark]) => {
  const link = [...document.styleSheets].map((each) => each.href).find((href) => href?.endsWith('panel/style.css'))
  const { factsOf } = await import(new URL('share_card.mjs', link))
  const { readReport } = await import(new URL('report.mjs', link))
  const t = (key) => key
  return factsOf({ report: readReport(run), benchmark: benchmark && readReport(benchmark), t }) }"""
# What a benchmark says of the work that the run beside it did not do.
OTHER_WORK: list[dict[str, Any]] = [
    {"model": {"file": "a.safetensors", "dtype": "float32"}},
    {"sizes": {"width": 64, "height": 64, "batch": 2}},
    *({"sampling": {"steps": 4, "cfg": 1.0} | each} for each in (
        {"steps": 5}, {"sampler": "heun"}, {"cfg": 3.5}, {"denoise": 0.5},
    )),
    {"step_caches": [{"name": "EasyCache", "threshold": 0.2, "skipped": 1, "of": 4, "counts": "steps"}]},
]  # fmt: skip


def test_a_card_claims_no_exactness_with_a_step_cache_nor_the_speed_of_other_work(made_up: MadeUp) -> None:
    page, size = made_up.comfy.page, {"width": 64, "height": 64, "batch": 1}
    run = of_a_run(**size) | {"model": {"file": "a.safetensors", "dtype": "bfloat16"}}
    run |= {"sampling": {"steps": 4, "sampler": "euler", "cfg": 1.0, "denoise": 1.0}}
    proven = run | {"proof": {"verdict": "proven", "error": 1e-7}}
    cached = proven | OTHER_WORK[-1]
    assert "share.proven" in page.evaluate(SAID_OF, [proven, None])["lines"]
    assert page.evaluate(SAID_OF, [cached, None])["lines"][-1] == "share.cached"
    assert page.evaluate(SAID_OF, [cached, of_a_benchmark(4, **size) | OTHER_WORK[-1]])["lines"][-1] == "share.cached"
    alike = of_a_benchmark(4, **size)
    assert page.evaluate(SAID_OF, [run, alike])["hero"] == "share.speedup"
    for other in OTHER_WORK:
        assert page.evaluate(SAID_OF, [run, alike | other])["hero"] == "share.step", other


def test_a_benchmark_is_against_stock_comfyui_and_stays_with_its_own_size(made_up: MadeUp) -> None:
    comfy, small, large = made_up.comfy, {"width": 64, "height": 64}, {"width": 512, "height": 512}
    comfy.load_example(mode="auto", ring=7)
    timeline = comfy.open_timeline()
    bars = timeline.locator("[data-chart=speedups]")
    benchmark = made_up.report(1, of_a_benchmark(4, **small))
    made_up.tell(reports=[benchmark, made_up.report(2, of_a_run(**small))])
    expect(bars).to_contain_text("ComfyUI, one device = 1× · a.safetensors · 64 × 64 · 4 steps")
    label = bars.locator("canvas").get_attribute("aria-label") or ""
    assert "ComfyUI, one device: 1.00×, 2.5 s" in label and "uly2: 2.00×, 1.3 s" in label and "ring2: 0.50×" in label
    made_up.tell(reports=[benchmark, made_up.report(3, of_a_run(**large))])
    expect(bars).to_be_hidden()
    made_up.tell(reports=[benchmark, made_up.report(4, of_a_run(**small))])
    bars.get_by_role("button", name="Use uly2").click()
    values = comfy.page.evaluate(f"Object.fromEntries({comfy.node('SPConfig')}.widgets.map((w) => [w.name, w.value]))")
    assert [values[name] for name in ("mode", "ulysses", "ring", "data", "devices")] == ["manual", 2, 1, 1, "cpu:2"]
    expect(comfy.page.locator(".p-toast-message", has_text="has the plan uly2 now")).to_be_visible()
    comfy.page.evaluate("app.graph.clear()")
    bars.get_by_role("button", name="Use uly2").click()
    expect(comfy.page.locator(".p-toast-message", has_text="no SP Config")).to_be_visible()


def test_the_picture_of_the_timeline_says_what_it_is_of(made_up: MadeUp) -> None:
    page, timeline = made_up.comfy.page, made_up.comfy.open_timeline()
    made_up.tell(reports=[made_up.report(1, of_a_run(width=64, height=64))])
    expect(page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", "2x4")
    page.evaluate(DRAWN_TEXTS)
    with page.expect_download():
        timeline.get_by_role("button", name="PNG", exact=True).click()
    written = page.evaluate("window.written")
    for text in (
        "Parallel DiT · GPU timeline",
        "uly2 on cuda:0, cuda:1 · a.safetensors · 64 × 64 · 4 steps",
        "compute",
    ):
        assert text in written
    assert any("0.50 s a step" in text for text in written)
    assert {"communication", "idle", "Seconds of each step"} <= set(written)
