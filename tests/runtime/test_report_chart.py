"""A report for people: the chart's panels and the lines of text are of what was measured, and of nothing else."""

import sys
from pathlib import Path

import pytest
import torch
from made_replies import step_reply
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.report.build import Span, case, compare, new_report, plan_part, rank_parts, span_timings
from parallel_runtime.report.chart import NoChartError, _headline, _height, draw, panels
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
        case("one rank", "one_rank", "parallel-dit", [4.0, 4.2, 3.9]),
        case("diffusers, 2 threads", "one_process", "diffusers", [2.2, 2.4, 2.1], threads=2),
        case("uly2", "plan", "parallel-dit", [2.5, 2.0, 1.9], threads=2, error=3e-7, ranks=ranks()),
    ]
    compare(rows)
    return new_report(
        "benchmark", devices=DEVICES, contenders=rows, warmup=5, runs=3, sizes={"image_tokens": 4, "text_tokens": 2}
    )


def test_speed_ups_are_over_one_rank_or_over_the_case_that_is_named() -> None:
    report = benchmark()
    told = [drawn(report, "speedup")[1]]
    del report["contenders"][0]  # as of a MODEL of sharded weights, which has no one rank
    told.append(drawn(report, "speedup")[1])
    assert [(each["title"], [text for text, _ in each["words"]], each["legend"]) for each in told] == [
        ("Speed-up over one rank", ["2.00x", "1.82x", "1.00x"], []),
        ("Speed-up over diffusers, 2 threads", ["1.10x", "1.00x"], []),
    ]


def test_a_plan_is_held_against_one_rank_and_against_the_process_of_as_many_threads() -> None:
    rows = [
        case("one rank", "one_rank", "parallel-dit", [4.0, 4.2, 3.9]),
        case("diffusers, 1 thread", "one_process", "diffusers", [3.0], threads=1),
        case("diffusers, 2 threads", "one_process", "diffusers", [2.2, 2.4, 2.1], threads=2),
        case("uly2", "plan", "parallel-dit", [2.5, 2.0, 1.9], threads=2),
    ]
    compare(rows)
    assert rows[3]["speedup"] == pytest.approx(2.0)
    assert rows[3]["speedup_over_one_process"] == pytest.approx(1.1)


def test_a_timeline_has_a_row_for_each_rank_with_the_area_of_its_seconds() -> None:
    """Of what is drawn: a rectangle's place and width are seconds. Rank 1 waits twice as long as rank 0."""
    spans = []
    for step in range(3):
        regions = [{"communication_s": waited} for waited in (0.2, 0.4)]
        replies = [step_reply(began_s=step + 0.1, step_s=0.8, regions=each) for each in regions]
        spans.append(Span(wall_s=1.0, requests=[replies]))
    parts = rank_parts(spans, DEVICES, began_s=0.0)
    report = denoise() | {"ranks": parts}
    axes, told = drawn(report, "timeline")
    assert told["labels"] == ["rank 0\ncpu:0", "rank 1\ncpu:1"]
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > 2.9, "what is idle before the first step is seen"
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            box = path.get_extents()
            row = round((box.y0 + box.y1) / 2)
            found.setdefault((row, to_hex(bars.get_facecolor()[0])), []).append((box.x0, box.width))
    for row, waited in enumerate((0.2, 0.4)):
        begun = [step + 0.1 for step in range(3)]
        assert found[row, COMPUTE] == [pytest.approx((begin, 0.8 - waited)) for begin in begun]
        assert found[row, COMMUNICATION] == [pytest.approx((begin + 0.8 - waited, waited)) for begin in begun]
        assert found[row, IDLE] == [pytest.approx((0.0, 2.9))], "what is left of it is idle"
    assert len(found) == 6


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


def shown(axes: Axes) -> dict:
    """What a panel of bars shows, in the order drawn: (left, middle, width, height), words, labels, limits."""
    boxes = [bar.get_bbox() for bar in axes.patches]
    legend = axes.get_legend()
    return {
        "title": axes.get_title(),
        "bars": [pytest.approx((box.x0, (box.y0 + box.y1) / 2, box.width, box.height)) for box in boxes],
        "colours": [to_hex(bar.get_facecolor()) for bar in axes.patches],
        "words": [(text.get_text(), pytest.approx(text.xy)) for text in axes.texts],
        "labels": [label.get_text() for label in axes.get_yticklabels()],
        "legend": [text.get_text() for text in legend.get_texts()] if legend else [],
        "limits": axes.get_ylim(),
    }


