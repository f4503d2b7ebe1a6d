"""Which runs may be compared, and what comes of it: how much faster than one device, where the time went, what to try.

Plain Python over reports of the one schema (schema.py). Owns no report: what is kept of one is its `Facts`.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from ..plan import AXES

PARTS = ("compute", "communication", "idle")
GOOD, FAIR = 0.75, 0.5  # shares of the time that ranks compute, from which a run is called so
WORTHWHILE = 1.05  # how much faster another plan must have been to be named
MEASURED_ON = ("width", "height", "frames", "batch", "images", "image_tokens", "text_tokens")
ASKED = ("steps", "sampler", "denoise")
WORK_CHARS = 12
ROUNDING = ("rounds", "sage", "attention3", "int8")  # in the names of attention kernels that are not exact
ENOUGH = 3  # timed steps from which the first, which also warms up, does not weigh


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a comparison needs of one plan's run: `work` says of what, `source` in which report's way it was timed.

    `step_s`: seconds of a step; of a benchmark its runs' median by their steps.
    """

    number: int
    source: str
    work: str
    plan: Mapping
    step_s: float
    exchange: str = ""  # as what heads travelled, where that rounded

    @property
    def alone(self) -> bool:
        """Whether one device did it."""
        return self.plan["ranks"] == 1

    @property
    def exact(self) -> bool:
        """Whether its picture is that of one device; PipeFusion's is not quite."""
        return self.plan["degrees"].get("pipefusion", 1) == 1


def facts_of(report: Mapping, number: int) -> list[Facts]:
    """The facts of a report under its number, one for each plan it has measured; [] where nothing can be compared."""
    steps = report.get("sampling", {}).get("steps", 0)
    if report.get("kind") == "benchmark":
        timed = [(row, row["median_s"] / steps) for row in report["contenders"] if "plan" in row and steps]
        source = f"benchmark {number}"
    else:
        timed = [(report, _compared_step_of(report))] if "plan" in report else []
        source = "denoise"
    rounded = {"exchange": report["exchange"]} if "exchange" in report else {}
    return [
        Facts(number=number, source=source, work=run["work"], plan=run["plan"], step_s=step_s, **rounded)
        for run, step_s in timed
        if math.isfinite(step_s) and step_s > 0 and "work" in run
    ]


def work_of(report: Mapping, run: Mapping) -> tuple | None:
    """What was sampled, how, and on which kind of device: equal where runs may be compared; None where none ever may.

    `run` is the report itself or one of a benchmark's cases. Blocks count as compiled where the run made graphs or
    says how many it has: of a later run that only uses them the report does not say so. Which LoRAs and ControlNets
    there are counts, not their strengths, which change nothing of what is computed.
    """
    model, sizes, asked = (report.get(part, {}) for part in ("model", "sizes", "sampling"))
    patches = model.get("patches", {})
    devices = report.get("devices", [])
    if report.get("kind") not in ("denoise", "benchmark") or not model or not sizes or not devices or "images" in sizes:
        return None
    return (
        model["file"],
        model["dtype"],
        patches.get("name"),
        patches.get("side_branch", False),
        tuple((each["kind"], each["name"], each["start"], each["end"]) for each in report.get("controls", ())),
        devices[0].get("model", devices[0]["kind"]),
        asked.get("cfg", 1.0) != 1.0,  # then a step asks twice
        tuple(
            (cache["name"], cache["threshold"], cache["skipped"] / max(cache["of"], 1))
            for cache in report.get("step_caches", ())
        ),
        run.get("loop", {}).get("kind"),
        run["plan"]["weights"] == "offloaded",
        "graphs" in run or any("compile_s" in rank.get("regions", {}) for rank in run.get("ranks", ())),
        *(sizes.get(name) for name in MEASURED_ON),
        *(asked.get(name) for name in ASKED),
    )


def name_works(report: dict) -> None:
    """Write `work` into a report and into a benchmark's cases with a plan: equal where runs may be compared.

    It is absent where none ever may. So code that has two reports, of any process, needs no rule of its own.
    """
    runs = report["contenders"] if report["kind"] == "benchmark" else [report]
    for run in runs:
        work = work_of(report, run) if "plan" in run else None
        if work is not None:
            run["work"] = hashlib.sha256(json.dumps(work).encode()).hexdigest()[:WORK_CHARS]


def step_of(report: Mapping) -> float:
    """Median seconds of a step, of runs with a step cache the mean, as it may have skipped the median; NaN for none."""
    timings = report.get("timings", {})
    steps = timings.get("step_s") or [math.nan]
    if report.get("step_caches") and "denoise_s" in timings:
        return timings["denoise_s"] / len(steps)
    return median(steps)


def _compared_step_of(report: Mapping) -> float:
    """Seconds of a step for comparisons: of a few without the first, and NaN of one alone, which is the first."""
    later = report.get("timings", {}).get("step_s", [])[1:]
    if len(later) + 1 < ENOUGH:
        return median(later or [math.nan])
    return step_of(report)


