"""Makes a report of what was measured. Owns which measurement becomes which field; measures and prints nothing.

What a rank says of a step, or of a whole run, is a reply of wire/replies.py.
"""

import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ..devices import Device
from ..plan import AXES, ParallelPlan
from ..proof import Proof
from ..redact_paths import redact_paths_in
from ..wire.replies import WAITING, CachedCalls, RankRun, RankStep, SampleReply, StepReply
from .compare import name_works
from .environment import describe_devices, versions
from .schema import PROOFS, SCHEMA, validate

COUNTS = ("collectives", "sent_bytes", "weight_bytes")
CLOCKS_AGREE, CLOCKS_AGREE_S = 1.001, 0.0001  # a device's clock drifts from the machine's, and numbers are rounded


@dataclass(frozen=True, kw_only=True)
class Span:
    """One step as its parent saw it: how long it took, and of each request in it every rank's reply, in rank order.

    Of a whole run in the workers there is one request, and this is its step number `step`.
    """

    wall_s: float
    requests: Sequence[Sequence[StepReply | SampleReply]]
    step: int = 0


def new_report(
    kind: str,
    *,
    devices: Sequence[Device],
    comfyui: str = "",
    prompt_id: str = "",
    **parts: object,
) -> dict:
    """A report of this moment with `parts` as its further fields, checked. A part that is empty was not measured.

    `comfyui` is its version, where it ran. Paths in texts, as in words of the compiler's, lose their folders. Raises
    `ReportError` for a part that is not as the schema says.
    """
    ran = {"comfyui": comfyui} if comfyui else {}
    report: dict = {
        "schema": SCHEMA,
        "kind": kind,
        "run_id": uuid.uuid4().hex,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "from_cache": False,
        "versions": versions(**ran),
        "devices": describe_devices(devices),
    }
    if prompt_id:
        report["prompt_id"] = prompt_id
    report |= {name: redact_paths_in(part) for name, part in parts.items() if part not in ({}, [], None, "")}
    validate(report)
    name_works(report)
    if early := clocks_read_early(report):
        report["warnings"] = [*report.get("warnings", ()), *early]
    return report


def plan_part(plan: ParallelPlan, *, chosen_for: str = "", reasons: Sequence[str] = ()) -> dict:
    """A plan as the schema has it; an automatic one with what it was chosen for, and why."""
    degrees = dict(zip(AXES, plan.degrees, strict=True))
    part = {"name": plan.name, "ranks": plan.ranks, "degrees": degrees, "weights": plan.weights}
    if plan.pipefusion > 1:
        part |= {"patches": plan.patches, "warmup_steps": plan.warmup_steps}
    if chosen_for:
        part["chosen_for"] = chosen_for
    if reasons:
        part["reasons"] = list(reasons)
    return part


def proof_part(proofs: Sequence[Proof], *, found: str = "") -> dict:
    """What is known of the plan for the kinds of calls of a run; of several the least that is known. {} for none.

    `found`: what the class's plan was proven by when it was found, "" for one that people wrote.
    """
    if not proofs:
        return {}
    least = min(proofs, key=lambda proof: PROOFS.index(proof.verdict))
    told: dict = {"verdict": least.verdict, "reason": least.reason}
    if least.calls:
        told |= {name: value for name, value in vars(least).items() if name not in told} | {"found": found}
    return {name: value for name, value in told.items() if value not in (None, "")}


def cached_calls(ranks: Sequence[StepReply | SampleReply]) -> CachedCalls:
    """Of a request, the calls that a step cache was asked about; ranks that share one count it once."""
    by_group = {ran.batch_group: ran.cached for reply in ranks if (ran := reply.ran) is not None and ran.cached}
    counts = by_group.values()
    return CachedCalls(calls=sum(each.calls for each in counts), skipped=sum(each.skipped for each in counts))


def kept_part(requests: Sequence[Sequence[StepReply | SampleReply]]) -> dict:
    """What the model's class kept between the calls of these requests; {} where it keeps nothing.

    Ranks that share a call count it once. `tokens`: what the first block of all ranks together computed in each
    request; `bytes`: the most that one rank kept.
    """
    steps = [[ran.kept for reply in ranks if (ran := reply.ran) is not None and ran.kept] for ranks in requests]
    if not any(each.calls for found in steps for each in found):
        return {}
    groups = [
        {ran.batch_group: ran.kept for reply in ranks if (ran := reply.ran) is not None and ran.kept}.values()
        for ranks in requests
    ]
    return {
        "calls": sum(each.calls for found in groups for each in found),
        "found": sum(each.found for found in groups for each in found),
        "tokens": [sum(each.rows for each in found) for found in steps],
        "bytes": max(each.kept_bytes for found in steps for each in found),
    }