def drawn(report: dict, name: str) -> tuple[Axes, dict]:
    axes = Figure().subplots()
    dict(panels(report))[name](axes)
    return axes, shown(axes)


def test_memory_has_a_bar_a_rank_and_kind_in_gb() -> None:
    held = [{"allocated_bytes": 3 * 10**9, "resident_bytes": 10**9}, {"resident_bytes": 2 * 10**9}]
    report = {"kind": "denoise", "ranks": [{"rank": rank, "memory": each} for rank, each in enumerate(held)]}
    assert drawn(report, "memory")[1] == {
        "title": "Memory by rank, GB",
        "bars": [(0, -0.165, 3, 0.33 * 0.92), (0, 0.165, 1, 0.33 * 0.92), (0, 1.165, 2, 0.33 * 0.92)],
        "colours": ["#0f766e", "#64748b", "#64748b"],
        "words": [("3", (3, -0.165)), ("1", (1, 0.165)), ("2", (2, 1.165))],
        "labels": ["rank 0", "rank 1"],
        "legend": ["allocated", "resident, host"],
        "limits": (3.5, -0.5),
    }


def test_a_decode_is_one_bar_and_steps_without_ranks_are_bars_with_their_median() -> None:
    vae = {"kind": "vae", "vae": {"decode_s": 0.5, "device": "cpu:0"}}
    assert drawn(vae, "vae")[1] == {
        **{"title": "VAE decode, seconds", "bars": [(0, 0, 0.5, 0.4)], "colours": [COMPUTE], "legend": []},
        **{"words": [("0.5 s", (0, 0))], "labels": ["cpu:0"], "limits": (-0.5, 0.5)},
    }
    axes, told = drawn({"kind": "denoise", "timings": {"step_s": [3.0, 1.0, 1.5]}}, "timeline")
    assert (told["title"], told["legend"]) == ("Seconds by step", ["median"])
    assert told["bars"] == [(place + 0.6, each / 2, 0.8, each) for place, each in enumerate((3.0, 1.0, 1.5))]
    assert [list(each.get_ydata()) for each in axes.lines] == [[1.5, 1.5]]


def test_speed_ups_have_their_spread_and_that_of_the_blocks() -> None:
    rows = [
        {"name": "one", "kind": "one_rank", "median_s": 4.0},
        {"name": "uly2", "kind": "plan", "median_s": 2.0, "spread_s": 0.4, "block_speedup": 3.0},
    ]
    axes, told = drawn({"kind": "benchmark", "contenders": rows}, "speedup")
    assert told == {
        **{"title": "Speed-up over one", "bars": [(0, 0, 2, 0.56), (0, 1, 1, 0.56)], "colours": [COMPUTE, "#9ca3af"]},
        **{"words": [("2.00x", (3, 0)), ("1.00x", (1, 1))], "labels": ["uly2\n2 s", "one\n4 s"]},
        **{"legend": ["blocks alone"], "limits": axes.get_ylim()},
    }
    spread = axes.collections[0].get_paths()[0].vertices
    assert spread.tolist() == [pytest.approx([1.8, 0]), pytest.approx([2.2, 0])]
    diamonds = [(list(each.get_xdata()), list(each.get_ydata())) for each in axes.lines if each.get_marker() == "D"]
    assert diamonds == [([3.0], [0]), ([], [])]
    assert [list(each.get_xdata()) for each in axes.lines if each.get_linestyle() == ":"] == [[1, 1]]
    assert not drawn({"kind": "benchmark", "contenders": rows[:1]}, "speedup")[1]["legend"]
    _, told = drawn({"kind": "benchmark", "contenders": [rows[0], rows[1] | {"block_speedup": 1.0}]}, "speedup")
    assert told["words"][0] == ("2.00x", (pytest.approx(2.2), 0)), "beyond the spread"