def summary(report: Mapping) -> dict:
    """A report in a few words, for lists: its plan, size, steps, seconds, and where its ranks' time went."""
    sizes, timings = report.get("sizes", {}), report.get("timings", {})
    told = {name: sizes[name] for name in ("width", "height", "frames", "batch", "images") if name in sizes}
    told |= {name: report["sampling"][name] for name in ("steps",) if name in report.get("sampling", {})}
    told |= {"denoise_s": timings["denoise_s"]} if "denoise_s" in timings else {}
    plan = report.get("plan")
    if plan is not None:
        told |= {"plan": plan["name"], "ranks": plan["ranks"]}
    if math.isfinite(step_s := step_of(report)):
        told["step_s"] = step_s
    fractions = time_fractions(report.get("ranks", []))
    if fractions:
        told["shares"] = fractions
        if plan is not None and plan["ranks"] > 1:
            told["verdict"] = verdict(fractions)
    return told


def time_fractions(ranks: Iterable[Mapping]) -> dict[str, float]:
    """How the ranks' time divides into computing, waiting for others, and idling; {} where it was not measured.

    Of ENOUGH steps without the first, in which a plan is proven and other plans are tried.
    """
    sums = dict.fromkeys(PARTS, 0.0)
    for rank in ranks:
        if all(f"{part}_s" in rank for part in PARTS):
            for part in PARTS:
                seconds = rank[f"{part}_s"]
                sums[part] += sum(seconds[1:] if len(seconds) >= ENOUGH else seconds)
    whole = sum(sums.values())
    return {part: round(seconds / whole, 4) for part, seconds in sums.items()} if whole > 0 else {}


def verdict(fractions: Mapping[str, float]) -> str:
    """`good`, `fair` or `poor`, by the fraction of the time in which the ranks compute."""
    return "good" if fractions["compute"] >= GOOD else "fair" if fractions["compute"] >= FAIR else "poor"


def speedup(run: Facts, known: Iterable[Facts]) -> dict | None:
    """How a run compares with the newest of the same work on one device; one on one device, with the newest on several.

    `factor` is of the plan over one device, whichever of the two this run was; `number` is the other report's.
    """
    pairs = [(run, other) for other in _alike(run, known) if other.alone != run.alone and other.source == run.source]
    pairs += [
        (mine, other)
        for mine in _alike(run, known)
        if mine.source != run.source and mine.plan["name"] == run.plan["name"]
        for other in _alike(run, known)
        if other.source == mine.source and other.alone != mine.alone
    ]
    if not pairs:
        return None
    mine, other = max(pairs, key=lambda pair: pair[1].number)
    alone, several = (mine, other) if mine.alone else (other, mine)
    return {
        "factor": alone.step_s / several.step_s,
        "one_s": alone.step_s,
        "plan_s": several.step_s,
        "plan": several.plan["name"],
        "number": other.number,
        "kind": other.source.partition(" ")[0],
    }


def quoted(report: Mapping, found: Mapping | None) -> dict | None:
    """What a person quotes of a run on several devices: how many, how much faster than one that was measured (`found`
    of `speedup`), and how far its picture is from one device's; None where no run on one device was measured.

    `exact` is `proven` (with the proof's error and the dtype it was found in: within what two exact kernels of one
    device differ by), `whole` where each image is computed by one device; absent where neither is known, or a step
    cache, a stage, attention that rounds or heads that travelled rounded change the picture.
    """
    plan, proof = report.get("plan"), report.get("proof", {})
    if found is None or plan is None or plan["ranks"] == 1:
        return None
    told = {"devices": plan["ranks"], "factor": found["factor"]}
    attended = [rank.get("attention", "").lower() for rank in report.get("ranks", ())]
    other = "exchange" in report or any(word in text for text in attended for word in ROUNDING)
    if report.get("step_caches") or plan["degrees"].get("pipefusion", 1) > 1 or other:
        return told
    if proof.get("verdict") == "proven" and proof["error"] <= proof["tolerance"]:
        return told | {"exact": "proven", "error": proof["error"], "dtype": report["model"]["dtype"]}
    return told | ({"exact": "whole"} if proof.get("verdict") == "not needed" else {})


def quicker(run: Facts, known: Iterable[Facts]) -> dict | None:
    """The plan that was quickest at the same work, if it was clearly quicker than this run's: what to try."""
    best: tuple[float, Facts] | None = None
    for other in _alike(run, known):
        if other.plan["name"] == run.plan["name"] or not other.exact or other.exchange != run.exchange:
            continue
        mine = _timed_alike(run, other, known)
        if mine is not None and (best is None or mine.step_s / other.step_s > best[0]):
            best = mine.step_s / other.step_s, other
    if best is None or best[0] < WORTHWHILE:
        return None
    return suggestion(best[1].plan, factor=best[0], by="measured")


def suggestion(plan: Mapping, *, factor: float, by: str) -> dict:
    """A plan to try: its degrees and weights, and by how much it is faster as it was `measured` or `predicted`."""
    degrees = {axis: plan["degrees"].get(axis, 1) for axis in AXES}
    return {"plan": plan["name"], "degrees": degrees, "weights": plan["weights"], "factor": factor, "by": by}


def _timed_alike(run: Facts, other: Facts, known: Iterable[Facts]) -> Facts | None:
    """This run, or one of its plan that was timed in the same way as the other."""
    if run.source == other.source:
        return run
    same = [each for each in _alike(run, known) if (each.source, each.plan["name"]) == (other.source, run.plan["name"])]
    return same[0] if same else None


def _alike(run: Facts, known: Iterable[Facts]) -> list[Facts]:
    return [each for each in known if each.work == run.work]