def rank_parts(
    spans: Sequence[Span], devices: Sequence[Device], *, began_s: float, utilisation: Mapping[int, float] | None = None
) -> list[dict]:
    """What each rank did in each span. `began_s`: the moment that `begin_s` counts from, on the monotonic clock."""
    parts = []
    for rank, device in enumerate(devices):
        steps = [_sum_up(span, rank) for span in spans]
        part: dict = {"rank": rank, "device": str(device)}
        if all(step is not None for step in steps):
            part |= _series([step for step in steps if step is not None], spans, began_s)
        replies = [request[rank] for span in spans for request in span.requests if len(request) > rank]
        if replies:
            part |= {"memory": replies[-1].memory.known()} | _of_run(replies[-1].ran)
        if utilisation and rank in utilisation:
            part["utilisation"] = utilisation[rank]
        parts.append(part)
    return parts


def spans_of_run(ranks: Sequence[SampleReply], wall_s: Sequence[float]) -> list[Span]:
    """Spans of a run whose loop was in the workers; `wall_s` of each step, as the parent saw it."""
    return [Span(wall_s=seconds, requests=[ranks], step=number) for number, seconds in enumerate(wall_s)]


def _of_run(ran: RankStep | RankRun | None) -> dict:
    """What is of no single step: the batch group and, of a run in the workers, its bytes and what was around its
    steps."""
    if ran is None:
        return {}
    found: dict = {"lane": ran.batch_group} | ({"attention": ", ".join(ran.attention)} if ran.attention else {})
    if isinstance(ran, RankStep):
        return found
    found |= {"run_sent_bytes": ran.sent_bytes, "run_weight_bytes": ran.weight_bytes}
    found |= {"prepare_s": ran.prepare_s, "finish_s": ran.finish_s}
    return found if ran.prepare_regions is None else found | {"prepare_regions": ran.prepare_regions}


def _of_step(ran: RankStep | RankRun, step: int) -> dict:
    """What a rank says of one step, without what it does not know."""
    if isinstance(ran, RankStep):
        told: dict = {"step_s": ran.step_s, "began_s": ran.began_s, "pieces": ran.pieces, "regions": ran.regions}
        told |= {name: getattr(ran, name) for name in COUNTS}
    else:
        told = {"step_s": ran.step_s[step], "began_s": None if ran.began_s is None else ran.began_s[step]}
        timed = ran.regions is not None and (ran.timed_steps is None or step in ran.timed_steps)
        told["regions"] = {name: each[step] for name, each in (ran.regions or {}).items()} if timed else None
    return {name: value for name, value in told.items() if value is not None}


def span_timings(ranks: Sequence[Mapping]) -> dict:
    """Rank 0 and the slowest rank of each step, and how far apart the ranks ended it, of `rank_parts`."""
    busy = [rank["busy_s"] for rank in ranks if "busy_s" in rank]
    if not busy:
        return {}
    numbers = [rank["rank"] for rank in ranks if "busy_s" in rank]
    steps = list(zip(*busy, strict=True))
    timings: dict = {
        "rank0_s": list(busy[0]),
        "slowest_rank_s": [max(step) for step in steps],
        "slowest_rank": [numbers[step.index(max(step))] for step in steps],
    }
    ends = [rank["end_s"] for rank in ranks if "end_s" in rank]
    if len(ends) > 1:
        timings["skew_s"] = [max(step) - min(step) for step in zip(*ends, strict=True)]
    return timings


def clocks_read_early(report: Mapping) -> list[str]:
    """A warning for each rank that says it waited for what others computed longer than a step took.

    Then the step's end was looked at before the device got there, and no time of that rank can be believed. To wait for
    weights is no sign: their stream is another than that of the steps.
    """
    rows = [("", report.get("ranks", ()))]
    rows += [(f"{row['name']}, ", row["ranks"]) for row in report.get("contenders", ()) if "ranks" in row]
    return [
        f"{name}rank {rank['rank']}: it waited for others {waited:.6f} s of a step of {busy:.6f} s, so its clock was "
        "read before its device was done; do not trust its times, and report this as a bug"
        for name, ranks in rows
        for rank in ranks
        for waited, busy in _impossible(rank)[:1]
    ]


def _impossible(rank: Mapping) -> list[tuple[float, float]]:
    """Of the steps that cannot be: what the rank says it waited, and what the step took."""
    steps = zip(rank.get("regions", {}).get("communication_s", ()), rank.get("busy_s", ()), strict=False)
    return [(waited, busy) for waited, busy in steps if waited > CLOCKS_AGREE * busy + CLOCKS_AGREE_S]


