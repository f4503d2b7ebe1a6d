"""Where each strategy stops scaling, from 8 to 1,024 ranks, by the planner's formulas. Nothing here is measured.

Owns the settings: H100 nodes of eight with NVLink inside and 400 Gb/s a device between, compiled blocks.
"""

import math
from dataclasses import dataclass, replace

from parallel_runtime.planner.candidates import Candidate, candidates
from parallel_runtime.planner.choose import HEADROOM
from parallel_runtime.planner.cost import step_cost
from parallel_runtime.planner.hardware import GIB, Calibration
from parallel_runtime.planner.known import known_calibration, known_link
from parallel_runtime.planner.memory import memory_of
from parallel_runtime.planner.shapes import ModelShape, Work, named_shape

RANKS = (1, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1024)  # 12 and 24 are all that ulysses can use of 24 heads above 8
WORTH = 1.1  # each doubling of the ranks must be this much faster, or the strategy has stopped scaling


@dataclass(frozen=True)
class Setting:
    """A model and its work."""

    name: str
    shape: ModelShape
    work: Work


def settings() -> list[Setting]:
    """From one image to a long video."""
    flux, video = named_shape("flux1-dev"), named_shape("hunyuan-video")
    return [
        Setting("Flux, 1024 px", flux, Work(image_tokens=4096, text_tokens=512)),
        Setting("Flux, 4096 px", flux, Work(image_tokens=65536, text_tokens=512)),
        Setting("video, 118,800 tokens", video, Work(image_tokens=118_800, text_tokens=256)),
        Setting("video, 1,000,000 tokens", video, Work(image_tokens=1_000_000, text_tokens=256)),
        Setting("video, 1,000,000 tokens, cfg", video, Work(image_tokens=1_000_000, text_tokens=256, guided=True)),
    ]


def machine() -> Calibration:
    """H100 nodes of eight."""
    found = known_calibration("H100", compiled=True)
    return replace(found, network=known_link("infiniband"), node_ranks=8)


def best(setting: Setting, strategy: str, ranks: int, calibration: Calibration) -> tuple[Candidate, float] | None:
    """(the quickest candidate of a strategy on exactly `ranks` ranks, its seconds a step), of those that fit in memory
    where any does; None without one.
    """
    found = [
        (candidate, step_cost(setting.shape, setting.work, candidate, calibration).step_s)
        for candidate in candidates(
            ranks,
            heads=setting.shape.heads,
            batch=setting.work.batch,
            guided=setting.work.guided,
            blocks=setting.shape.blocks,
        )
        if candidate.weights == "replicated" and candidate.data == 1 and _belongs(candidate, strategy)
    ]
    return min(found, key=lambda pair: (not fits(setting, pair[0], calibration), pair[1]), default=None)


def _belongs(candidate: Candidate, strategy: str) -> bool:
    data, cfg, pipefusion, ring, ulysses = candidate.degrees
    alone = {
        "ulysses": cfg == pipefusion == ring == 1,
        "ring": cfg == pipefusion == ulysses == 1,
        "pipefusion": cfg == ring == ulysses == 1,
        "ring x ulysses": cfg == pipefusion == 1,
        "exact, all": pipefusion == 1,
        "all": True,
    }
    return data == 1 and alone[strategy]


def stops_at(times: dict[int, float]) -> int:
    """The last number of ranks that pays: faster, by `WORTH` a doubling, than the one before it that does."""
    last = min(times)
    for more in sorted(times):
        if times[last] >= WORTH ** math.log2(more / last) * times[more]:
            last = more
    return last


def scaling_lines() -> list[str]:
    """A table a setting: seconds a step by strategy and ranks, and where each stops."""
    calibration = machine()
    lines = [
        "Predicted, not measured: H100 nodes of eight, NVLink inside, 400 Gb/s a device between nodes (40 GB/s of them",
        "assumed), compiled blocks, bf16, ulysses inside ring, weights replicated. Seconds a step of the strategy's",
        "quickest plan; - where it cannot use that many ranks (above 8, ulysses can use 12 and 24 alone, for there are",
        "24 heads; PipeFusion has 57 or 60 blocks); ! where every plan of it needs more than",
        f"{HEADROOM:.0%} of a device's {calibration.rates.memory_bytes // GIB} GiB, so that it cannot run.",
        "PipeFusion's result differs from one process's, the others' does not. `stops` is the last number of ranks",
        f"that pays: at least {WORTH - 1:.0%} a doubling faster than the number before it that does.",
        "",
    ]
    for setting in settings():
        lines += _setting_lines(setting, calibration)
    return lines


def _setting_lines(setting: Setting, calibration: Calibration) -> list[str]:
    strategies = ["ulysses", "ring", "ring x ulysses", "pipefusion"]
    strategies += ["exact, all"] if setting.work.guided else []
    lines = [
        f"### {setting.name}",
        "",
        "| strategy | " + " | ".join(f"{ranks:,}" for ranks in RANKS) + " | stops |",
        "| --- " * (len(RANKS) + 2) + "|",
    ]
    winners: dict[int, tuple[Candidate, float]] = {}
    for strategy in (*strategies, "all"):
        found = {ranks: best(setting, strategy, ranks, calibration) for ranks in RANKS}
        there = {ranks: pair for ranks, pair in found.items() if pair is not None}
        winners = there
        cells = [_cell(setting, there.get(ranks), calibration) for ranks in RANKS]
        last = stops_at({ranks: pair[1] for ranks, pair in there.items()})
        lines.append(f"| {strategy} | " + " | ".join(cells) + f" | {last:,} |")
    names = ", ".join(
        f"{ranks:,}: {winners[ranks][0].name}{_mark(setting, winners[ranks][0], calibration)}"
        for ranks in RANKS
        if ranks in winners
    )
    memory = memory_of(setting.shape, setting.work, winners[8][0], calibration.rates).total / GIB
    return [*lines, "", f"Best of all: {names}. At 8 ranks that takes {memory:.1f} GiB a rank.", ""]


def fits(setting: Setting, candidate: Candidate, calibration: Calibration) -> bool:
    """Whether the plan's memory is there, by the rule that `plan` has."""
    needed = memory_of(setting.shape, setting.work, candidate, calibration.rates).total
    return needed <= HEADROOM * calibration.rates.memory_bytes


def _mark(setting: Setting, candidate: Candidate, calibration: Calibration) -> str:
    return "" if fits(setting, candidate, calibration) else "!"


def _cell(setting: Setting, found: tuple[Candidate, float] | None, calibration: Calibration) -> str:
    return "-" if found is None else f"{found[1]:.3g}{_mark(setting, found[0], calibration)}"
