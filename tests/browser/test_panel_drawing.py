"""What the panel draws and exports, from the pixels and from the file: modules alone, on a page of plain files."""

from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page

from .drawn import AXIS, TIME_LEFT, TIME_RIGHT, areas_by_row, picture_of, shares_by_row
from .made_up import uneven

TIME_WIDTH = 800  # pixels of the canvas for the time, so that the parts of these steps end between two of them
DRAW = """async ([report, width, span]) => {
  const { drawRows, rowsHeight } = await import('/extensions/parallel-dit/panel/timeline_rows.mjs')
  const { readReport } = await import('/extensions/parallel-dit/panel/report.mjs')
  const view = readReport(report)
  const canvas = document.createElement('canvas')
  canvas.style.cssText = `display:block;width:${width}px;height:${rowsHeight(view.ranks.length)}px`
  document.body.replaceChildren(canvas)
  drawRows(canvas, view.ranks, span ?? [0, view.end_s]) }"""
TRACE = """async (report) => {
  const { chromeTrace, jsonBlob } = await import('/extensions/parallel-dit/panel/exports.mjs')
  const { readReport } = await import('/extensions/parallel-dit/panel/report.mjs')
  return JSON.parse(await jsonBlob(chromeTrace(readReport(report))).text()) }"""
CALL = """async ([file, name, ...given]) => (await import(`/extensions/parallel-dit/panel/${file}`))[name](...given)"""
PICKED = """async ([report, at, span]) => {
  const { timeAt, stepSpan } = await import('/extensions/parallel-dit/panel/timeline_rows.mjs')
  const { readReport } = await import('/extensions/parallel-dit/panel/report.mjs')
  const { ranks } = readReport(report)
  const canvas = { getBoundingClientRect: () => ({ left: 10, width: 894 }) }
  return [at.map((x) => timeAt(canvas, ranks, span, x)), stepSpan(ranks, 1)] }"""
HEARD = """async (states) => {
  const { Store } = await import('/extensions/parallel-dit/panel/store.mjs')
  const store = new Store(() => Promise.reject(new Error('deaf')))
  return states.map(([session, revision]) => {
    store.take({ session, revision, pools: [] })
    return [store.state.session, store.state.revision] }) }"""


def drawn(page: Page, report: dict[str, Any], span: list[float] | None = None) -> Image.Image:
    """The rows of a report; `span`: of a part of the time."""
    page.evaluate(DRAW, [report, TIME_LEFT + TIME_WIDTH + TIME_RIGHT, span])
    return picture_of(page.locator("canvas"))


@pytest.mark.parametrize(
    ("numbers", "steps", "span", "off"),
    [(1, 1, None, 0.02), (3, 4, None, 0.02), (3, 4, [1.5, 2.5], 0.02), (3, 2000, None, 0.08)],
    ids=["one step", "several steps", "a part of the time", "steps narrower than pixels"],
)
def test_every_rank_has_a_row_and_each_colour_the_area_of_its_seconds(
    plain_page: Page, numbers: int, steps: int, span: list[float] | None, off: float
) -> None:
    """`off`: of a row's area. Lines of pixels that two colours share count for neither."""
    rows = shares_by_row(drawn(plain_page, uneven(numbers, steps), span))
    assert len(rows) == numbers
    for number, row in enumerate(rows):
        compute = 0.2 + 0.3 * number / numbers
        expected = {"compute": compute, "communication": 0.3, "idle": 0.7 - compute}
        assert row == pytest.approx(expected, abs=off), f"rank {number}"


def test_a_rank_without_times_leaves_its_row_empty(plain_page: Page) -> None:
    report = uneven(3, 4)
    report["ranks"][1] = {"rank": 1, "device": "cpu:1"}
    picture, (top, high) = drawn(plain_page, report), (4, 26)  # pixels above the first row, and of a row
    rows = [(0, top + high * rank, picture.width, top + high * (rank + 1) + AXIS) for rank in range(3)]
    assert [len(areas_by_row(picture.crop(row))) for row in rows] == [1, 0, 1]


