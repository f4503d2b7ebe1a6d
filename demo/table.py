"""The demo's closing table: what was compared, where the time went, what else was shown, what two GPUs would change.

Owns: rows and wording. Does not own: the measuring (nodes/report.py) or the verdict (run.py). A figure nobody measured
is an empty cell, never a zero.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from host.server import PACK_ROOT

if TYPE_CHECKING:
    from .run import Run, Story

MIB = 2**20
KINDS = ("H100", "RTX 4090")
Row = tuple[str, str, str]


def print_table(story: Story, predicted: list[str], seen: Callable[[np.ndarray], dict[str, str]]) -> None:
    """Prints what was measured, a row a quantity, and what was not, named as a prediction."""
    parallel, stock = story.parallel, story.stock
    denoise = parallel.report("ParallelSampler")
    rows: list[Row] = [("", f"Parallel DiT, plan {denoise['plan']['name']}", "stock ComfyUI")]
    pictures = (", ".join(seen(each.image).values()) for each in (parallel, stock))
    rows.append(("the picture shows (classifier)", *pictures))
    rows.append(("end to end, loading included", f"{parallel.result.wall_s:.2f} s", f"{stock.result.wall_s:.2f} s"))
    rows += denoise_rows(denoise, stock)
    decode_s = parallel.report("TimedVAEDecode")["vae"]["decode_s"]
    rows.append(("VAE decode", f"{decode_s:.2f} s", f"{stock.result.node_s[stock.node('VAEDecode')]:.2f} s (node)"))
    rows += [memory_row(rank) for rank in denoise["ranks"]]
    rows += error_rows(parallel.image, stock.image)
    if story.broken:
        error = image_error(story.broken.image, stock.image)
        shown = ", ".join(seen(story.broken.image).values())
        rows.append(("exchange switched off", f"{error:.2g} relative error; shows {shown}: broken", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for index, row in enumerate(rows):
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if index == 0:
            say("  ".join("-" * width for width in widths))
    if killed := story.recovery:
        say(f"\na worker killed at step {killed.step}: {killed.message}")
        after = f"the next picture was there after {killed.next_picture_s:.1f} s"
        say(f"  the prompt failed after {killed.failed_s:.1f} s; {after}")
    say("\nThe demo's model is so small that exchanging takes longer than it saves; it shows that the result is exact.")
    for line in predicted:
        say(line)


def say(text: str) -> None:
    """Prints a line."""
    print(text, flush=True)  # noqa: T201


def predictions() -> list[str]:
    """What the planner predicts of Flux.1 at 1024 x 1024 on two GPUs of each kind, a line each."""
    return [prediction(kind) for kind in KINDS]


def prediction(kind: str) -> str:
    """The planner's words for one kind; nothing of it is measured here."""
    command = [sys.executable, "-m", "parallel_runtime", "plan", "--json", "--devices", "2", "--kind", kind]
    command += ["--width", "1024", "--height", "1024"]
    done = subprocess.run(command, cwd=PACK_ROOT, capture_output=True, text=True, check=True)  # noqa: S603 (our own)
    told = json.loads(done.stdout)
    (single,) = (row for row in told["table"] if row["name"] == "single")
    best = told["chosen"]
    alone = f"{single['seconds_per_step']:.3f} s on one" + (
        "" if single["fits"] else ", which cannot hold it in memory"
    )
    times = single["seconds_per_step"] / best["seconds_per_step"]
    here = f"{best['seconds_per_step']:.3f} s a step with {best['name']}"
    return f"prediction, not measured: Flux.1 at 1024 x 1024 on two {kind}: {here}, against {alone}: {times:.2f} times"


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
    gap = np.abs(image - reference)
    levels = f"max {gap.max():g}, mean {gap.mean():.2g} of 255 levels"
    return [("image error against stock", f"{image_error(image, reference):.2g} relative ({levels})", "")]


def image_error(image: np.ndarray, reference: np.ndarray) -> float:
    """Root mean square of the differences over the reference's standard deviation; both (height, width, 3)."""
    return float(np.sqrt(np.square(image - reference).mean()) / reference.std())
