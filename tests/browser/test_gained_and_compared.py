"""What a run gained, where its time went, what to try, what runs: the sampler, the sidebar, the strip, the timeline.

What the server says is made up; test_a_run.py has the real run, held against one device and kept over a reload.
"""

import io
import json
import re
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, expect

from .drawn import PARTS, shares_by_row
from .made_up import DRAWN_TEXTS, GAINED, GB, ONE, MadeUp, a_pool, a_report, uneven

HEAD = 107  # pixels of a saved picture above its rows: title, three lines, legend

UNDO = "() => app.extensionManager.workflow.activeWorkflow.changeTracker.undo()"
SAY = "(data) => app.api.dispatchCustomEvent('parallel_dit.text', data)"


def told(**summary: Any) -> dict[str, Any]:
    """An entry of the state with this summary."""
    return {"number": 3, "kind": "denoise", "summary": GAINED | summary}


def speedup(one_s: float, plan_s: float, **more: Any) -> dict[str, Any]:
    found = {"factor": one_s / plan_s if plan_s else 0, "one_s": one_s, "plan_s": plan_s, "plan": "uly2"}
    return {"speedup": found | {"number": 2, "kind": "denoise"} | more}


SAID = [
    (speedup(0.42, 0.28), "1.5× faster: 0.28 s a step instead of 0.42 s", "than run #2 on one device"),
    (speedup(0.122, 0.097), "1.3× faster: 97 ms a step instead of 122 ms", "than run #2 on one device"),
    (speedup(0.28, 0.42), "1.5× slower: 0.42 s a step instead of 0.28 s", "than run #2 on one device"),
    (speedup(0.28, 0.28), "As fast as one device: 0.28 s a step, 0.28 s on one", "than run #2"),
    (speedup(0.42, 0.28, kind="benchmark"), "1.5× faster: 0.28 s", "as benchmark #2 measured it"),
    (speedup(0.42, 0.28) | {"ranks": 1, "plan": "single"}, "With uly2 1.5× faster", "in run #2, on several devices"),
    (speedup(0.42, 0.0), "", ""),
    ({"speedup": {"factor": "much"}}, "", ""),
]


def test_the_figure_says_how_much_faster_or_slower_and_than_which_run(made_up: MadeUp) -> None:
    made_up.report(3, a_report(2, 4))
    sidebar, strip = made_up.comfy.open_sidebar(), made_up.comfy.page.get_by_test_id("pdit-strip")
    for summary, figure, note in SAID:
        made_up.tell(pools=[a_pool()], reports=[told(**summary)])
        expect(sidebar.get_by_test_id("pdit-hero")).to_contain_text(figure)
        expect(sidebar.get_by_test_id("pdit-note")).to_contain_text(note)
        expect(strip).to_contain_text(figure or "2 GPUs ready")
        expect(sidebar).not_to_contain_text(re.compile("undefined|null|NaN|Infinity"))
    quote, figures = {"devices": 2, "factor": 1.834}, {"exact": "proven", "error": 6.1e-3, "dtype": "bfloat16"}
    for more, said in [
        ({}, "2 devices: 1.83×"),
        (figures, "2 devices: 1.83×; difference as between two exact kernels of one device (6.1e-3, bfloat16)"),
        ({"exact": "whole"}, "2 devices: 1.83×; each call of the model computed by one device"),
        ({"factor": "much"}, ""),
    ]:
        made_up.tell(pools=[a_pool()], reports=[told(quote=quote | more)])
        expect(sidebar.get_by_test_id("pdit-quote")).to_have_text(said)
    failed = a_pool(state="failed", last_failure="rank 1: gone")
    for pools in ([failed], [failed, a_pool()], [a_pool(), failed]):  # workers that need the user before all others
        made_up.tell(pools=pools, reports=[told()])
        expect(strip).to_have_text("2 GPUs: failed")
    expect(sidebar).to_contain_text("Last run: #3, uly2, 256 px, 0.28 s a step")
    expect(sidebar).to_contain_text("59 % computing, 41 % waiting: fair. Try ring2: it was 1.3× faster here.")