def test_the_exported_trace_has_a_track_a_rank_and_each_steps_seconds(plain_page: Page) -> None:
    report = uneven(2, 3)
    report["plan"] = {"name": "uly2"}
    trace = plain_page.evaluate(TRACE, report)
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {0: "rank 0 cuda:0", 1: "rank 1 cuda:1"}
    assert trace["traceEvents"][0]["args"]["name"] == "Parallel DiT uly2"
    for rank in report["ranks"]:
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == rank["rank"]]
        found = [(event["name"], event["args"]["step"], event["ts"] / 1e6, event["dur"] / 1e6) for event in slices]
        expected = []
        for step in range(3):
            at = float(step)
            for name in ("compute", "communication", "idle"):
                expected.append((name, step + 1, pytest.approx(at), pytest.approx(rank[f"{name}_s"][step])))
                at += rank[f"{name}_s"][step]
        assert found == expected


def test_a_place_on_the_timeline_is_the_time_and_the_step_there(plain_page: Page) -> None:
    left, right = 10 + 86, 10 + 86 + TIME_WIDTH
    places = [0, left, (left + right) / 2, right, 5000]
    found, span = plain_page.evaluate(PICKED, [uneven(2, 4), places, [0, 4]])
    assert [(place["at_s"], place["step"]) for place in found] == [(0, 0), (0, 0), (2, 2), (4, 3), (4, 3)]
    assert span == pytest.approx([1, 2])


def test_the_marks_of_an_axis_are_round_and_fill_it(plain_page: Page) -> None:
    for given, apart, marks in (
        ([0, 0.93, 8], 0.2, [0, 0.2, 0.4, 0.6, 0.8]),
        ([0.5, 1.3, 4], 0.2, [0.6, 0.8, 1.0, 1.2]),
        ([0, 2, 4], 0.5, [0, 0.5, 1, 1.5, 2]),
        ([1234.5, 1234.5004, 2], 0.0002, [1234.5, 1234.5002, 1234.5004]),
        ([0, 1e-6, 3], 5e-7, [0, 5e-7, 1e-6]),
    ):
        found = plain_page.evaluate(CALL, ["figures.mjs", "axisMarks", *given])
        assert found["apart"] == pytest.approx(apart)
        assert found["marks"] == pytest.approx(marks, abs=apart / 1000)


def test_only_a_newer_state_of_the_same_server_is_taken(plain_page: Page) -> None:
    heard = plain_page.evaluate(HEARD, [["a", 5], ["a", 4], ["a", 6], ["b", 1], ["b", 2]])
    assert heard == [["a", 5], ["a", 5], ["a", 6], ["b", 1], ["b", 2]]


def test_numbers_read_as_people_write_them(plain_page: Page) -> None:
    for name, values, texts in (
        ("seconds", [0, 41e-6, 0.00041, 0.0123, 0.099999], ["0 s", "41 µs", "0.41 ms", "12 ms", "100 ms"]),
        ("seconds", [0.41, 12.34, 125, None], ["0.41 s", "12.3 s", "2 min 5 s", "–"]),
        ("seconds", [59.7, 60, 119.7], ["59.7 s", "1 min 0 s", "2 min 0 s"]),
        ("bytes", [0, 640, 41_234, 512_000_000, 23.6e9, None], ["0 B", "640 B", "41 kB", "512 MB", "23.6 GB", "–"]),
        ("percent", [0.004, 0.03, None], ["0.4 %", "3 %", "–"]),
        ("times", [1.861, None], ["1.86×", "–"]),
        ("median", [[4, 1, 2, 3], [3, 1, 2]], [2.5, 2]),
    ):
        assert [plain_page.evaluate(CALL, ["figures.mjs", name, value]) for value in values] == texts


def test_a_pack_is_known_by_its_whole_folder(plain_page: Page) -> None:
    for module, folder in (
        ("custom_nodes.parallel-dit", "parallel-dit"),
        ("custom_nodes.parallel-dit-0.2.0", "parallel-dit-0.2.0"),
        ("comfy_extras.nodes_flux", ""),
    ):
        node = {"constructor": {"nodeData": {"python_module": module}}}
        assert plain_page.evaluate(CALL, ["workflow.mjs", "packOf", node]) == folder
