"""Draws reports as one PNG: speed-up by plan, each rank's time line, memory by rank. matplotlib only when it is asked.

Show Timing Report (`nodes/show_report.py`) puts it beside the JSON. A row of panels for each report. Owns what a panel
shows; what the numbers mean is the schema's.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 100
ROWS_AT_LEAST = 4  # fewer ranks leave room, or two would be drawn as two walls
WIDTH_INCHES, ROW_INCHES, RANK_INCHES, LOW_ROW_INCHES = 13.0, 3.2, 0.45, 1.5
INK, PALE = "#1f2937", "#6b7280"
COMPUTE, COMMUNICATION, IDLE, OTHER = "#2563eb", "#f59e0b", "#e5e7eb", "#9ca3af"
ALLOCATED, RESERVED, RESIDENT = "#0f766e", "#99f6e4", "#64748b"
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "text.parse_math": False,  # a file may have dollars in its name
}
Panel: TypeAlias = Callable[["Axes"], None]


class NoChartError(ValueError):
    """There is nothing to draw with, or nothing to draw; the text says which and what to do."""


def draw(reports: Sequence[Mapping], path: str | Path) -> None:
    """Write a PNG of the reports to `path`. Raises `NoChartError` without matplotlib or without anything measured."""
    rc_context, figure_class, canvas_class = _matplotlib()
    rows = [(report, found) for report in reports if (found := list(panels(report)))]
    if not rows:
        raise NoChartError("0 of the reports hold anything to draw; connect a report of a sampler or a benchmark")
    heights = [_height(report) for report, _ in rows]
    with rc_context(STYLE):
        figure = figure_class(
            figsize=(WIDTH_INCHES, sum(heights) + 0.5), dpi=DPI, layout="constrained", facecolor="white"
        )
        canvas = canvas_class(figure)
        parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)
        for part, (report, found) in zip(parts[:, 0], rows, strict=True):
            part.suptitle(_headline(report), x=0.01, ha="left", fontsize=10.5, color=PALE)
            widths = [2.2 if name == "timeline" else 1.0 for name, _ in found]
            grid = part.subplots(1, len(found), squeeze=False, width_ratios=widths)
            for axes, (_, panel) in zip(grid[0], found, strict=True):
                panel(axes)
        canvas.print_png(str(path))


def _matplotlib() -> tuple[Any, Any, Any]:
    """What is needed of matplotlib; nothing that keeps figures alive or opens windows."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NoChartError(
            f"{error.name} is not installed, so there is no chart; pip install matplotlib, or ask for none"
        ) from error
    return rc_context, Figure, FigureCanvasAgg


def _height(report: Mapping) -> float:
    """Inches of a row: ranks and cases each need a line that can be read."""
    lines = max(len(_ranks_of(report)), len(report.get("contenders", [])))
    return LOW_ROW_INCHES if report["kind"] == "vae" else ROW_INCHES + RANK_INCHES * max(0, lines - 4)


def panels(report: Mapping) -> Iterator[tuple[str, Panel]]:
    """What there is to draw of a report, by name: only what was measured."""
    ranks = _ranks_of(report)
    if report.get("contenders"):
        yield "speedup", lambda axes: _draw_cases(axes, report)
    if any(rank.get("busy_s") and rank.get("begin_s") for rank in ranks):  # a run may have no step
        yield "timeline", lambda axes: _draw_timeline(axes, ranks, report)
    elif report.get("timings", {}).get("step_s"):
        yield "timeline", lambda axes: _draw_steps(axes, report["timings"]["step_s"])
    if any("memory" in rank for rank in ranks):
        yield "memory", lambda axes: _draw_memory(axes, ranks)
    if report["kind"] == "vae":
        yield "vae", lambda axes: _draw_vae(axes, report["vae"])


def _ranks_of(report: Mapping) -> Sequence[Mapping]:
    """The ranks to draw: those of a run, or of the case that was fastest."""
    if report.get("ranks"):
        return report["ranks"]
    best = _fastest(report)
    return best["ranks"] if best else []


def _fastest(report: Mapping) -> Mapping:
    """The fastest case with ranks; {} without one."""
    cases = [each for each in report.get("contenders", []) if each["kind"] == "plan" and each.get("ranks")]
    return min(cases, key=lambda each: each["median_s"], default={})


def _headline(report: Mapping) -> str:
    """What was run on what, in one line."""
    sizes, words = report.get("sizes", {}), []
    if "width" in sizes and "height" in sizes:
        frames = f", {sizes['frames']} latent frames" if "frames" in sizes else ""
        words.append(f"{sizes['width']} x {sizes['height']} px{frames}")
    if "image_tokens" in sizes:
        words.append(f"{sizes['image_tokens']} + {sizes.get('text_tokens', 0)} tokens")
    if "plan" in report:
        words.append(f"plan {report['plan']['name']}")
    if "model" in report:
        words.append(f"{report['model']['file']}, {report['model']['dtype']}")
    devices = report["devices"][: report["plan"]["ranks"]] if "plan" in report else report["devices"]  # others sleep
    models = {device.get("model", device["kind"]) for device in devices}
    words.append(f"{len(devices)} x {' and '.join(sorted(models))}")
    words.append(f"torch {report['versions']['torch']}")
    cached = "FROM THE CACHE, measured earlier: " if report["from_cache"] else ""
    return f"{cached}{report['kind']}:  " + "  |  ".join(words)