def test_what_is_suggested_can_be_applied_to_the_graph_that_it_is_of(told_comfy: MadeUp) -> None:
    made_up, comfy = told_comfy, told_comfy.comfy
    comfy.load_example(mode="auto")
    memory = {"memory": {"allocated_bytes": GB}}
    report = a_report(1, 3)
    report["ranks"][0] |= memory
    entry = made_up.report(3, report) | {"summary": GAINED} | comfy.of_node("ParallelSampler")
    made_up.tell(pools=[a_pool()], reports=[entry])
    result = comfy.page.get_by_test_id("pdit-result").first
    expect(result).to_contain_text("1.5× faster")
    expect(result).to_contain_text("1 rank · 1.0 GB")
    result.get_by_role("button", name="Use ring2").click()
    expect(comfy.page.get_by_test_id("pdit-plan")).to_contain_text("ring2 on cpu:0, cpu:1")
    values = comfy.values("SPConfig")
    assert {name: values[name] for name in ("mode", "ulysses", "ring")} == {"mode": "manual", "ulysses": 1, "ring": 2}
    made_up.tell(pools=[a_pool()], reports=[entry | {"graph": "another"}])
    expect(result).to_contain_text("not run yet")
    comfy.open_sidebar().get_by_role("button", name="Use ring2").click()
    expect(comfy.toast("another workflow")).to_be_visible()


def test_undo_takes_back_what_the_panel_did_and_not_the_edit_before_it(told_comfy: MadeUp) -> None:
    made_up, comfy = told_comfy, told_comfy.comfy
    comfy.load_example(mode="auto")
    entry = made_up.report(3, a_report(1, 3)) | {"summary": GAINED} | comfy.of_node("ParallelSampler")
    made_up.tell(pools=[a_pool()], reports=[entry])
    use = comfy.page.get_by_test_id("pdit-result").first.get_by_role("button", name="Use ring2")
    expect(use).to_be_visible()
    comfy.edit("ParallelSampler", "steps", 7)
    use.click()
    expect(comfy.page.get_by_test_id("pdit-plan")).to_contain_text("ring2 on cpu:0, cpu:1")
    comfy.page.evaluate(UNDO)
    assert (comfy.values("SPConfig")["ring"], comfy.values("ParallelSampler")["steps"]) == (1, 7)


def test_a_node_goes_on_to_the_next_queued_run_though_nobody_saw_the_first_one_end(made_up: MadeUp) -> None:
    comfy, page = made_up.comfy, made_up.comfy.page
    comfy.load_example()
    editor, busy = comfy.of_node("ParallelSampler"), [a_pool(sampling=True, state="busy")]
    run = {"node": editor["node_id"], "graph": editor["graph"], "class": "ParallelSampler"}
    result = page.get_by_test_id("pdit-result").first
    made_up.tell(pools=busy, run=run | {"prompt": "first", "step": 1, "steps": 5})
    page.evaluate(SAY, {"node_id": editor["node_id"], "text": "step 2/5 · 0.40 s"})
    expect(result).to_contain_text("step 2/5")
    page.evaluate(SAY, {"node_id": editor["node_id"], "graph": "another", "text": "step 7/7 of another workflow"})
    page.evaluate(SAY, {"node_id": editor["node_id"], "graph": editor["graph"], "text": "step 3/5 · 0.40 s"})
    expect(result).to_contain_text("step 3/5")
    page.evaluate(SAY, {"node_id": editor["node_id"], "graph": "another", "text": "step 7/7 of another workflow"})
    expect(result).to_contain_text("step 3/5")
    reports = [made_up.report(1, a_report(2, 5)) | editor]
    made_up.tell(pools=busy, run=run | {"prompt": "second", "step": 0, "steps": 9}, reports=reports)
    expect(result).to_contain_text("step 1 of 9")
    expect(result).not_to_contain_text("3/5")
    made_up.tell(pools=[a_pool()], reports=reports)  # the second was cancelled, and has no report
    expect(result).to_contain_text("stopped before its end")


def test_a_plan_is_asked_for_again_once_devices_were_measured(made_up: MadeUp) -> None:
    comfy, plan = made_up.comfy, made_up.comfy.page.get_by_test_id("pdit-plan")
    made_up.tell(pools=[a_pool()], calibrations=1)
    comfy.load_example(mode="auto")
    expect(plan).to_contain_text("uly2 on cpu:0, cpu:1")
    other = {"plan": "ring2", "degrees": {"ring": 2}, "devices": ["cpu:0", "cpu:1"], "reasons": [], "warnings": []}
    comfy.page.route(re.compile("/parallel_dit/plan"), lambda route: route.fulfill(json=other))
    made_up.tell(pools=[a_pool()], calibrations=2)
    expect(plan).to_contain_text("ring2 on cpu:0, cpu:1")


