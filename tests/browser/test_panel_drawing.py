"""What the panel draws and exports, from the pixels and from the file: modules alone, on a page of plain files."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page

from .made_up import uneven

TIME_WIDTH = 800  # pixels of the canvas for the time, so that the parts of these steps end between two of them
WIDTH = 86 + TIME_WIDTH + 8
ROW = 26 * 0.76  # pixels that a rank's row is high, of up to 16 ranks
# By line of pixels above the axis: how much there is of each colour, in pixels, one that an edge goes through counting
# for its part; `filled` is whether there is anything; `first`, where. Idle is drawn at 35 % of its colour.
DRAWN = """async ([report, width, span]) => {
  const { drawRows, rowsHeight } = await import('/extensions/parallel-dit/panel/timeline_rows.mjs')
  const { readReport } = await import('/extensions/parallel-dit/panel/report.mjs')
  const view = readReport(report)
  const canvas = document.createElement('canvas')
  canvas.style.cssText = `display:block;width:${width}px;height:${rowsHeight(view.ranks.length)}px`
  document.body.replaceChildren(canvas)
  drawRows(canvas, view.ranks, span ?? [0, view.end_s])
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
  const colours = [['compute', [0x4e, 0x79, 0xa7], 255], ['communication', [0xf2, 0x8e, 0x2b], 255],
    ['idle', [0x9a, 0xa0, 0xa6], 89]]
  const near = (at, rgb) => rgb.every((value, part) => Math.abs(data[at + part] - value) < 8)
  return Array.from({ length: canvas.height - 20 }, (_, y) => {
    const line = { compute: 0, communication: 0, idle: 0, filled: false, first: -1 }
    for (let x = 86; x < canvas.width; x++) {
      const at = 4 * (y * canvas.width + x)
      if (data[at + 3] > 60) {
        line.filled = true
        if (line.first < 0) line.first = x
      }
      for (const [name, rgb, alpha] of colours)
        if (data[at + 3] > 8 && near(at, rgb)) line[name] += data[at + 3] / alpha
    }
    return line }) }"""
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


def rows_of(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs of lines of pixels that have something of a rank, from the top."""
    rows: list[list[dict[str, Any]]] = []
    for before, line in pairwise([{"filled": False}, *lines]):
        if line["filled"]:
            if not before["filled"]:
                rows.append([])
            rows[-1].append(line)
    return rows


def shares_of(row: list[dict[str, Any]]) -> dict[str, float]:
    """How much of a rank's row each colour fills."""
    return {name: sum(line[name] for line in row) / (ROW * TIME_WIDTH) for name in ("compute", "communication", "idle")}


@pytest.mark.parametrize(
    ("numbers", "steps", "off"),
    [(1, 1, 0.02), (3, 4, 0.02), (3, 2000, 0.08)],
    ids=["one step", "several steps", "steps narrower than pixels"],
)
def test_every_rank_has_a_row_and_each_colour_the_area_of_its_seconds(
    plain_page: Page, numbers: int, steps: int, off: float
) -> None:
    """`off`: of a row's area. Lines of pixels that two colours share count for neither."""
    rows = rows_of(plain_page.evaluate(DRAWN, [uneven(numbers, steps), WIDTH, None]))
    assert len(rows) == numbers
    for number, row in enumerate(rows):
        compute = 0.2 + 0.3 * number / numbers
        expected = {"compute": compute, "communication": 0.3, "idle": 0.7 - compute}
        assert shares_of(row) == pytest.approx(expected, abs=off), f"rank {number}"


def test_a_rank_without_times_leaves_its_row_empty(plain_page: Page) -> None:
    report = uneven(3, 4)
    report["ranks"][1] = {"rank": 1, "device": "cpu:1"}
    lines = plain_page.evaluate(DRAWN, [report, WIDTH, None])
    rows = rows_of(lines)
    assert len(rows) == 2
    filled = [number for number, line in enumerate(lines) if line["filled"]]
    assert max(b - a for a, b in pairwise(filled)) > len(rows[0]), "the third rank stands in the second one's place"


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
