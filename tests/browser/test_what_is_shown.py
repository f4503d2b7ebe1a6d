"""States and reports of every kind, the odd ones above all: shown plainly, nothing thrown; keys, themes, languages."""

import re
from typing import Any

from playwright.sync_api import Page, expect

from demo.graphs import AUTOENCODER, TRANSFORMER
from host.client import ComfyClient
from host.server import ComfyServer

from .comfy_page import ComfyPage
from .conftest import Tabs
from .drawn import areas_by_row, picture_of
from .made_up import GAINED, GB, MadeUp, a_pool, a_report
from .test_cards import RAISE

DIED = "rank 1: killed by signal 9; queue again to start fresh workers"
MEMORY = {"allocated_bytes": 18 * GB}


def remembering(pool: dict[str, Any]) -> dict[str, Any]:
    """The same pool with the memory of its rank 0 alone."""
    pool["ranks"][0]["memory"] = MEMORY
    return pool


def on_cpus(pool: dict[str, Any], machine: str = "") -> dict[str, Any]:
    """The same pool on a processor, of a further machine where one is named."""
    for rank in pool["ranks"]:
        rank |= {"device": f"cpu:{rank['rank']}{f' on {machine}' if machine else ''}", "kind": "cpu"}
    return pool


def partly_on(pool: dict[str, Any], machine: str) -> dict[str, Any]:
    """The same pool with all ranks but the first on a further machine."""
    for number, rank in enumerate(pool["ranks"][1:]):
        rank["device"] = f"cuda:{number} on {machine}"
    return pool


def a_machine(*, problem: str = "") -> dict[str, Any]:
    """One that has joined, and was asked for two files."""
    files = [{"name": "flux.safetensors", "problem": ""}, {"name": "wan.safetensors", "problem": problem}]
    versions = ["torch 2.9.0", "ComfyUI 0.30.0"]
    return {"name": "attic", "devices": ["NVIDIA L4", "NVIDIA L4"], "versions": versions, "files": files}