def _draw_cases(axes: "Axes", report: Mapping) -> None:
    """How many times as fast as one rank, without one as the first, with the middle half of the runs.

    In a report of an earlier version the blocks alone stand next to it.
    """
    cases = list(reversed(report["contenders"]))
    base = next((each for each in cases if each["kind"] == "one_rank"), cases[-1])
    for place, each in enumerate(cases):
        value = base["median_s"] / each["median_s"]
        axes.barh(place, value, 0.56, color=COMPUTE if each["kind"] == "plan" else OTHER)
        spread = value * each.get("spread_s", 0.0) / each["median_s"] / 2
        axes.errorbar(value, place, xerr=spread, color=INK, capsize=3, linewidth=1.2)
        if "block_speedup" in each:
            axes.plot(each["block_speedup"], place, "D", color=COMMUNICATION, markersize=7, markeredgecolor="white")
        _write(axes, f"{value:.2f}x", max(value + spread, each.get("block_speedup", 0.0)), place, color=INK)
    axes.axvline(1, color=PALE, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(cases)), [f"{each['name']}\n{each['median_s']:.3g} s" for each in cases])
    if any("block_speedup" in each for each in cases):
        axes.plot([], [], "D", color=COMMUNICATION, label="blocks alone")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.margins(x=0.2)
    axes.set_title(f"Speed-up over {base['name']}")
    axes.tick_params(axis="y", length=0)


def _draw_timeline(axes: "Axes", ranks: Sequence[Mapping], report: Mapping) -> None:
    """A batch group a rank: of each step what it computed, then what it waited in collectives; what is left white is
    idle."""
    present = [rank for rank in ranks if rank.get("begin_s")]
    for place, rank in enumerate(present):
        waits = rank.get("communication_s", [0.0] * len(rank["begin_s"]))
        spans = list(zip(rank["begin_s"], rank["busy_s"], waits, strict=True))
        whole = max(rank["end_s"])
        axes.broken_barh([(0, whole)], (place - 0.3, 0.6), color=IDLE, linewidth=0)
        axes.broken_barh([(b, busy - wait) for b, busy, wait in spans], (place - 0.3, 0.6), color=COMPUTE, linewidth=0)
        axes.broken_barh(
            [(b + busy - wait, wait) for b, busy, wait in spans], (place - 0.3, 0.6), color=COMMUNICATION, linewidth=0
        )
    for begin in present[0]["begin_s"]:
        axes.axvline(begin, color="white", linewidth=1)
    axes.set_yticks(range(len(present)), [f"rank {rank['rank']}\n{rank['device']}" for rank in present])
    axes.set_ylim(max(len(present), ROWS_AT_LEAST) - 0.5, -0.5)
    axes.set_xlim(left=0)
    for color, label in ((COMPUTE, "compute"), (COMMUNICATION, "communication"), (IDLE, "idle")):
        axes.plot([], [], "s", color=color, label=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    unit = "request" if report.get("timings", {}).get("per") == "request" else "step"
    best = _fastest(report)
    axes.set_title(f"Seconds of each rank, by {unit}{' of ' + best['name'] if best else ''}")
    axes.tick_params(axis="y", length=0)


def _draw_steps(axes: "Axes", step_s: Sequence[float]) -> None:
    """Steps of a MODEL that has no ranks."""
    axes.bar(range(1, len(step_s) + 1), step_s, color=COMPUTE)
    axes.axhline(statistics.median(step_s), color=COMMUNICATION, linewidth=1.5, label="median")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.set_title("Seconds by step")


def _draw_memory(axes: "Axes", ranks: Sequence[Mapping]) -> None:
    """What each rank holds, in GB: on its device, and of the host."""
    kinds = [("allocated_bytes", ALLOCATED, "allocated"), ("reserved_bytes", RESERVED, "reserved")]
    kinds.append(("resident_bytes", RESIDENT, "resident, host"))
    present = [rank for rank in ranks if "memory" in rank]
    shown = [kind for kind in kinds if any(kind[0] in rank["memory"] for rank in present)]
    height = 0.66 / len(shown)
    for number, (name, color, label) in enumerate(shown):
        for place, rank in enumerate(present):
            if name in rank["memory"]:
                value = rank["memory"][name] / 1e9
                middle = place + (number - (len(shown) - 1) / 2) * height
                axes.barh(middle, value, height * 0.92, color=color)
                _write(axes, f"{value:.3g}", value, middle, color=INK, fontsize=8.5)
        axes.plot([], [], "s", color=color, label=label)
    axes.set_yticks(range(len(present)), [f"rank {rank['rank']}" for rank in present])
    axes.set_ylim(max(len(present), ROWS_AT_LEAST) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(shown))
    axes.set_title("Memory by rank, GB")
    axes.tick_params(axis="y", length=0)


def _draw_vae(axes: "Axes", vae: Mapping) -> None:
    """The decode alone."""
    axes.barh([0], [vae["decode_s"]], 0.4, color=COMPUTE)
    _write(axes, f"{vae['decode_s']:.3g} s", 0, 0, color="white")
    axes.set_yticks([0], [vae["device"]])
    axes.set_ylim(-0.5, 0.5)
    axes.set_title("VAE decode, seconds")
    axes.tick_params(axis="y", length=0)


def _write(axes: "Axes", text: str, x: float, y: float, *, color: str, fontsize: float = 10.5) -> None:
    """Words a little to the right of a point of the data."""
    axes.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", va="center_baseline", color=color, fontsize=fontsize
    )
