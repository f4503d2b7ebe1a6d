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
class Candidate:
    """One thing that is run in every round; `kind` is `ours`, `baseline` or `peer`."""

    name: str
    kind: str
    run: Callable[[], float]
    seconds: list[float] = field(default_factory=list)


def ratio(slower: Candidate, faster: Candidate) -> float:
    """How many times as long `slower` takes, paired by round."""
    return median(a / b for a, b in zip(slower.seconds, faster.seconds, strict=True))


def print_table(title: str, candidates: list[Candidate], errors: Mapping[str, float]) -> None:
    """A row a candidate: times, ours over it, its error against the one process."""
    peers = [candidate for candidate in candidates if candidate.kind == "peer"]
    fastest = min(peers, key=lambda candidate: median(candidate.seconds))
    against = [*(candidate for candidate in candidates if candidate.kind == "baseline"), fastest]
    show(f"\n### {title}\n")
    show(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ")
    show(
        f"{len(candidates[0].seconds)} rounds, interleaved. The last columns say how many times as fast a "
        "candidate is.\n"
    )
    heads = ["", "median ms", "min", "max", *(f"than {candidate.name}" for candidate in against), "relative error"]
    show("| " + " | ".join(heads) + " |")
    show("| --- |" + " ---: |" * (len(heads) - 1))
    for candidate in candidates:
        times = [
            f"{1000 * value:.1f}"
            for value in (median(candidate.seconds), min(candidate.seconds), max(candidate.seconds))
        ]
        ratios = ["" if candidate is other else f"{ratio(other, candidate):.2f}" for other in against]
        error = f"{errors[candidate.name]:.1e}" if candidate.name in errors else ""
        name = f"**ours, {candidate.name}**" if candidate.kind == "ours" else candidate.name
        show("| " + " | ".join([name, *times, *ratios, error]) + " |")


def show(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)  # noqa: T201