SHOWN = [
    ({"pools": []}, ["No workers yet"]),
    ({"pools": [a_pool(state="stopped")]}, ["No workers yet"]),
    ({"pools": [a_pool(state="starting", plans=[])]}, ["2 GPUs: starting"]),
    ({"pools": [a_pool(state="failed", last_failure=DIED, failed_rank=1)]}, [DIED, "ended with the others"]),
    ({"pools": [a_pool(state="failed", last_failure=None, failed_rank=None)]}, ["2 GPUs: failed"]),
    ({"pools": [a_pool(64)]}, ["cuda:63"]),
    ({"pools": [on_cpus(a_pool(2))]}, ["2 CPU ranks ready"]),
    ({"pools": [on_cpus(a_pool(1), "attic")]}, ["1 CPU rank on attic ready"]),
    ({"pools": [partly_on(a_pool(3), "attic")]}, ["1 GPU, 2 GPUs on attic ready"]),
    ({"pools": [remembering(a_pool(2))]}, ["18.0 GB / 24.0 GB", "memory not reported"]),
    ({"pools": [a_pool(2), a_pool(1, generation=3)]}, ["2 GPUs ready", "1 GPU ready"]),
    (
        {"pools": [a_pool(sampling=True, state="busy")], "run": {"step": 6, "steps": 20, "node": "3", "prompt": "p"}},
        ["step 7 of 20"],
    ),
    ({"pools": [a_pool(sampling=True, state="busy")], "run": None}, ["2 GPUs: busy"]),
    (
        {"machines": [a_machine()]},
        ["Further machines", "attic: NVIDIA L4, NVIDIA L4", "torch 2.9.0", "✓ flux.safetensors"],
    ),
    ({"machines": [a_machine(problem="wan.safetensors is not in models")]}, ["✗ wan.safetensors is not in models"]),
    ({"offered": ["192.168.1.10:7861"]}, ["Further machines", "They may join at 192.168.1.10:7861", "Stop listening"]),
    (
        {"comfyui": {"version": "0.99.0", "notes": ["ComfyUI 0.99.0 is newer than 0.33.0", "the loop is off"]}},
        ["ComfyUI 0.99.0 is newer than 0.33.0", "the loop is off"],
    ),
    ({"comfyui": {"version": None, "notes": "none"}}, ["No workers yet"]),
    (
        {"tune": {"state": "running", "doing": "trying ring 2", "of": {"model": "flux.safetensors", "why_not": ""}}},
        ["The quickest plan for flux.safetensors, measured", "trying ring 2 …", "Stop"],
    ),
    (
        {"tune": {"state": "failed", "message": "stopped; nothing is kept", "of": {"why_not": "mode is manual"}}},
        ["mode is manual", "stopped; nothing is kept"],
    ),
    (
        {"tune": {"state": "done", "line": "kept ring 2", "work": "20 tokens", "copies": 4, "took_s": 2, "of": None}},
        ["kept ring 2 (20 tokens; 4 copies of a step, 2.0"],
    ),
    (
        {
            "tune": {"state": "done", "line": "kept ring 2", "model": "wan.safetensors", "copies": 4, "took_s": 2}
            | {"work": "one image", "of": {"model": "flux.safetensors", "why_not": ""}}
        },
        ["The quickest plan for flux.safetensors", "wan.safetensors: kept ring 2"],  # of the model before
    ),
    ({"doctor": {"state": "running"}, "action": "doctor"}, ["this takes up to a minute"]),
    ({"doctor": {"state": "failed", "message": "the doctor said nothing"}}, ["the doctor said nothing"]),
    (
        {
            "doctor": {
                "state": "done",
                "can_run": False,
                "checks": [
                    {"name": "torch", "ok": True, "needed": True, "seen": "2.13", "remedy": ""},
                    {"name": "loopback", "ok": False, "needed": True, "seen": "refused", "remedy": "allow it"},
                ],
            }
        },
        ["until the problems below are mended", "✗ loopback", "allow it", "1 checks passed"],
    ),
]


def test_every_state_is_shown_plainly(made_up: MadeUp) -> None:
    sidebar = made_up.comfy.open_sidebar()
    for state, texts in SHOWN:
        made_up.tell(**state)
        for text in texts:
            expect(sidebar).to_contain_text(text)
        expect(sidebar).not_to_contain_text(re.compile("undefined|null|NaN"))


def test_the_work_to_tune_for_is_that_of_the_last_run_until_a_user_writes_another(made_up: MadeUp) -> None:
    page, tune = made_up.comfy.page, re.compile("/parallel_dit/tune")
    page.route(tune, lambda route: route.abort())
    of = {"model": "wan.safetensors", "why_not": "", "width": 832, "height": 480, "frames": 21, "text_tokens": 512}
    of |= {"guided": True, "batch": 1}
    section = made_up.comfy.open_sidebar().get_by_test_id("pdit-tune")
    made_up.tell(tune={"state": "never", "of": of})
    section.locator("summary").click()
    section.get_by_label("Frames").fill("33")
    made_up.tell(tune={"state": "never", "of": of}, revised=1)
    with page.expect_request(tune) as asked:
        section.get_by_role("button", name="Tune").click()
    expect(section.get_by_label("Frames")).to_have_value("33")
    values = "width=832&height=480&frames=33&text_tokens=512&batch=1&seconds=60&guided=true"
    assert asked.value.url.endswith(f"/parallel_dit/tune?{values}")
    made_up.tell(tune={"state": "never", "of": of | {"why_not": "SP Config's mode is manual"}})
    expect(section.get_by_role("button", name="Tune")).to_be_disabled()


