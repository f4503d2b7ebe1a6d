"""The benchmark's bars as they are drawn: one a case, as high as it was quick, made up and run for real."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from playwright.sync_api import Locator, expect

from .comfy_page import ComfyPage
from .conftest import Tabs
from .drawn import bars_of, picture_of
from .made_up import MadeUp


def expect_bars(timeline: Locator, factors: Mapping[str, float]) -> None:
    """A bar for each factor in that order, the first of which is 1: green where it gained, red where it lost."""
    figure = timeline.locator("[data-chart=speedups]")
    expect(figure).to_be_visible()
    bars = bars_of(picture_of(figure.locator("canvas")))
    assert [colour for colour, _ in bars] == ["good" if factor >= 1 else "bad" for factor in factors.values()]
    _, one = bars[0]
    expected = [factor * one for factor in factors.values()]
    # Rows that an edge of a bar shares with what is around it do not count: up to two pixels a bar, and of the first
    # one, which the others are measured by, as many times that as they are higher.
    off = [2 * max(1.0, factor) for factor in factors.values()]
    assert all(abs(height - e) <= o for (_, height), e, o in zip(bars, expected, off, strict=True)), (bars, factors)


def test_bars_are_as_high_as_their_cases_are_quick(made_up: MadeUp) -> None:
    factors, kinds = (
        {"one rank": 1.0, "stock": 0.62, "uly2": 1.86, "ring2": 1.4},
        ("one_rank", "one_process", "plan", "plan"),
    )
    cases = [
        {"name": name, "kind": kind, "median_s": 1 / factor, "speedup": factor}
        for kind, (name, factor) in zip(kinds, factors.items(), strict=True)
    ]
    timeline = made_up.comfy.open_timeline()
    report = {"schema": "parallel-dit/report/1", "kind": "benchmark", "contenders": cases}
    made_up.tell(reports=[made_up.report(1, report)])
    expect_bars(timeline, factors)


@pytest.mark.full
def test_the_bars_of_a_real_benchmark_are_its_speed_ups(tabs: Tabs) -> None:
    comfy: ComfyPage = tabs.get("classic")
    plans = "ulysses=2\nring=2"
    comfy.load_example("flux_benchmark", steps=1, warmup=1, runs=2, width=128, height=128, plans=plans)
    comfy.open_sidebar()
    comfy.run()
    report = comfy.newest_report("benchmark")
    factors = {row["name"]: row.get("speedup", 1.0) for row in report["contenders"]}
    assert list(factors)[0] == "one rank"
    assert list(factors)[-2:] == ["uly2", "ring2"]
    assert len(factors) == 4, "and stock ComfyUI"
    expect_bars(comfy.open_timeline(), factors)
    quickest = max(factors[name] for name in ("uly2", "ring2"))
    expect(comfy.page.get_by_test_id("pdit-result")).to_contain_text(f"{quickest:.2f}× one rank")
    comfy.shot("benchmark")