def test_a_benchmark_shows_the_ranks_of_its_fastest_plan_and_a_report_what_it_measured() -> None:
    rows = [
        *({"name": "one", "kind": "one_rank", "median_s": 0.1, "ranks": ranks()[:1]},),
        *(
            {"name": name, "kind": "plan", "median_s": took}
            for name, took in (("ring2", 1.0), ("uly2", 2.0), ("cfg2", 3.0))
        ),
    ]
    report = {"kind": "benchmark", "contenders": rows}
    assert list(dict(panels(report))) == ["speedup"]
    for row in rows[2:]:
        row["ranks"] = ranks()
    assert list(dict(panels(report))) == ["speedup", "timeline", "memory"]
    assert drawn(report, "timeline")[1]["title"] == "Seconds of each rank, by step of uly2"
    untimed = {"kind": "denoise", "ranks": [{"rank": 0, "busy_s": [1.0]}], "timings": {"step_s": [1.0]}}
    assert drawn(untimed, "timeline")[1]["title"] == "Seconds by step" and list(dict(panels(untimed))) == ["timeline"]
    for row in rows[2:]:  # as of denoise=0, which samples no step
        row["ranks"] = [{"rank": 0, "device": "cpu:0", "busy_s": [], "begin_s": [], "end_s": []}]
    assert list(dict(panels(report))) == ["speedup"]


def test_a_headline_says_what_ran_on_what() -> None:
    report = denoise()
    report["devices"] += report["devices"]  # of which the plan takes two
    assert _headline(report) == (
        f"denoise:  plan ring2  |  no $formula_$ at all.safetensors, float32  |  2 x "
        f"{denoise()['devices'][0]['model']}  |  torch {torch.__version__}"
    )
    devices = [{"kind": "cuda", "model": name} for name in ("B", "A", "B")] + [{"kind": "cpu"}]
    report = {"kind": "vae", "from_cache": True, "devices": devices, "versions": {"torch": "2"}}
    report["sizes"] = {"width": 64, "height": 32, "frames": 5, "image_tokens": 9, "text_tokens": 7}
    told = (
        "FROM THE CACHE, measured earlier: vae:  64 x 32 px, 5 latent frames  |  9 + 7 tokens  |  4 x A and B and cpu"
    )
    assert _headline(report) == f"{told}  |  torch 2"