def test_a_failure_is_told_once_and_its_card_goes_with_it(made_up: MadeUp) -> None:
    failed = a_pool(state="failed", last_failure=DIED, failed_rank=1)
    card = made_up.comfy.page.get_by_test_id("pdit-error-card")
    made_up.tell(pools=[a_pool()])
    made_up.tell(pools=[failed])
    expect(card).to_contain_text("rank 1: killed by signal 9")
    expect(card).to_contain_text("Queue again to start fresh workers")
    made_up.tell(pools=[failed], action="doctor")
    expect(card).to_have_count(1)
    made_up.tell(pools=[a_pool(generation=2)])
    expect(card).to_have_count(0)
    made_up.tell(pools=[failed])
    expect(card).to_have_count(1)
    made_up.tell(session="made up after a restart of ComfyUI")
    expect(card).to_have_count(0)


JUMPED = a_report(2, 4)
JUMPED["ranks"][0]["begin_s"] = [9.0, -3.0, 0.5, 1e9]
TIMELESS = a_report(2, 4)
TIMELESS["ranks"][0] = {}
STOPPED = a_report(2, 4)
for rank in STOPPED["ranks"]:
    rank["compute_s"] = [0.0] * 4
REPORTS = [
    (None, "There is no report yet"),
    ({"schema": "parallel-dit/report/9", "kind": "denoise"}, "of a version that this panel does not know"),
    (
        {"schema": 1, "kind": "denoise", "steps": 2, "denoise_s": 1.0, "step_s": [0.5, 0.5]},
        "report of an older version",
    ),
    (a_report(2, 3, ranks=[{"rank": 0, "device": "cpu:0", "busy_s": "soon"}]), "0.50 s a step"),
    (a_report(2, 3, timings=[], ranks={"rank": 0}), "nothing to draw"),
    (a_report(2, 3, ranks=[None, 7, []], devices=None, plan="ring", warnings=[1]), "0.50 s a step"),
    (JUMPED, "0.50 s a step"),
    (TIMELESS, "0.50 s a step"),
    (STOPPED, "0.50 s a step"),
    (a_report(1, 4), "for 4 steps"),
    (a_report(8, 4, plan={"name": "cfg2-uly4", "degrees": {"cfg": 2, "ulysses": 4}}), "for 4 steps"),
    (a_report(64, 50), "for 50 steps"),
    (a_report(2, 10_000), "for 10000 steps"),
]


SIZES = """() => [...window.stores].map((store) => ({ reports: store._reports.size, listeners: store._listeners.size,
  elements: document.querySelectorAll('.pdit, .pdit *').length }))"""


def kept_by(page: Page) -> dict[str, int]:
    """Of the page's one store: reports and listeners; and how many elements of ours there are."""
    (sizes,) = page.evaluate(SIZES)
    return sizes


def test_runs_one_after_another_keep_their_own_figures_and_nothing_piles_up(made_up: MadeUp) -> None:
    page, entries, sizes = made_up.comfy.page, [], {}
    made_up.comfy.open_sidebar()
    timeline, rows = made_up.comfy.open_timeline(), page.get_by_test_id("pdit-rows")
    for steps in range(3, 11):  # of each run, other ones, so that no figure of one could be another's
        made_up.tell(pools=[a_pool(sampling=True, state="busy")], reports=entries, run={"step": 1, "steps": steps})
        entries = [*entries[-3:], made_up.report(steps, a_report(2, steps)) | {"summary": GAINED}]
        made_up.tell(pools=[a_pool()], reports=entries)
        expect(rows).to_have_attribute("data-drawn", f"2x{steps}")
        if steps in (8, 10):
            sizes[steps] = kept_by(page)
    assert sizes[10] == sizes[8], "the server has four reports"
    for steps in (10, 8, 7):
        timeline.get_by_label("Run", exact=True).select_option(str(steps))
        expect(rows).to_have_attribute("data-drawn", f"2x{steps}")
        expect(timeline.get_by_test_id("pdit-timeline-note")).to_contain_text(f"for {steps} steps")


