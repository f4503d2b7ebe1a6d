"""A report for people: the chart's panels and the lines of text are of what was measured, and of nothing else."""

import sys
from pathlib import Path

import pytest
from made_replies import step_reply
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.report.build import Span, case, compare, new_report, plan_part, rank_parts, span_timings
from parallel_runtime.report.chart import NoChartError, _height, draw, panels
from parallel_runtime.report.text import describe
from parallel_runtime.wire.replies import Memory

DEVICES = parse_devices("cpu:2").devices
COMPUTE, COMMUNICATION, IDLE = "#2563eb", "#f59e0b", "#e5e7eb"


def ranks() -> list[dict]:
    """Two ranks in three steps of a second."""
    spans = []
    for step in range(3):
        memory, regions = Memory(resident_bytes=2 * 10**9), {"communication_s": 0.2}
        rank = step_reply(memory=memory, began_s=step + 0.1, step_s=0.8, regions=regions)
        spans.append(Span(wall_s=1.0, requests=[[rank, rank]]))
    return rank_parts(spans, DEVICES, began_s=0.0)


def denoise() -> dict:
    timings = {"denoise_s": 3.0, "step_s": [1.0] * 3, "first_step_s": 1.0, **span_timings(ranks())}
    plan = plan_part(ParallelPlan(ring=2))
    return new_report(
        "denoise",
        devices=DEVICES,
        model={"file": "no $formula_$ at all.safetensors", "dtype": "float32"},
        plan=plan,
        sampling={"steps": 3},
        timings=timings,
        ranks=ranks(),
    )


def benchmark() -> dict:
    rows = [
        case("one rank", "one_rank", "parallel-dit", [4.0, 4.2, 3.9], blocks_median_s=3.6),
        case("diffusers, 2 threads", "one_process", "diffusers", [2.2, 2.4, 2.1], threads=2),
        case(
            "uly2", "plan", "parallel-dit", [2.5, 2.0, 1.9], threads=2, blocks_median_s=1.5, error=3e-7, ranks=ranks()
        ),
    ]
    compare(rows)
    return new_report(
        "benchmark", devices=DEVICES, contenders=rows, warmup=5, runs=3, sizes={"image_tokens": 4, "text_tokens": 2}
    )


def test_a_benchmark_names_what_the_run_loses_of_what_the_blocks_gain() -> None:
    row = benchmark()["contenders"][2]
    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_over_one_process"] == pytest.approx(1.1)
    assert row["block_speedup"] == pytest.approx(2.4)
    assert row["end_to_end_over_block"] == pytest.approx(2.0 / 2.4)
    text = describe(benchmark())
    assert "2.00x one rank, 1.10x one process, blocks alone 2.40x, kept 0.83, error 3.0e-07" in text


def test_speed_ups_are_over_one_rank_or_over_the_case_that_is_named() -> None:
    report = benchmark()
    assert speed_ups(report) == ("Speed-up over one rank", ["2.00x", "1.82x", "1.00x"])
    del report["contenders"][0]  # as of a MODEL of sharded weights, which has no one rank
    assert speed_ups(report) == ("Speed-up over diffusers, 2 threads", ["1.10x", "1.00x"])


def speed_ups(report: dict) -> tuple[str, list[str]]:
    """The title of a benchmark's bars, and what is written at each from the lowest on."""
    axes = Figure().subplots()
    dict(panels(report))["speedup"](axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["blocks alone"]
    return axes.get_title(), [text.get_text() for text in axes.texts]


def test_workers_are_held_against_the_process_of_as_many_threads() -> None:
    rows = [
        case("diffusers, 1 thread", "one_process", "diffusers", [4.0], threads=1),
        case("diffusers, 2 threads", "one_process", "diffusers", [3.0], threads=2),
        case("uly2", "plan", "parallel-dit", [1.5], threads=2),
    ]
    compare(rows)
    assert rows[2]["speedup_over_one_process"] == pytest.approx(2.0)


def test_a_timeline_has_a_row_for_each_rank_with_the_area_of_its_seconds() -> None:
    """Of what is drawn: a rectangle's place and width are seconds. Rank 1 waits twice as long as rank 0."""
    spans = []
    for step in range(3):
        regions = [{"communication_s": waited} for waited in (0.2, 0.4)]
        told = [step_reply(began_s=step + 0.1, step_s=0.8, regions=each) for each in regions]
        spans.append(Span(wall_s=1.0, requests=[told]))
    parts = rank_parts(spans, DEVICES, began_s=0.0)
    report = denoise() | {"ranks": parts}
    axes = Figure().subplots()
    dict(panels(report))["timeline"](axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0\ncpu:0", "rank 1\ncpu:1"]
    drawn: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            box = path.get_extents()
            row = round((box.y0 + box.y1) / 2)
            drawn.setdefault((row, to_hex(bars.get_facecolor()[0])), []).append((box.x0, box.width))
    for row, waited in enumerate((0.2, 0.4)):
        begun = [step + 0.1 for step in range(3)]
        assert drawn[row, COMPUTE] == [pytest.approx((begin, 0.8 - waited)) for begin in begun]
        assert drawn[row, COMMUNICATION] == [pytest.approx((begin + 0.8 - waited, waited)) for begin in begun]
        assert drawn[row, IDLE] == [pytest.approx((0.0, 2.9))], "what is left of it is idle"
    assert len(drawn) == 6


@pytest.mark.parametrize(
    ("kind", "ranks", "cases", "inches"),
    [("denoise", 4, 0, 3.2), ("denoise", 6, 0, 4.1), ("benchmark", 2, 5, 3.65), ("vae", 8, 0, 1.5)],
)
def test_a_row_is_as_high_as_its_ranks_or_cases_need(kind: str, ranks: int, cases: int, inches: float) -> None:
    report = {"kind": kind, "ranks": [{}] * ranks, "contenders": [{"kind": "one_rank"}] * cases}
    assert _height(report) == pytest.approx(inches)


def test_a_report_with_nothing_to_draw_is_refused_in_one_line(tmp_path: Path) -> None:
    empty = new_report("denoise", devices=DEVICES, sampling={"steps": 1}, timings={"denoise_s": 1.0})
    with pytest.raises(NoChartError, match="0 of the reports"):
        draw([empty], tmp_path / "none.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_chart_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(NoChartError, match="matplotlib is not installed, so there is no chart; pip install matplotlib"):
        draw([denoise()], tmp_path / "none.png")


def test_the_text_says_when_it_is_old_and_where_the_loop_ran() -> None:
    report = denoise() | {"from_cache": True, "loop": {"kind": "host", "reason": "a ControlNet"}}
    text = describe(report)
    assert text.startswith("served from ComfyUI's cache: nothing ran in this prompt, measured 2")
    assert "loop: host: a ControlNet" in text
    assert "rank 1 cpu:1: compute 600 ms, communication 200 ms, idle 200 ms, 2.00 GB resident" in text
    assert "loop" not in describe(denoise())