def test_a_chart_has_a_row_a_report(tmp_path: Path) -> None:
    vae = new_report("vae", devices=DEVICES, vae={"decode_s": 0.5, "device": "cpu:0"})
    empty = new_report("denoise", devices=DEVICES, sampling={"steps": 1}, timings={"denoise_s": 1.0})
    draw([vae, empty, vae], tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as image:
        assert image.size == (1300, round(100 * (1.5 + 1.5 + 0.5)))
        assert len(image.getcolors(image.size[0] * image.size[1])) > 20


FULL = {
    **{"from_cache": False, "kind": "denoise", "warnings": ["hot"]},
    "devices": [{"name": f"cpu:{number}"} for number in range(3)],  # of which the plan leaves one out
    **{"sizes": {"width": 64, "height": 32, "frames": 5, "batch": 2}, "model": {"file": "a", "dtype": "float32"}},
    **{"plan": {"name": "uly2", "ranks": 2, "chosen_for": "a picture"}, "loop": {"kind": "host", "reason": "so"}},
    "proof": {"verdict": "proven", "found": "x", "error": 1e-7, "tolerance": 1e-5},
    "timings": {
        **{"load_s": 2.0, "prepare_s": 0.5, "denoise_s": 3.0, "step_s": [1.0, 0.5, 1.5], "first_step_s": 1.0},
        **{"rank0_s": [0.5, 0.6, 0.7], "slowest_rank_s": [1.0, 2.0, 3.0], "skew_s": [0.1, 0.2]},
    },
    "step_caches": [{"name": "Easy", "threshold": 0.2, "skipped": 1, "of": 4, "counts": "steps"}],
    "ranks": [
        {
            **{"rank": 0, "device": "cuda:0", "load_s": 1.5, "busy_s": [1.0], "compute_s": [0.5, 0.25], "idle_s": []},
            **{"communication_s": [0.125], "regions": {"hand_over_s": [0.002], "gather_s": [0.0]}, "utilisation": 0.57},
            "memory": {"allocated_bytes": 2e9, "resident_bytes": 5},
        },
        {"rank": 1, "device": "cuda:1", "load_s": 1.0},
    ],
}


def test_the_text_of_a_run_has_a_line_for_each_thing_that_is_known() -> None:
    assert describe(FULL).splitlines() == [
        "warning: hot",
        "64 x 32 px, 5 latent frames, batch 2, plan uly2 on cpu:0, cpu:1, a in float32",
        "plan chosen for a picture",
        "found, proven with this ComfyUI: error 1.0e-07, at most 1e-05",
        "load 2.00 s, weights 1.50 s on the slowest rank",
        "prepare 500 ms in the workers, before the first step",
        "denoise 3.00 s, 3 steps, median 1.00 s a step, first 1.00 s",
        "loop: host: so",
        "step cache Easy at 0.2: 1 of 4 steps skipped",
        "rank 0 600 ms, slowest rank 2.00 s a step, skew 200 ms at most",
        "  rank 0 cuda:0: compute 375 ms (hand-over 2 ms of it), communication 125 ms, 2.00 GB allocated, "
        "device 57% busy",
    ]
    little = {"from_cache": False, "kind": "denoise", "timings": {"denoise_s": 0.5, "load_s": 1.0}}
    little |= {"loop": {"kind": "resident"}, "proof": {"verdict": "not proven"}, "sizes": {"width": 64, "height": 32}}
    assert describe(little).splitlines() == ["64 x 32 px", "load 1.00 s", "denoise 500 ms", "loop: resident"]
    vae = {"from_cache": False, "kind": "vae", "vae": {"decode_s": 1.0, "device": "cpu", "tiles": 4}}
    assert describe(vae) == "VAE decode 1.00 s on cpu, 4 tiles, counted nowhere else"


def test_the_text_of_a_benchmark_has_a_line_a_case() -> None:
    rows = [
        {"name": "one rank", "kind": "one_rank", "median_s": 4.0, "spread_s": 0.5},
        {
            **{"name": "uly2", "kind": "plan", "median_s": 2.0, "speedup": 2.0, "speedup_over_one_process": 1.5},
            **{"block_speedup": 2.5, "end_to_end_over_block": 0.8, "loop": {"kind": "host", "reason": "so"}},
            **{"compile_s": 3.0, "graphs": 5, "error": 1e-7, "stale_difference": 0.1},
        },
        {"name": "stock", "kind": "one_process", "median_s": 1.0, "speedup": 4.0},
    ]
    report = {"from_cache": False, "kind": "benchmark", "contenders": rows, "runs": 3, "warmup": 1}
    report["sizes"] = {"image_tokens": 4096, "text_tokens": 7}
    assert describe(report).splitlines() == [
        "4096 image + 7 text tokens, median of 3 after 1 warm-up, interleaved",
        "  one rank  4.00 s +- 250 ms",
        "  uly2      2.00 s, 2.00x one rank, 1.50x one process, blocks alone 2.50x, kept 0.80, host loop (so), "
        "5 graphs made in 3.00 s, error 1.0e-07, 1.0e-01 from one rank by keys a step old",
        "  stock     1.00 s, 4.00x one rank",
        "uly2 is 2.00x faster than one device",
    ]
    del rows[0], rows[0]["speedup"]  # as of a MODEL of sharded weights
    assert describe(report).splitlines()[-1] == "uly2 is 1.50x faster than ComfyUI in one process"
    del rows[1], rows[0]["speedup_over_one_process"]
    assert describe(report).splitlines()[-1].startswith("one device was not timed")


def test_the_text_says_when_it_is_old_and_where_the_loop_ran() -> None:
    report = denoise() | {"from_cache": True, "loop": {"kind": "host", "reason": "a ControlNet"}}
    text = describe(report)
    assert text.startswith("served from ComfyUI's cache: nothing ran in this prompt, measured 2")
    assert "loop: host: a ControlNet" in text
    assert "rank 1 cpu:1: compute 600 ms, communication 200 ms, idle 200 ms, 2.00 GB resident" in text
    assert "loop" not in describe(denoise())
