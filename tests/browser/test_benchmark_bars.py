"""The benchmark example run for real, and its bars as they are drawn: one a contender, as high as it was quick."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from .comfy_page import ComfyPage
from .conftest import Tabs

GOOD, BAD = [0x59, 0xA1, 0x4F, 255], [0xE1, 0x57, 0x59, 255]
REPORT = """async () => {
  const { reports } = await (await app.api.fetchApi('/parallel_dit/state')).json()
  const number = reports.filter((entry) => entry.kind === 'benchmark').at(-1).number
  return (await app.api.fetchApi(`/parallel_dit/reports/${number}`)).json() }"""
BARS = """async (canvas) => {
  const { Chart } = await import('/extensions/parallel-dit/vendor/chart.mjs')
  // the figure is shown before the library that draws it has come
  for (let frame = 0; frame < 600 && !Chart.getChart(canvas); frame++) await new Promise(requestAnimationFrame)
  const chart = Chart.getChart(canvas)
  const scale = canvas.width / canvas.clientWidth
  const colour = (x, y) => [...canvas.getContext('2d').getImageData(x * scale, y * scale, 1, 1).data]
  return chart.getDatasetMeta(0).data.map((bar, index) => ({
    name: chart.data.labels[index],
    height: bar.base - bar.y,
    inside: colour(bar.x, (bar.base + bar.y) / 2),
    above: colour(bar.x, bar.y - 4) })) }"""


def test_the_bars_of_a_real_benchmark_are_its_speed_ups(tabs: Tabs) -> None:
    comfy: ComfyPage = tabs.get("classic")
    plans = "ulysses=2\nring=2"
    comfy.load_example("flux_benchmark", steps=1, warmup=1, runs=2, width=128, height=128, plans=plans)
    comfy.open_sidebar()
    comfy.run()
    report = comfy.page.evaluate(REPORT)
    factors = {row["name"]: row.get("speedup", 1.0) for row in report["contenders"]}
    assert list(factors)[0] == "one rank"
    assert list(factors)[-2:] == ["uly2", "ring2"]
    assert len(factors) == 4, "and stock ComfyUI"
    figure = comfy.open_timeline().locator("[data-chart=speedups]")
    expect(figure).to_be_visible()
    bars = figure.locator("canvas").evaluate(BARS)
    assert [bar["name"] for bar in bars] == list(factors)
    for bar in bars:
        height = factors[bar["name"]] * bars[0]["height"]
        assert bar["height"] == pytest.approx(height, abs=1.5)  # of some 60: bars begin and end on whole pixels
        assert bar["inside"] == (GOOD if factors[bar["name"]] >= 1 else BAD), bar["name"]
        assert bar["above"][:3] != bar["inside"][:3], bar["name"]
    quickest = max(factors[name] for name in ("uly2", "ring2"))
    expect(comfy.page.get_by_test_id("pdit-result")).to_contain_text(f"{quickest:.2f}× one rank")
    comfy.shot("benchmark")
