"""The table of the comparison. Ratios are medians of each round's own ratio: what slowed one round slowed both sides.

Owns rows, ratios and wording. Measures nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch


@dataclass
class Lane:
    """One thing that is run in every round; `kind` is `ours`, `baseline` or `peer`."""

    name: str
    kind: str
    run: Callable[[], float]
    seconds: list[float] = field(default_factory=list)


def ratio(slower: Lane, faster: Lane) -> float:
    """How many times as long `slower` takes, paired by round."""
    return median(a / b for a, b in zip(slower.seconds, faster.seconds, strict=True))


def print_table(title: str, lanes: list[Lane], errors: Mapping[str, float]) -> None:
    """A row a lane: times, ours over it, its error against the one process."""
    peers = [lane for lane in lanes if lane.kind == "peer"]
    fastest = min(peers, key=lambda lane: median(lane.seconds))
    against = [*(lane for lane in lanes if lane.kind == "baseline"), fastest]
    show(f"\n### {title}\n")
    show(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ")
    show(f"{len(lanes[0].seconds)} rounds, interleaved. The last columns say how many times as fast a lane is.\n")
    heads = ["", "median ms", "min", "max", *(f"than {lane.name}" for lane in against), "relative error"]
    show("| " + " | ".join(heads) + " |")
    show("| --- |" + " ---: |" * (len(heads) - 1))
    for lane in lanes:
        times = [f"{1000 * value:.1f}" for value in (median(lane.seconds), min(lane.seconds), max(lane.seconds))]
        ratios = ["" if lane is other else f"{ratio(other, lane):.2f}" for other in against]
        error = f"{errors[lane.name]:.1e}" if lane.name in errors else ""
        name = f"**ours, {lane.name}**" if lane.kind == "ours" else lane.name
        show("| " + " | ".join([name, *times, *ratios, error]) + " |")


def show(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)  # noqa: T201
