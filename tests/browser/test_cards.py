"""What is told in cards: refusals, what the doctor found, the list of the first run."""

import re
from typing import Any

from playwright.sync_api import expect

from .comfy_page import ComfyPage
from .made_up import CLIPBOARD, NO_CLIPBOARD, MadeUp, a_pool, a_report

IN_VIEW = """(id) => {
  const node = app.graph.getNodeById(id)
  const [x, y, width, height] = app.canvas.visible_area
  const [left, top] = [node.pos[0] - x, node.pos[1] - y]
  return app.canvas.selected_nodes[id] === node && left > 0 && left < width && top > 0 && top < height }"""


def test_a_refusal_says_why_and_leads_to_the_node_that_can_be_bypassed(comfy: ComfyPage) -> None:
    card = comfy.page.get_by_test_id("pdit-error-card")
    comfy.load_example(steps=1, width=128, height=128)
    number = comfy.between("TorchCompileModel")
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
    comfy.load_example(ulysses=0)  # another workflow, of which the card says nothing
    expect(card).to_have_count(0)
    comfy.queue()
    card.get_by_role("button", name="Close").click()
    expect(card).to_have_count(0)
    expect(comfy.page.get_by_test_id("error-overlay")).to_have_count(0)


START = "(id) => { app.api.dispatchCustomEvent('execution_start', { prompt_id: id, timestamp: 0 }) }"
QUEUE = "async () => (await app.api.queuePrompt(0, { output: {}, workflow: {} })).prompt_id"


def test_what_a_prompt_was_refused_in_part_stays_while_it_runs(made_up: MadeUp) -> None:
    page = made_up.comfy.page
    made_up.comfy.load_example()
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
    said = {"A-Q4_K_M.gguf": "is a GGUF file", "a.safetensors": "is not in models/diffusion_models"}
    for value, told in said.items():
        info = {"input_name": "unet_name", "received_value": value}
        reasons[0] = {"type": "value_not_in_list", "details": "", "extra_info": info}
        assert page.evaluate(QUEUE) == "p"
        expect(card).to_contain_text(f"{value} {told}")
    page.evaluate(START, "q")
    reasons[0] = None  # nothing that can be told
    assert page.evaluate(QUEUE) == "p"
    expect(card).to_have_count(0)