def test_every_report_is_shown_plainly(made_up: MadeUp) -> None:
    timeline = made_up.comfy.open_timeline()
    for number, (report, text) in enumerate(REPORTS):
        made_up.tell(pools=[a_pool()], reports=[] if report is None else [made_up.report(number, report)])
        expect(timeline).to_contain_text(text)
        canvas = made_up.comfy.page.get_by_test_id("pdit-rows")
        if canvas.is_visible():
            canvas.dblclick(position={"x": 300, "y": 15})
            canvas.press("ArrowRight")
        assert not re.search("undefined|NaN|Infinity", timeline.inner_text()), report
        if text.startswith("for "):
            expect(canvas).to_have_attribute("data-drawn", f"{len(report['ranks'])}x{len(report['timings']['step_s'])}")
            assert len(areas_by_row(picture_of(canvas))) == len(report["ranks"])


def test_the_link_matrix_shows_what_was_measured_and_says_what_was_not(made_up: MadeUp) -> None:
    report = a_report(4, 2, plan={"name": "ring2-uly2", "degrees": {"ring": 2, "ulysses": 2}})
    report["ranks"][0] |= {"sent_bytes": [3_000_000, 5_000_000], "weight_bytes": [0, 0]}
    report["ranks"][1] |= {"sent_bytes": [0, 0], "communication_s": [0.0, 0.0]}
    del report["ranks"][2]["communication_s"]
    doctor = {
        "state": "done",
        "can_run": True,
        "checks": [],
        "peer_access": {"cuda:0-cuda:1": True, "cuda:0-cuda:2": False},
    }
    made_up.tell(pools=[a_pool(4)], reports=[made_up.report(1, report)], doctor=doctor)
    rows = made_up.comfy.open_timeline().locator("[data-chart=links] tr")
    expect(rows).to_have_count(5)
    unknown = ["not measured"]
    assert [row.locator("th, td").all_inner_texts() for row in rows.all()] == [
        ["", "sent", "waited", "sent / waited", "0", "1", "2", "3"],
        ["0 cuda:0", "4 MB", "0.10 s", "40 MB/s", "–", "ulysses, direct", "ring, by host", ""],
        ["1 cuda:1", "0 B", "0 s", *unknown, "ulysses", "–", "", "ring"],
        ["2 cuda:2", *unknown * 3, "ring", "", "–", "ulysses"],
        ["3 cuda:3", *unknown, "0.10 s", *unknown, "", "ring", "ulysses", "–"],
    ]
    made_up.tell(pools=[a_pool(64)], reports=[made_up.report(2, a_report(64, 2))])
    expect(rows).to_have_count(65)
    expect(rows.last.locator("td")).to_have_count(3)


def test_a_server_that_does_not_answer_is_said(bare: Tabs) -> None:
    def deaf(page: Page) -> None:
        page.route(re.compile("/parallel_dit/"), lambda route: route.abort())

    comfy = bare.get("deaf", before=deaf)
    expect(comfy.open_sidebar()).to_contain_text("The server does not answer")
    bare.close("deaf")


def test_a_pack_whose_nodes_could_not_be_loaded_is_said(bare: Tabs) -> None:
    """ComfyUI serves this page, and has none of its routes."""

    def empty(page: Page) -> None:
        page.route(re.compile("/parallel_dit/"), lambda route: route.fulfill(status=404, body="404: Not Found"))

    comfy = bare.get("empty", before=empty)
    expect(comfy.open_sidebar()).to_contain_text("Parallel DiT could not be loaded. ComfyUI's log")
    bare.close("empty")


