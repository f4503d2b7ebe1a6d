"""States and reports of every kind, the odd ones above all: shown plainly, nothing thrown; keys, themes, languages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

from .comfy_page import ComfyPage, coloured_pixels

GB = 10**9
COMPUTE = (0x4E, 0x79, 0xA7)
DEGREES = {"data": 1, "cfg": 1, "pipefusion": 1, "ring": 1, "ulysses": 2}


def a_pool(numbers: int = 2, **changes: Any) -> dict[str, Any]:
    """A pool as the server tells of it."""
    ranks = [{"rank": n, "device": f"cuda:{n}", "kind": "cuda", "memory_bytes": 24 * GB} for n in range(numbers)]
    pool = {"state": "idle", "generation": 1, "models": [], "plans": [DEGREES], "peer_access": True, "ranks": ranks}
    return pool | {"last_failure": None, "failed_rank": None, "sampling": False} | changes


def a_report(numbers: int, steps: int, **changes: Any) -> dict[str, Any]:
    """A report of a sampling run, as schema 1 has it."""
    series = [0.4] * steps
    begin = [0.5 * step for step in range(steps)]
    times = {"begin_s": begin, "busy_s": series, "compute_s": [0.3] * steps, "communication_s": [0.1] * steps}
    times["idle_s"] = times["communication_s"]
    report = {
        "schema": "parallel-dit/report/1",
        "kind": "denoise",
        "timings": {"step_s": [0.5] * steps, "denoise_s": 0.5 * steps},
    }
    report["ranks"] = [{"rank": rank, "device": f"cuda:{rank}", **times} for rank in range(numbers)]
    return report | changes


def serve(page: Page, state: dict[str, Any], reports: dict[int, Any]) -> None:
    """Let the page believe that the server said this."""
    told = {"version": "0.1.0", "devices": [], "pools": [], "run": None, "reports": [], "action": None}
    told |= {"doctor": {"state": "never"}, "session": "made up", "revision": 1} | state
    told["reports"] = [{"number": number, "kind": report.get("kind", "denoise")} for number, report in reports.items()]
    page.route(re.compile(r"/parallel_dit/state$"), lambda route: route.fulfill(json=told))
    for number, report in reports.items():
        page.route(re.compile(rf"/parallel_dit/reports/{number}$"), answer(json.dumps(report)))


def answer(body: str) -> Callable[[Route], None]:
    """A handler that answers with this JSON."""
    return lambda route: route.fulfill(body=body, content_type="application/json")


DIED = "rank 1: killed by signal 9; queue again to start fresh workers"
SHOWN = [
    ({"pools": []}, "No workers yet"),
    ({"pools": [a_pool(state="stopped")]}, "No workers yet"),
    ({"pools": [a_pool(state="starting", plans=[])]}, "generation 1: starting"),
    ({"pools": [a_pool(state="failed", last_failure=DIED, failed_rank=1)]}, DIED),
    ({"pools": [a_pool(64)]}, "cuda:63"),
    ({"pools": [a_pool(2)]}, "memory not reported"),
    ({"pools": [], "doctor": {"state": "failed", "message": "the doctor said nothing"}}, "the doctor said nothing"),
]


def tell(comfy: ComfyPage, revision: int, **state: Any) -> None:
    """Let the page hear this from the server, as any change is told."""
    state = {"session": "made up", "revision": revision, "run": None, "reports": [], "action": None} | state
    state = {"pools": [], "doctor": {"state": "never"}} | state
    comfy.page.evaluate("(state) => app.api.dispatchCustomEvent('parallel_dit.state', state)", state)


def test_every_state_is_shown_plainly(open_page: Callable[..., ComfyPage]) -> None:
    comfy = open_page(before=lambda page: serve(page, {"pools": []}, {}))
    sidebar = comfy.open_sidebar()
    for revision, (state, text) in enumerate(SHOWN, start=2):
        tell(comfy, revision, **state)
        expect(sidebar).to_contain_text(text)


def test_an_older_state_never_replaces_a_newer_one(open_page: Callable[..., ComfyPage]) -> None:
    comfy = open_page(before=lambda page: serve(page, {"pools": []}, {}))
    sidebar = comfy.open_sidebar()
    tell(comfy, 5, pools=[a_pool(generation=5)])
    tell(comfy, 4, pools=[a_pool(generation=4)])
    expect(sidebar).to_contain_text("generation 5")


REPORTS = [
    (None, "There is no report yet"),
    ({"schema": "parallel-dit/report/9", "kind": "denoise"}, "of a version that this panel does not know"),
    (
        {"schema": 1, "kind": "denoise", "steps": 2, "denoise_s": 1.0, "step_s": [0.5, 0.5]},
        "report of an older version",
    ),
    (a_report(2, 3, ranks=[{"rank": 0, "device": "cpu:0", "busy_s": "soon"}]), "0.50 s a step"),
    (a_report(2, 3, timings=[], ranks={"rank": 0}), "nothing to draw"),
    (a_report(64, 500), "for 500 steps"),
    (a_report(2, 10_000), "for 10000 steps"),
]


def test_every_report_is_shown_plainly(open_page: Callable[..., ComfyPage]) -> None:
    reports = {number: report for number, (report, _) in enumerate(REPORTS) if report is not None}
    comfy = open_page(before=lambda page: serve(page, {"pools": []}, reports))
    timeline = comfy.open_timeline()
    for number, (report, text) in enumerate(REPORTS):
        entries = [] if report is None else [{"number": number, "kind": "denoise"}]
        tell(comfy, number + 2, pools=[a_pool()], reports=entries)
        expect(timeline).to_contain_text(text, timeout=20_000)
        if text.startswith("for "):
            lanes = comfy.page.get_by_test_id("pdit-lanes")
            expect(lanes).to_have_attribute("data-drawn", f"{len(report['ranks'])}x{len(report['timings']['step_s'])}")
            assert coloured_pixels(lanes, COMPUTE) > 1000


def test_a_server_that_does_not_answer_is_said(open_page: Callable[..., ComfyPage]) -> None:
    comfy = open_page(before=lambda page: page.route(re.compile("/parallel_dit/"), lambda route: route.abort()))
    expect(comfy.open_sidebar()).to_contain_text("The server does not answer")


def test_sp_config_shows_what_its_mode_needs_and_marks_what_cannot_work(comfy: ComfyPage) -> None:
    comfy.load_example(mode="auto")
    hidden = f"{comfy.node('SPConfig')}.widgets.filter((w) => w.hidden).map((w) => w.name)"
    assert {"ulysses", "ring"} <= set(comfy.page.evaluate(hidden))
    plan = comfy.page.get_by_test_id("pdit-plan")
    expect(plan).to_contain_text("on cpu:0, cpu:1")
    comfy.widget("SPConfig", "mode", "manual")
    assert set(comfy.page.evaluate(hidden)) == {"patches", "warmup_steps"}
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
    assert not comfy.page.evaluate(f"{comfy.node('SPConfig')}.has_errors")


def test_every_button_is_reached_by_the_keyboard(open_page: Callable[..., ComfyPage]) -> None:
    comfy = open_page(before=lambda page: serve(page, {"pools": [a_pool()]}, {1: a_report(2, 3)}))
    sidebar = comfy.open_sidebar()
    wanted = [button.inner_text() for button in sidebar.get_by_role("button").all()]
    assert len(wanted) == 4
    sidebar.get_by_role("button").first.focus()
    reached = []
    for _ in wanted:
        reached.append(comfy.page.evaluate("document.activeElement.textContent"))
        comfy.page.keyboard.press("Tab")
    assert reached == wanted


def test_both_themes_can_be_read(comfy: ComfyPage) -> None:
    sidebar = comfy.open_sidebar()
    for palette in ("light", "dark"):
        comfy.setting("Comfy.ColorPalette", palette)
        comfy.page.wait_for_timeout(200)
        comfy.shot(palette)
        assert sidebar.locator("section").first.evaluate(CONTRAST) > 4.5  # WCAG AA for text


CONTRAST = """(element) => {
  const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const style = getComputedStyle(element)
  const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x)
  return (a + 0.05) / (b + 0.05) }"""


def test_the_panel_speaks_the_users_language(open_page: Callable[..., ComfyPage]) -> None:
    comfy = open_page(before=lambda page: serve(page, {"pools": []}, {}))
    comfy.setting("Comfy.Locale", "zh")
    comfy.reload()
    comfy.page.locator("[class*=parallel-dit], button:has(.pi-server)").first.click()
    expect(comfy.sidebar).to_contain_text("重启")
    comfy.setting("Comfy.Locale", "en")