def test_the_mesh_and_the_rows_agree_and_nothing_moves_while_it_runs(made_up: MadeUp) -> None:
    sidebar = made_up.comfy.open_sidebar()
    reports = [made_up.report(3, a_report(2, 4)) | {"summary": GAINED}]
    rows, places = sidebar.locator(".pdit-rank-row .pdit-state"), []
    bars, computing = sidebar.locator(".pdit-live-share"), sidebar.locator(".pdit-live-text")
    run = {
        "node": "9",
        "prompt": "p",
        "class": "ParallelBenchmark",
        "step": 2,
        "steps": 12,
        "step_s": 2.0,
        "left_s": 20.0,
    }
    alone, pair = (a_pool(2, plan=plan, sampling=True, state="busy") for plan in ({}, None))
    alone["ranks"][0]["shares"] = {"compute": 0.9, "communication": 0.0, "idle": 0.1}
    for rank, compute in zip(pair["ranks"], (0.71, 0.64), strict=True):
        rank["shares"] = {"compute": compute, "communication": 0.8 - compute, "idle": 0.2}
    states: list[tuple[dict[str, Any], dict[str, Any] | None, list[str], str]] = [
        (a_pool(2, plan={}), None, ["idle", "not in this plan"], ""),
        (alone, run, ["run 3 of 12", "not in this plan"], "run 3 of 12 · about 20 s left"),
        (alone, {"node": "9", "prompt": "p"}, ["busy", "not in this plan"], "running …"),
        (pair, run | {"class": "KSampler"}, ["step 3 of 12"] * 2, "step 3 of 12"),
        (
            a_pool(2, state="failed", last_failure="rank 1: gone", failed_rank=1),
            None,
            ["ended with the others", "failed"],
            "",
        ),
    ]
    for pool, now, texts, live in states:
        made_up.tell(pools=[pool], run=now, reports=reports)
        expect(rows).to_have_text(texts)
        expect(sidebar).to_contain_text("0.50 s a step")  # of the report, which comes after the state
        expect(sidebar.get_by_test_id("pdit-live")).to_contain_text(live)
        shares = [rank.get("shares") for rank in pool["ranks"]]
        percents = [each and {part: f"{100 * share:.0f} %" for part, share in each.items()} for each in shares]
        expect(computing).to_have_text([f"{each['compute']} computing" if each else "" for each in percents])
        for bar, each in zip(bars.all(), percents, strict=True):
            expect(bar).to_have_css("visibility", "visible" if each else "hidden")
            if each:
                expect(bar).to_have_attribute("title", ", ".join(" ".join(part) for part in each.items()))
        places.append(
            sidebar.locator(".pdit-run, .pdit-doctor").evaluate_all("(all) => all.map((each) => each.offsetTop)")
        )
    assert places[1] == places[0]
    assert places[2] == places[0]


# What a canvas shows once its place has its size: the same in ten frames, one after the other.
AT_REST = """async (canvas) => {
  let [shown, frames] = ['', 0]
  while (frames < 10) {
    await new Promise(requestAnimationFrame)
    const now = canvas.toDataURL()
    frames = now === shown ? frames + 1 : 0
    shown = now
  }
  return shown }"""