def test_sp_config_shows_what_its_mode_needs_and_marks_what_cannot_work(comfy: ComfyPage) -> None:
    comfy.load_example(mode="auto")
    hidden = f"{comfy.node('SPConfig')}.widgets.filter((w) => w.hidden).map((w) => w.name)"
    pipeline = {"patches", "warmup_steps"}
    assert set(comfy.page.evaluate(hidden)) == {"data", "cfg", "pipefusion", "ring", "ulysses"} | pipeline
    plan = comfy.page.get_by_test_id("pdit-plan")
    expect(plan).to_contain_text("on cpu:0, cpu:1")
    comfy.widget("SPConfig", "mode", "manual")
    assert set(comfy.page.evaluate(hidden)) == pipeline
    comfy.widget("SPConfig", "pipefusion", 2)
    assert comfy.page.evaluate(hidden) == []
    comfy.widget("SPConfig", "pipefusion", 1)
    comfy.widget("SPConfig", "ulysses", 5)
    expect(plan).to_have_attribute("data-verdict", "bad")
    expect(plan).to_contain_text("ulysses=5")
    comfy.shot("config")
    assert comfy.page.evaluate(f"{comfy.node('SPConfig')}.has_errors")
    comfy.widget("SPConfig", "ulysses", 2)
    expect(plan).to_contain_text("uly2 on cpu:0, cpu:1")
    expect(plan).to_contain_text(re.compile(r"about \d+ MB of .+ each"))
    assert not comfy.page.evaluate(f"{comfy.node('SPConfig')}.has_errors")
    comfy.widget("ParallelModelLoader", "unet_name", AUTOENCODER)  # no file of that folder: the plan is of none
    expect(plan).not_to_contain_text("about")
    assert not comfy.page.evaluate(f"{comfy.node('SPConfig')}.has_errors")  # the loader is where it is missed
    comfy.widget("ParallelModelLoader", "unet_name", TRANSFORMER)
    expect(plan).to_contain_text(re.compile(r"about \d+ MB of .+ each"))


LINK = """(name) => {
  const node = app.graph.nodes.find((each) => each.comfyClass === 'SPConfig')
  const from = LiteGraph.createNode('PrimitiveString')
  app.graph.add(from)
  from.connect(0, node, node.inputs.findIndex((each) => (each.widget?.name ?? each.name) === name)) }"""


# As a choice that a subgraph takes from its outside.
TAKEN = """() => {{ const node = {node}
  node.inputs.find((each) => (each.widget?.name ?? each.name) === 'mode').link = -1
  node.onConnectionsChange() }}"""


def test_sp_config_says_nothing_of_values_that_are_linked(comfy: ComfyPage) -> None:
    """As those of a subgraph are: what stands below them is not what runs."""
    comfy.load_example(mode="auto", devices="cpu:99")
    plan = comfy.page.get_by_test_id("pdit-plan")
    expect(plan).to_have_attribute("data-verdict", "bad")
    comfy.page.evaluate(LINK, "devices")
    expect(plan).not_to_have_attribute("data-verdict", "bad")
    expect(plan).to_be_empty()
    hidden = f"{comfy.node('SPConfig')}.widgets.filter((w) => w.hidden).length"
    assert comfy.page.evaluate(hidden) > 0
    comfy.page.evaluate(TAKEN.format(node=comfy.node("SPConfig")))
    assert comfy.page.evaluate(hidden) == 0, "the mode is not known"


