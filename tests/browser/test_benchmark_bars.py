"""The benchmark's bars as they are drawn: one a case, as long as it was quick, made up and run for real."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from .drawn import bars_of, picture_of
from .made_up import ONE, MadeUp

ENDS_OF_TEXTS = """() => {
  const write = CanvasRenderingContext2D.prototype.fillText
  window.textEnds = []
  CanvasRenderingContext2D.prototype.fillText = function (text, x, ...all) {
    const end = x + this.measureText(text).width
    if (String(text).includes('×  ')) window.textEnds.push([text, end, this.canvas.clientWidth])
    return write.call(this, text, x, ...all)
  }
}"""


def expect_bars(timeline: Locator, cases: Sequence[Mapping[str, Any]]) -> None:
    """A bar for each case in that order, as long as it is quick: blue without a plan, else green, red below stock."""
    figure = timeline.locator("[data-chart=speedups]")
    expect(figure).to_be_visible()
    bars = bars_of(picture_of(figure.locator("canvas")))
    stock = min(each["median_s"] for each in cases if each["kind"] == "one_process")
    factors = [stock / each["median_s"] for each in cases]
    kinds = [each["kind"] for each in cases]
    colours = [
        "base" if kind != "plan" else "good" if f >= 1 else "bad" for kind, f in zip(kinds, factors, strict=True)
    ]
    assert [colour for colour, _ in bars] == colours
    longest = max(length for _, length in bars)
    # Of each bar, up to two pixels that an edge shares with what is around it do not count.
    off = [abs(length - longest * f / max(factors)) for (_, length), f in zip(bars, factors, strict=True)]
    assert max(off) <= 4, (bars, factors)


@pytest.mark.parametrize(
    "factors",
    [
        {"one rank": 1.0, "ComfyUI, 2 threads": 0.26, "uly2": 1.42, "ring2": 0.2},
        {"one rank": 1.0, "ComfyUI, 2 threads": 1 / 1.2, "uly2": 1.1, "ring2": 0.9},  # far from nought
    ],
    ids=["far apart", "near one another"],
)
def test_bars_are_as_long_as_their_cases_are_quick(made_up: MadeUp, factors: dict[str, float]) -> None:
    kinds = ("one_rank", "one_process", "plan", "plan")
    cases = [
        {"name": name, "kind": kind, "median_s": 1 / factor, "speedup": factor}
        for kind, (name, factor) in zip(kinds, factors.items(), strict=True)
    ]
    made_up.comfy.open_sidebar()  # leaves less room for the bars
    timeline = made_up.comfy.open_timeline()
    made_up.comfy.page.evaluate(ENDS_OF_TEXTS)
    report = {"schema": "parallel-dit/report/1", "kind": "benchmark", "contenders": cases}
    made_up.tell(reports=[made_up.report(1, report)])
    expect_bars(timeline, cases)
    cut = made_up.comfy.page.evaluate("window.textEnds.filter(([, end, width]) => end > width)")
    assert cut == [], "a bar's figures are cut"
    slowest = f"1.00×  {1 / factors['ComfyUI, 2 threads']:.1f} s"
    assert slowest in {text for text, *_ in made_up.comfy.page.evaluate("window.textEnds")}


def test_cases_of_plans_that_read_alike_have_a_button_each_that_sets_patches_and_warm_up(made_up: MadeUp) -> None:
    """However often they are told."""
    plan = {"name": "pipe2-ring1-uly1", "ranks": 2, "degrees": ONE | {"pipefusion": 2}, "weights": "replicated"}
    plan |= {"patches": 8, "warmup_steps": 3}
    names = ["pipefusion=2,patches=8", "pipefusion=2,patches=8,warmup_steps=3"]
    case = {"kind": "plan", "median_s": 1.0, "speedup": 1.0}
    cases = [{**case, "name": name, "plan": plan} for name in names]
    cases.append({"name": "one rank", "kind": "one_rank", "median_s": 1.0})
    made_up.comfy.load_example(mode="auto")
    timeline = made_up.comfy.open_timeline()
    report = {"schema": "parallel-dit/report/1", "kind": "benchmark", "contenders": cases}
    buttons = timeline.locator("[data-chart=speedups] button")
    for number in range(1, 5):
        made_up.tell(reports=[made_up.report(number, report)])
        expect(buttons).to_have_text([f"Use {name}" for name in names])
    buttons.first.click()
    values = made_up.comfy.values("SPConfig")
    asked = ("mode", "pipefusion", "ulysses", "patches", "warmup_steps")
    assert [values[name] for name in asked] == ["manual", 2, 1, 8, 3]