def case(name: str, kind: str, engine: str, run_s: Sequence[float], **more: object) -> dict:
    """One row of a benchmark: every run, their median and their spread (the middle half), and `more`."""
    part = {
        "name": name,
        "kind": kind,
        "engine": engine,
        "run_s": list(run_s),
        "median_s": statistics.median(run_s),
        "min_s": min(run_s),
        "max_s": max(run_s),
    }
    if len(run_s) > 1:
        quarters = statistics.quantiles(run_s, n=4, method="inclusive")
        part["spread_s"] = quarters[2] - quarters[0]
    return part | {key: value for key, value in more.items() if value is not None}


def compare(cases: list[dict]) -> None:
    """Add to each row what it gains over one rank and over one process."""
    one_rank = next((row for row in cases if row["kind"] == "one_rank"), None)
    for row in cases:
        if one_rank is not None and row is not one_rank:
            row["speedup"] = one_rank["median_s"] / row["median_s"]
        process = _process_for(row, cases)
        if process is not None:
            row["speedup_over_one_process"] = process["median_s"] / row["median_s"]


def _process_for(row: Mapping, cases: Sequence[dict]) -> dict | None:
    """The process that a row of workers is held against: the one with as many threads, where threads play a part."""
    if row["kind"] == "one_process":
        return None
    alike = (each for each in cases if each["kind"] == "one_process" and each.get("threads") == row.get("threads"))
    return next(alike, None)


def _sum_up(span: Span, rank: int) -> dict | None:
    """What one rank did in all requests of a span, nothing where there was none; None when the plan is without it."""
    ran = [request[rank].ran for request in span.requests if len(request) > rank]
    reports = [_of_step(each, span.step) for each in ran if each is not None]
    if len(reports) < len(ran):
        return None
    sums = ("step_s", *COUNTS)
    if not reports:  # a step that the host answered by itself
        return dict.fromkeys(sums, 0) | {"regions": {}, "timed": True, "pieces": []}
    total: dict = {name: sum(report[name] for report in reports) for name in sums if name in reports[0]}
    if all("began_s" in report for report in reports):
        total["began_s"] = reports[0]["began_s"]
        total["ended_s"] = reports[-1]["began_s"] + reports[-1]["step_s"]
    regions: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.get("regions", {}).items():
            regions[name] = regions.get(name, 0.0) + seconds
    timed = all("regions" in report for report in reports)
    pieces = [piece for report in reports for piece in report.get("pieces", ())]
    return total | {"regions": regions, "timed": timed, "pieces": [list(piece) for piece in pieces]}


def _all_timed(steps: Sequence[dict]) -> list[dict]:
    """Steps whose parts were not timed, as one in several is on a GPU, have those of the timed one before, or of the
    first one, in proportion to what the step took."""
    known = next((step for step in steps if step["timed"] and step["regions"]), None)
    found = []
    for step in steps:
        known = step if step["timed"] and step["regions"] else known
        if not step["timed"] and known is not None and known["step_s"] > 0:
            rate = step["step_s"] / known["step_s"]
            step = step | {"timed": True, "regions": {name: rate * each for name, each in known["regions"].items()}}
        found.append(step)
    return found


def _series(steps: Sequence[dict], spans: Sequence[Span], began_s: float) -> dict:
    """One rank's steps as lists, one entry a step. A field that a step lacks is no field of the run."""
    steps = _all_timed(steps)
    series: dict = {"busy_s": [step["step_s"] for step in steps]}
    # A rank may end a step of a run in the workers long before its caller hears of it, and be at the next one.
    series["idle_s"] = [max(0.0, span.wall_s - step["step_s"]) for span, step in zip(spans, steps, strict=True)]
    if all(step["timed"] for step in steps):
        waits = [sum(step["regions"].get(name, 0.0) for name in WAITING) for step in steps]
        series["communication_s"] = waits
        series["compute_s"] = [max(0.0, step["step_s"] - wait) for step, wait in zip(steps, waits, strict=True)]
    if all("began_s" in step for step in steps):
        series["begin_s"] = [max(0.0, step["began_s"] - began_s) for step in steps]
        series["end_s"] = [max(0.0, step["ended_s"] - began_s) for step in steps]
    for name in COUNTS:
        if all(name in step for step in steps):
            series[name] = [step[name] for step in steps]
    if any(step["pieces"] for step in steps):
        series["pieces"] = [step["pieces"] for step in steps]
    names = {name for step in steps for name in step["regions"]}
    if names:  # a step in which a rank had nothing to run has no regions: that it spent no time in them is known
        series["regions"] = {name: [step["regions"].get(name, 0.0) for step in steps] for name in sorted(names)}
    return series