def test_every_control_is_reached_by_the_keyboard(made_up: MadeUp) -> None:
    made_up.comfy.setting("ParallelDiT.FirstRun.Over", True)
    lacking = {"summary": {"comparable": True, "ranks": 2}}  # has the button that measures one device
    made_up.tell(pools=[a_pool()], reports=[made_up.report(1, a_report(2, 3)) | lacking])
    page, timeline = made_up.comfy.page, made_up.comfy.open_timeline()
    expect(page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", "2x3")
    for panel, count in ((made_up.comfy.open_sidebar(), 5), (timeline, 14)):
        controls = panel.locator("button, select, [tabindex], input:not([hidden])").filter(visible=True)
        names = [control.evaluate(NAME) for control in controls.all()]
        assert len(names) == count
        assert all(names), "a control without a name says nothing to a screen reader"
        controls.first.focus()
        reached = [page.evaluate(f"({NAME})(document.activeElement)")]
        for _ in names[1:]:
            page.keyboard.press("Tab")
            reached.append(page.evaluate(f"({NAME})(document.activeElement)"))
        assert reached == names


NAME = "(element) => element.getAttribute('aria-label') ?? element.textContent.trim()"


def test_panels_and_nodes_can_be_read_in_both_themes(told_comfy: MadeUp) -> None:
    comfy = told_comfy.comfy
    failed = a_pool(4, plan={"cfg": 2, "ring": 2}, state="failed", last_failure=DIED, failed_rank=1)
    report = told_comfy.report(1, a_report(4, 6, plan={"name": "cfg2-ring2", "degrees": {"cfg": 2, "ring": 2}}))
    doctor = next(state["doctor"] for state, _ in SHOWN if "checks" in state.get("doctor", {}))
    comfy.setting("ParallelDiT.FirstRun.Over", False)
    comfy.load_example(ulysses=5)
    parts = [comfy.open_sidebar(), comfy.open_timeline()]
    told_comfy.tell(pools=[failed], reports=[report | {"summary": GAINED}], doctor=doctor)
    parts += [comfy.page.get_by_test_id(f"pdit-{name}") for name in ("strip", "error-card", "plan")]
    parts.append(comfy.page.get_by_test_id("pdit-result").first)
    expect(comfy.timeline).to_contain_text("for 6 steps")
    expect(comfy.page.get_by_test_id("pdit-plan")).to_have_attribute("data-verdict", "bad")
    for palette in ("light", "dark"):
        comfy.palette(palette)
        comfy.shot(f"panel-{palette}")
        for part in parts:
            assert part.evaluate(UNREADABLE) == [], palette
    comfy.setting("ParallelDiT.FirstRun.Over", True)


# Texts whose contrast with what is behind them is below 4.5, WCAG's AA. Colours come as rgb(), rgba() or color(srgb).
UNREADABLE = """(root) => {
  const parts = (colour) => {
    const [r, g, b, alpha = 1] = colour.match(/[\\d.]+/g).map(Number)
    return colour.startsWith('color') ? [r, g, b, alpha] : [r / 255, g / 255, b / 255, alpha] }
  const light = (colour) => { const [r, g, b] = parts(colour)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const behind = (each) => { const colour = getComputedStyle(each).backgroundColor
    return parts(colour)[3] < 0.5 && each.parentElement ? behind(each.parentElement) : colour }
  const words = (each) => [...each.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())
  return [root, ...root.querySelectorAll('*')]
    .filter((each) => words(each) && !(each instanceof SVGElement) && each.checkVisibility() && !each.disabled)
    .filter((each) => !each.matches('option, .pdit-chip, :disabled'))
    .map((each) => {
      const [a, b] = [light(getComputedStyle(each).color), light(behind(each))].sort((x, y) => y - x)
      return [(a + 0.05) / (b + 0.05), each.className, each.textContent.slice(0, 40)] })
    .filter(([contrast]) => contrast < 4.5) }"""


def test_the_panel_speaks_the_users_language(tabs: Tabs, comfy_server: ComfyServer) -> None:
    settings = ComfyClient(comfy_server.url)
    settings.post("/settings", {"Comfy.Locale": "zh"})
    try:
        comfy = tabs.get("zh")
        comfy.tab.click()
        expect(comfy.sidebar).to_contain_text("重启")
        comfy.load_example(ulysses=5)  # what the server says, too
        titles = comfy.page.evaluate("app.graph.nodes.map((node) => node.title)")
        named = {"SP Config", "Parallel Model Loader", "Parallel Sampler"}  # as errors and docs call them
        assert named <= {re.sub(".*（(.*)）", r"\1", title) for title in titles}, titles
        expect(comfy.page.get_by_test_id("pdit-plan")).to_contain_text("请让各并行度的乘积不超过 2")
        comfy.page.evaluate(RAISE, ["ulysses=5 is not a whole number; use 1 or more", "SPConfig", ["SPConfig"]])
        expect(comfy.page.get_by_test_id("pdit-error-card").locator(".pdit-reason")).to_contain_text("不是整数")
        comfy.open_timeline()
        expect(comfy.page.get_by_role("tab", name="GPU 时间线")).to_be_visible()
    finally:
        settings.post("/settings", {"Comfy.Locale": "en"})
        tabs.close("zh")
