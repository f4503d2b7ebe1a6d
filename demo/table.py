"""The demo's closing table: our nodes' own measurements beside what a client sees of stock ComfyUI.

Owns: rows and wording. Does not own: the measuring (nodes/report.py) or the verdict (run.py). A figure nobody measured
is an empty cell, never a zero.
"""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .run import Run

MIB = 2**20
Row = tuple[str, str, str]


def print_table(parallel: Run, stock: Run) -> None:
    """Prints what was measured of both runs, a row a quantity."""
    denoise = parallel.report("ParallelSampler")
    rows: list[Row] = [("", f"parallel ({denoise['plan']['name']})", "stock ComfyUI")]
    rows.append(("end to end, loading included", f"{parallel.result.wall_s:.2f} s", f"{stock.result.wall_s:.2f} s"))
    rows += denoise_rows(denoise, stock)
    decode_s = parallel.report("TimedVAEDecode")["vae"]["decode_s"]
    rows.append(("VAE decode", f"{decode_s:.2f} s", f"{stock.result.node_s[stock.node('VAEDecode')]:.2f} s (node)"))
    rows += [memory_row(rank) for rank in denoise["ranks"]]
    rows += error_rows(parallel.image, stock.image)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for index, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())  # noqa: T201
        if index == 0:
            print("  ".join("-" * width for width in widths))  # noqa: T201


def denoise_rows(denoise: dict, stock: Run) -> list[Row]:
    """The whole loop, then a step on each rank. The first step is left out of the means: it warms up."""
    rows = [("denoise, all steps", f"{denoise['timings']['denoise_s']:.2f} s", "")]
    rows.append(("denoise per step, seen by the host", seconds(denoise["timings"]["step_s"]), stock_step(stock)))
    for rank in denoise["ranks"]:
        label = f"denoise per step, rank {rank['rank']} ({rank['device']})"
        rows.append((label, f"{seconds(rank['busy_s'])}, {seconds(rank['communication_s'])} of it communication", ""))
    return rows


def seconds(values: list[float]) -> str:
    """The mean without the first value, when there are others."""
    return f"{mean(values[1:] or values):.3f} s"


def stock_step(stock: Run) -> str:
    """Seconds between the stock sampler's progress reports, as a client sees them; empty with fewer than two."""
    times = [each.t_s for each in stock.result.progress if each.node == stock.node("KSampler") and each.value > 0]
    return f"{(times[-1] - times[0]) / (len(times) - 1):.3f} s" if len(times) > 1 else ""


def memory_row(rank: dict) -> Row:
    """What the worker reported of its memory."""
    parts = [f"{value / MIB:.0f} MiB {name.removesuffix('_bytes')}" for name, value in rank["memory"].items()]
    return (f"memory, rank {rank['rank']}", ", ".join(parts), "")


def error_rows(image: np.ndarray, reference: np.ndarray) -> list[Row]:
    """The image's error against stock ComfyUI's, when the sizes agree."""
    if image.shape != reference.shape:
        return []
    difference = np.abs(image - reference)
    levels = f"max {difference.max():g}, mean {difference.mean():.2g} of 255 levels"
    return [("image error against stock", f"{image_error(image, reference):.2g} relative ({levels})", "")]


def image_error(image: np.ndarray, reference: np.ndarray) -> float:
    """Root mean square of the differences over the reference's standard deviation; both (height, width, 3)."""
    return float(np.sqrt(np.square(image - reference).mean()) / reference.std())