def a_timeline(made_up: MadeUp, steps: int = 4, **changes: Any) -> Locator:
    """The timeline of a run of two ranks: each step 0.3 s of compute, 0.1 s of communication, 0.1 s idle."""
    made_up.tell(pools=[a_pool()], reports=[made_up.report(1, a_report(2, steps, **changes)) | {"summary": GAINED}])
    timeline = made_up.comfy.open_timeline()
    expect(made_up.comfy.page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", f"2x{steps}")
    return timeline


def test_the_timeline_says_shares_and_what_is_under_the_pointer(made_up: MadeUp) -> None:
    timeline, page = a_timeline(made_up), made_up.comfy.page
    expect(timeline.get_by_test_id("pdit-legend")).to_contain_text("compute 60 %communication 20 %idle 20 %")
    expect(timeline).to_contain_text("their order is not")
    expect(timeline).to_contain_text("59 % computing, 41 % waiting: fair.")
    rows, field = page.get_by_test_id("pdit-rows"), timeline.get_by_label("Step to look at")
    rows.evaluate(AT_REST)
    width = rows.bounding_box()["width"] - 94
    second = {"x": 86 + width * 0.33, "y": 40}  # at 0.66 s: compute, in the second step of rank 1
    rows.hover(position={"x": 86 + width * 0.475, "y": 12})  # at 0.95 s
    expect(page.get_by_test_id("pdit-tip")).to_have_text("Step 2, rank 0 cuda:0: idle 0.10 s, 20 % of the step.")
    rows.hover(position=second)
    part = "Step 2, rank 1 cuda:1: compute 0.30 s, 60 % of the step."
    expect(page.get_by_test_id("pdit-tip")).to_have_text(part)
    rows.click(position=second)
    expect(page.get_by_test_id("pdit-details")).to_have_text(part)
    expect(field).to_have_value("2")
    whole = rows.evaluate(AT_REST)
    page.mouse.wheel(0, 10)
    expect(field).to_have_value("2")
    assert rows.evaluate("(canvas) => canvas.toDataURL()") == whole, "the wheel alone scrolls"
    page.keyboard.down("Control")
    for _ in range(6):
        page.mouse.wheel(0, -10)
    page.keyboard.up("Control")
    expect(field).to_have_value("2")
    assert rows.evaluate("(canvas) => canvas.toDataURL()") != whole
    rows.focus()
    for _ in range(14):
        page.keyboard.press("ArrowRight")
    expect(field).to_have_value("3")
    page.keyboard.press("0")
    expect(field).to_have_value("0")
    rows.dblclick(position=second)
    expect(page.get_by_test_id("pdit-details")).to_contain_text("Step 2 took 0.50 s.")
    expect(page.get_by_test_id("pdit-details")).to_contain_text("1 cuda:1: compute 0.30 s (60 %), communication")


def test_the_timeline_looks_at_a_step_and_saves_what_it_shows(made_up: MadeUp) -> None:
    page, report = made_up.comfy.page, uneven(2, 4) | {"plan": {"name": "uly2", "ranks": 2}, "sampling": {"steps": 4}}
    report |= {"model": {"file": "a.safetensors"}, "sizes": {"width": 64, "height": 64}}
    made_up.tell(pools=[a_pool()], reports=[made_up.report(1, report)])
    timeline = made_up.comfy.open_timeline()
    canvas = page.get_by_test_id("pdit-rows")
    expect(canvas).to_have_attribute("data-drawn", "2x4")
    whole = canvas.evaluate(AT_REST)
    timeline.get_by_title("The next step").click()
    expect(timeline.get_by_label("Step to look at, 0 for all")).to_have_value("1")
    assert canvas.evaluate("(canvas) => canvas.toDataURL()") != whole
    canvas.focus()
    page.keyboard.press("0")
    page.wait_for_function("([canvas, whole]) => canvas.toDataURL() === whole", arg=[canvas.element_handle(), whole])
    assert json.loads(saved(timeline, "JSON", ".json")) == report
    assert json.loads(saved(timeline, "Trace", ".trace.json"))["traceEvents"]
    page.evaluate(DRAWN_TEXTS)
    picture = Image.open(io.BytesIO(saved(timeline, "PNG", ".png"))).convert("RGB")
    written = page.evaluate("window.written")
    assert "uly2 on cuda:0, cuda:1 · a.safetensors · 64 × 64 · 4 steps" in written
    assert {"Parallel DiT · GPU timeline", *PARTS, "idle", "Seconds of each step"} <= set(written)
    assert any("0.50 s a step" in text for text in written)
    width, height = canvas.evaluate("(canvas) => [canvas.width, canvas.height]")
    wanted = [{"compute": share, "communication": 0.3, "idle": 0.7 - share} for share in (0.2, 0.35)]
    shares = shares_by_row(picture.crop((0, HEAD, width, HEAD + height)))
    assert shares == [pytest.approx(each, abs=0.02) for each in wanted]
    last = picture.crop((0, picture.height - height, width, picture.height))
    assert any(low != high for low, high in last.getextrema()), "the charts are one over the other"
    page.evaluate("window.open = (address) => { window.asked = address; return null }")  # a browser that blocks
    timeline.get_by_role("button", name="Perfetto").click()
    assert page.evaluate("window.asked") == "https://ui.perfetto.dev"
    expect(made_up.comfy.toast("blocked the new tab")).to_be_visible()


def saved(timeline: Locator, button: str, ending: str) -> bytes:
    """What is in the file that one of the timeline's buttons saves."""
    with timeline.page.expect_download() as found:
        timeline.get_by_role("button", name=button, exact=True).click()
    assert found.value.suggested_filename.endswith(ending)
    return found.value.path().read_bytes()


def test_two_runs_are_drawn_one_under_the_other_on_one_time(made_up: MadeUp) -> None:
    def half(**times: Any) -> dict[str, Any]:
        return {"work": "0123456789ab", "timings": times}

    slow = made_up.report(1, a_report(1, 4, **half(step_s=[0.5] * 4)))
    quick = a_report(2, 4, **half(step_s=[0.25] * 4))
    decode = {"number": 2, "kind": "vae", "summary": {}}
    video = {"plan": "uly2", "ranks": 2, "width": 832, "height": 480, "frames": 81, "step_s": 0.25}
    made_up.tell(
        pools=[a_pool()],
        reports=[
            slow | {"summary": {"plan": "single", "ranks": 1, "width": 256, "height": 256, "step_s": 0.5}},
            decode,
            made_up.report(3, quick) | {"summary": video},
        ],
    )
    timeline, page = made_up.comfy.open_timeline(), made_up.comfy.page
    run, beside = timeline.get_by_label("Run", exact=True), timeline.locator("select").nth(1)
    names = ["#3, uly2, 832 × 480, 81 frames, 0.25 s a step", "#1, one device, 256 px, 0.50 s a step"]
    assert run.locator("option").all_inner_texts() == names
    assert beside.locator("option").all_inner_texts() == ["beside: none", *names]
    other = page.get_by_test_id("pdit-rows-other")
    expect(other).to_be_hidden()
    beside.select_option("1")
    expect(other).to_be_visible()
    expect(timeline).to_contain_text("the run above is 2.0× faster")
    expect(page.get_by_test_id("pdit-rows")).to_be_visible()
    for number, work, said in ((4, "another", "the two sampled different things"), (5, None, "cannot be compared")):
        made_up.report(number, a_report(2, 4, work=work))
        made_up.tell(pools=[a_pool()], reports=[slow, {"number": number, "kind": "denoise", "summary": video}])
        expect(timeline).to_contain_text(said)


def test_the_timeline_shows_the_run_of_a_server_that_began_to_count_anew(made_up: MadeUp) -> None:
    timeline, page = made_up.comfy.open_timeline(), made_up.comfy.page
    for session, steps in (("first", 3), ("second", 5)):
        server = {"session": f"made up {session}", "pools": [a_pool()]}
        made_up.tell(**server, reports=[])
        expect(timeline.get_by_test_id("pdit-empty")).to_be_visible()
        made_up.tell(**server, reports=[made_up.report(1, a_report(2, steps))])
        expect(page.get_by_test_id("pdit-rows")).to_have_attribute("data-drawn", f"2x{steps}")


def test_a_saved_report_and_a_run_can_be_looked_at_in_turn(made_up: MadeUp) -> None:
    timeline = a_timeline(made_up)
    file, run = timeline.locator("input[type=file]"), timeline.get_by_label("Run", exact=True)
    expect(run).to_have_value("1")
    saved = {"name": "a.json", "mimeType": "application/json", "buffer": json.dumps([a_report(2, 7)]).encode()}
    file.set_input_files(saved)
    expect(timeline).to_contain_text("for 7 steps")
    for field in (file, run):  # a browser tells of a choice where it is another one
        expect(field).to_have_value("")
    file.set_input_files(saved | {"buffer": json.dumps([a_report(2, 7, run_id=7)]).encode()})
    with made_up.comfy.page.expect_download() as kept:
        timeline.get_by_role("button", name="JSON", exact=True).click()
    assert kept.value.suggested_filename == "parallel-dit-denoise.json"
    run.select_option("1")
    expect(timeline).to_contain_text("for 4 steps")


def test_a_timeline_without_a_run_offers_what_to_do(made_up: MadeUp) -> None:
    timeline = made_up.comfy.open_timeline()
    expect(timeline.get_by_test_id("pdit-empty")).to_contain_text("Run a graph with Parallel Sampler")
    for name in ("PNG", "JSON", "Trace", "Perfetto"):
        expect(timeline.get_by_role("button", name=name, exact=True)).to_be_disabled()
    expect(timeline.get_by_role("button", name="Open …")).to_be_enabled()
    timeline.get_by_role("button", name="Open a template").click()
    assert made_up.comfy.page.evaluate("window.executed.at(-1)") == "Comfy.BrowseTemplates"
    a_timeline(made_up)
    expect(timeline.get_by_test_id("pdit-empty")).to_have_count(0)
    expect(timeline.get_by_role("button", name="JSON", exact=True)).to_be_enabled()


SIZES = """(root) => {
  const box = (selector) => root.querySelector(selector).getBoundingClientRect()
  const table = root.querySelector('[data-chart=links]')
  return { tools: box('[role=toolbar]').height, rows: box('.pdit-rows').width, whole: root.clientWidth,
    cut: table.scrollWidth - table.clientWidth, sideways: root.scrollWidth - root.clientWidth } }"""


# Where ComfyUI's own figures of the canvas, in its lower left corner, end.
FIGURES_END = """async () => {
  const write = CanvasRenderingContext2D.prototype.fillText
  let end = 0
  CanvasRenderingContext2D.prototype.fillText = function (text, x, ...all) {
    const own = this.canvas === app.canvas.canvas && /^(T|I|N|V|FPS): ?/.test(text)
    const at = own && this.canvas.getBoundingClientRect().left + this.getTransform().e / devicePixelRatio
    if (own) end = Math.max(end, at + x + this.measureText(text).width)
    return write.call(this, text, x, ...all)
  }
  app.canvas.setDirty(true, true)
  for (let frame = 0; frame < 20 && !end; frame++) await new Promise(requestAnimationFrame)
  CanvasRenderingContext2D.prototype.fillText = write
  return end }"""


def test_the_strip_covers_no_figures_of_comfyui(told_comfy: MadeUp) -> None:
    made_up = told_comfy
    strip = made_up.comfy.page.get_by_test_id("pdit-strip")
    made_up.tell(pools=[a_pool()])
    left = "(strip) => strip.getBoundingClientRect().left"
    strip.wait_for()
    assert 50 < made_up.comfy.page.evaluate(FIGURES_END) < strip.evaluate(left)
    made_up.comfy.open_sidebar()
    panel = "document.querySelector('.graph-canvas-panel').getBoundingClientRect().left"
    assert strip.evaluate(left) - made_up.comfy.page.evaluate(panel) < 20, "the sidebar covers the figures"


def test_small_and_large_windows_have_room_for_the_rows(made_up: MadeUp) -> None:
    page = made_up.comfy.page
    try:
        for width, height, lines in ((1024, 700, 2), (2560, 1440, 1)):
            page.set_viewport_size({"width": width, "height": height})
            made_up.comfy.open_sidebar()
            plan = {"name": "uly2", "degrees": ONE | {"ulysses": 2}}
            ranks = [rank | {"memory": {"allocated_bytes": GB}} for rank in a_report(2, 4)["ranks"]]
            timeline = a_timeline(made_up, plan=plan, ranks=ranks)
            expect(timeline.locator("[data-chart=links] tr")).to_have_count(3)
            timeline.get_by_test_id("pdit-rows").evaluate(AT_REST)  # once the window's new size is the page's
            seen = timeline.evaluate(SIZES)
            assert seen["tools"] <= 32 * lines, seen
            assert seen["rows"] >= (0.9 if width == 1024 else 0.6) * seen["whole"], seen
            assert seen["rows"] > 500, seen
            assert max(seen["cut"], seen["sideways"]) <= 0, seen
            made_up.comfy.shot(f"window-{width}")
    finally:
        page.set_viewport_size({"width": 1600, "height": 950})
