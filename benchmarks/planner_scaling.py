"""Where each strategy stops scaling, from 8 to 1,024 ranks, by the planner's formulas. Nothing here is measured.

Owns the settings: H100 nodes of eight with NVLink inside and 400 Gb/s a device between, compiled blocks.
"""

from dataclasses import dataclass, replace

from parallel_runtime.planner.candidates import Candidate, candidates
from parallel_runtime.planner.cost import step_cost
from parallel_runtime.planner.hardware import Calibration, known_calibration, known_link
from parallel_runtime.planner.memory import memory_of
from parallel_runtime.planner.shapes import ModelShape, Work, named_shape

RANKS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
WORTH = 1.1  # doubling the ranks must be this much faster, or the strategy has stopped scaling
GIB = 2**30


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
    """The quickest candidate of a strategy on exactly `ranks` ranks, and its seconds a step; None without one."""
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
    return min(found, key=lambda pair: pair[1]) if found else None


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
    """The last number of ranks that was still worth it over the one before."""
    ranks = sorted(times)
    last = ranks[0]
    for more in ranks[1:]:
        if times[last] < WORTH * times[more]:
            return last
        last = more
    return last


def scaling_lines() -> list[str]:
    """A table a setting: seconds a step by strategy and ranks, and where each stops."""
    calibration = machine()
    lines = [
        "Predicted, not measured: H100 nodes of eight, NVLink inside, 400 Gb/s a device between nodes (40 GB/s of them",
        "assumed), compiled blocks, bf16, ulysses inside ring. Seconds a step; - where the strategy cannot use that",
        "many ranks (24 heads, 57 or 60 blocks). PipeFusion's result differs from one process's, the others' does not;",
        f"`stops` is the last number of ranks at least {WORTH - 1:.0%} faster than the number before it.",
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
        cells = [f"{there[ranks][1]:.3g}" if ranks in there else "-" for ranks in RANKS]
        last = stops_at({ranks: pair[1] for ranks, pair in there.items()})
        lines.append(f"| {strategy} | " + " | ".join(cells) + f" | {last:,} |")
    names = ", ".join(f"{ranks:,}: {winners[ranks][0].name}" for ranks in RANKS if ranks in winners)
    memory = memory_of(setting.shape, setting.work, winners[8][0], calibration.rates).total / GIB
    fits = "" if memory < calibration.rates.memory_bytes / GIB else ", which does not fit: it needs more ranks"
    return [*lines, "", f"Best of all: {names}. At 8 ranks that takes {memory:.1f} GiB a rank{fits}.", ""]