SLP = "SkipLayerGuidanceDiT (node 2): it patches the model's blocks (double_block 0), which a parallel MODEL cannot "
SLP += "take; remove that node, or use Load Diffusion Model for this graph"
SIDE = "stock ComfyUI has no LoRA beside the weights, which a parallel MODEL cannot take; remove lora=side branch in "
SIDE += "SP Config, or use Load Diffusion Model for this graph"
LORA = "Load LoRA (node 1): it changes x by a LoRA that has a core, which a parallel MODEL cannot take; "
LORA += "remove that node, or use Load Diffusion Model for this graph"
# The sentence, on which node it was raised, what stands in the workflow: whether there is something to bypass.
REFUSALS = [
    (SLP, "KSampler", ["KSampler", "SkipLayerGuidanceDiT"], True),
    (SLP, "KSampler", ["KSampler"], False),
    (LORA, "LoraLoaderModelOnly", ["LoraLoaderModelOnly"], True),
    (SIDE, "ParallelBenchmark", ["ParallelBenchmark", "SPConfig"], False),
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
# Of a prompt that this page has queued, of the graph that it shows: ComfyUI shows no other.
FOREIGN = """async () => {
  const node = app.graph.nodes.find((each) => each.comfyClass === 'VAELoader')
  await app.queuePrompt(0, 1)
  app.api.dispatchCustomEvent('execution_error', { prompt_id: 'p', node_id: String(node.id), node_type: 'VAELoader',
    exception_type: 'RuntimeError', exception_message: 'their fault', executed: [],
    traceback: ['  File "/comfy/nodes.py", line 1'] }) }"""


OURS_FIRST = """
  const ours = LiteGraph.registered_node_types.SPConfig.nodeData.python_module.split('.')[1]
  app.api.dispatchCustomEvent('execution_error', { prompt_id: 'p', node_id: '999', node_type: 'SPConfig',
    exception_message: 'an older error of ours', traceback: [`  File "/comfy/custom_nodes/${ours}/nodes/a.py"`] })"""


def test_bypassing_is_offered_where_it_helps_and_errors_of_others_are_left_to_comfyui(comfy: ComfyPage) -> None:
    page = comfy.page
    card = page.get_by_test_id("pdit-error-card")
    answer = {"prompt_id": "p", "number": 1, "node_errors": {}}
    page.route(re.compile("/prompt$"), lambda route: route.fulfill(json=answer))
    comfy.load_example()
    page.evaluate(FOREIGN.replace("await app.queuePrompt(0, 1)", f"await app.queuePrompt(0, 1); {OURS_FIRST}"))
    expect(page.get_by_test_id("error-overlay")).to_be_visible()  # whether or not a card says that workers failed
    expect(card.get_by_role("button", name="Go to node")).to_have_count(0)
    page.evaluate("document.activeElement.blur()")
    for text, kind, there, helps in REFUSALS:
        page.evaluate(RAISE, [text, kind, there])
        expect(card.get_by_role("button", name="Go to node")).to_be_visible()
        expect(card.get_by_role("button", name="Bypass node")).to_have_count(int(helps))
    expect(card.get_by_role("button", name="Go to node")).to_be_focused()  # nothing was typed into
    page.keyboard.press("Tab")
    expect(card.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("Escape")
    expect(card).to_have_count(0)


OF_WORKFLOW = """async (id) => {
  await app.api.queuePrompt(0, { output: {}, workflow: { id: id ?? app.graph.id } })
  const node = app.graph.nodes.find((each) => each.comfyClass === 'SPConfig')
  const [, pack] = LiteGraph.registered_node_types.SPConfig.nodeData.python_module.split('.')
  app.api.dispatchCustomEvent('execution_error', { prompt_id: 'p', node_id: String(node.id), node_type: 'SPConfig',
    exception_message: 'it looks at steps; remove SP Config', traceback: [`  File "/custom_nodes/${pack}/a.py"`] }) }"""


def test_an_error_of_another_workflow_leads_to_no_node_of_the_open_one(comfy: ComfyPage) -> None:
    card = comfy.page.get_by_test_id("pdit-error-card")
    answer = {"prompt_id": "p", "number": 1, "node_errors": {}}
    comfy.page.route(re.compile("/prompt$"), lambda route: route.fulfill(json=answer))
    comfy.load_example()
    for of, buttons in (("another", 0), (None, 1)):
        comfy.page.evaluate(OF_WORKFLOW, of)
        expect(card).to_contain_text("it looks at steps")
        expect(card.get_by_role("button", name="Go to node")).to_have_count(buttons)
        expect(card.get_by_role("button", name="Bypass node")).to_have_count(0)


CHECKS = [
    {"name": "devices", "ok": False, "needed": False, "seen": "one GPU", "remedy": "look at nvidia-smi"},
    *({"name": f"check {n}", "ok": True, "needed": True, "seen": "well", "remedy": ""} for n in range(10)),
]
NOTED = {"state": "done", "can_run": True, "checks": CHECKS, "warnings": ["cuda:9 was left out"]}
NOTED |= {"ended": 1_700_000_000, "took_s": 12.0, "versions": {"torch": "2.13"}}


def test_the_doctor_says_what_to_know_first_and_folds_what_is_well(made_up: MadeUp) -> None:
    doctor = made_up.comfy.open_sidebar().get_by_test_id("pdit-doctor")
    made_up.tell(doctor=NOTED)
    expect(doctor).to_contain_text("It can run here. Notes below: 2.")
    expect(doctor).not_to_contain_text("Everything needed is there")
    expect(doctor.locator("li:visible")).to_contain_text(["! warningcuda:9 was left out", "! devicesone GPU"])
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
    expect(first).to_contain_text("Notes below: 2.")
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
