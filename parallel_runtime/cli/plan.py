"""`plan`: which plan is best for a model and an image on these devices, and why. Starts nothing.

Owns the reading of the options and the printing. The choice is `planner/choose.py`'s.
"""

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from ..checkpoint import read_header
from ..devices import parse_devices
from ..plan import MAX_RANKS
from ..planner.automatic import OF_HOST
from ..planner.choose import Choice, Prediction, choose_plan
from ..planner.comfyui_process import find_comfyui
from ..planner.counted import CountedModel
from ..planner.counting import USUAL_NAME, Counted, Counts, usual_counted
from ..planner.hardware import GIB, Calibration
from ..planner.known import known_calibration
from ..planner.machine import look
from ..planner.work import Work, image_tokens
from ..process.environment import blocks_may_stay
from ..trials.workload import MAX_FRAMES, is_guided
from ..weights.host_memory import host_memory
from .terminal import SILENT, Paint, PhaseLine, plain

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
SHOWN = 12
USUAL_COUNT = 2  # devices of --kind
LIMITS = {
    **dict.fromkeys(("width", "height"), (16, 16384)),
    **{"frames": (1, MAX_FRAMES), "text_tokens": (0, 10**6)},
    **dict.fromkeys(("batch", "steps"), (1, 10**6)),
    "beside": (0, 100),
}
MAX_FREE_GIB = 1e6


def run(arguments: argparse.Namespace, progress: PhaseLine = SILENT) -> dict:
    """Plan, and return the report. Raises `ValueError` for what cannot be planned."""
    for name, (low, high) in LIMITS.items():
        if (value := getattr(arguments, name)) is not None and not low <= value <= high:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}={value} is outside {low} to {high}; use a value in that range")
    calibration, free, warnings = _machine(arguments)
    model, work = _model(arguments, progress)
    if model.from_real_calls:
        warnings = (*warnings, f"{model.name} reads values, so it was counted in small calls and is extrapolated")
    here = OF_HOST * host_memory()[1] if arguments.kind is None else math.inf
    choice = choose_plan(
        *(model, work, free, calibration),
        stale=arguments.stale,
        decoder=0,
        host_bytes=here,
        blocks_stay=blocks_may_stay(os.environ),
        beside=arguments.beside,
    )
    return _report(model, work, free, calibration, choice) | {"warnings": list(warnings)}


def _model(arguments: argparse.Namespace, progress: PhaseLine) -> tuple[CountedModel, Work]:
    """The model, and what it is asked for. Raises `ValueError` for an unknown model."""
    work = Work(
        image_tokens=image_tokens(arguments.width, arguments.height),
        text_tokens=arguments.text_tokens,
        guided=is_guided(arguments.cfg),
        batch=arguments.batch,
        steps=arguments.steps,
        element_bytes=ELEMENT_BYTES[arguments.dtype],
        graphs=not arguments.compiled,
    )
    if arguments.model in (None, USUAL_NAME):
        counted = _usual(arguments)
    else:
        if arguments.file_dtype is not None:
            name = Path(arguments.model).name
            raise ValueError(f"--file-dtype={arguments.file_dtype}: {name} says its own; leave it out")
        if not arguments.model.lower().endswith((".safetensors", ".sft")) and not os.path.exists(arguments.model):
            raise ValueError(f"model {arguments.model!r} is unknown; use a .safetensors file or {USUAL_NAME}")
        read_header(arguments.model)
        progress.phase(f"counting {Path(arguments.model).name} in a ComfyUI process")
        size = {"width": arguments.width, "height": arguments.height, "frames": arguments.frames}
        counted = Counts().of(arguments.model, arguments.dtype, find_comfyui(arguments.comfyui), **size)
        work = replace(work, image_tokens=counted.image_tokens, frames=counted.frames)
    return counted.model, replace(work, element_bytes=counted.element_bytes)


def _usual(arguments: argparse.Namespace) -> Counted:
    """What is stored of the usual model, with activations and weights of the dtypes that are asked for."""
    for option in ("frames", "comfyui"):
        if (value := getattr(arguments, option)) is not None:
            raise ValueError(f"--{option}={value} needs --model; without one the plan is of {USUAL_NAME}")
    counted = usual_counted()
    weight_bytes = ELEMENT_BYTES[arguments.file_dtype or arguments.dtype]
    whole = counted.model.weight_bytes * weight_bytes // counted.element_bytes
    return counted.with_weights(whole).with_elements(ELEMENT_BYTES[arguments.dtype])


def _machine(arguments: argparse.Namespace) -> tuple[Calibration, list[int], tuple[str, ...]]:
    """(constants, free bytes of each device, warnings): of the devices here, or of the ones described."""
    warnings: tuple[str, ...] = ()
    if arguments.kind is None:
        selection = parse_devices("all" if arguments.devices is None else arguments.devices)
        warnings = selection.warnings
        calibration, free = look(selection.devices, link=arguments.link)
    else:
        count = _count(arguments.devices)
        calibration = known_calibration(arguments.kind, arguments.link, devices=count)
        free = [calibration.rates.memory_bytes] * count
    if arguments.compiled:
        warnings = (*warnings, "--compiled: what compiled blocks take is not known; they have no CUDA graphs")
    if arguments.free_gib is not None:
        free = [round(_positive("free-gib", arguments.free_gib, most=MAX_FREE_GIB) * GIB)] * len(free)
    return _with_link(arguments, calibration), free, warnings


def _count(text: str | None) -> int:
    if text is None:
        return USUAL_COUNT
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise ValueError(f"--devices={text} with --kind is no count; use 1 to {MAX_RANKS}")
    return int(text)


def _with_link(arguments: argparse.Namespace, calibration: Calibration) -> Calibration:
    """The constants with the link's figures the user knows better."""
    link = calibration.link
    if arguments.bandwidth_gbs is not None:
        link = replace(link, bandwidth=_positive("bandwidth-gbs", arguments.bandwidth_gbs) * 1e9)
    if arguments.latency_us is not None:
        link = replace(link, latency_s=_positive("latency-us", arguments.latency_us) * 1e-6)
    if link == calibration.link:
        return calibration
    return replace(calibration, link=link, source=f"{calibration.source}; link as given")


def _positive(option: str, value: float, *, most: float = 1e9) -> float:
    if not 0 < value <= most:
        raise ValueError(f"--{option}={value} is not above 0 and at most {most:g}; use a number in that range")
    return value


def _report(model: CountedModel, work: Work, free: list[int], calibration: Calibration, choice: Choice) -> dict:
    return {
        "model": model.name,
        "work": asdict(work),
        "free_bytes": free,
        "calibration": asdict(calibration),
        "plan": choice.plan.describe() if choice.plan else None,
        "chosen": _row(choice.chosen) if choice.chosen else None,
        "speedup": choice.speedup,
        "reasons": list(choice.reasons),
        "table": [_row(row) for row in choice.table],
    }


def _row(row: Prediction) -> dict:
    cost = row.cost
    return {
        "name": row.plan.name,
        "ranks": row.plan.ranks,
        "seconds_per_step": cost.step_s,
        "seconds_per_run": row.run_s,
        "compute_s": cost.compute_s,
        "communication_s": cost.communication_s,
        "launch_s": cost.launch_s,
        "bound": cost.bound,
        "bytes_per_rank": row.memory.total,
        "weight_bytes_per_rank": row.memory.weights,
        "host_bytes_per_rank": row.memory.host_bytes,
        "blocks_that_stay": row.staying,
        "reload_s": row.reload_s,
        "fits": row.fits,
        "exact": row.plan.pipefusion == 1,
        "graphs": row.without_graphs is not None,
    }


def describe(report: Mapping, paint: Paint = plain) -> str:
    """The report for people: the answer, every plan, why, and the answer again."""
    work = report["work"]
    head = (
        f"{report['model']}: {work['image_tokens']} image + {work['text_tokens']} text tokens, batch {work['batch']}"
        f"{', with cfg' if work['guided'] else ''}, {work['steps']} steps, {len(report['free_bytes'])} device(s) of "
        f"{report['calibration']['rates']['name']}, {min(report['free_bytes']) / GIB:.1f} GiB on each"
    )
    columns = f"  {'plan':26} {'s a step':>9} {'s a run':>9} {'GiB a rank':>11}  limited by"
    table, chosen = report["table"], report["chosen"]
    shown = table[:SHOWN]
    if chosen is not None and chosen in table[SHOWN:]:  # behind plans that do not fit
        shown[-1] = chosen
    rows = [_line(row, row == chosen, paint) for row in shown]
    left = len(table) - len(shown)
    more = [f"  and {left} more (--json lists them)"] if left > 0 else []
    answer = _answer(report, paint)
    reasons = [f"  {reason}" for reason in report["reasons"]]
    warnings = [paint(f"warning: {text}", "note") for text in report["warnings"]]
    return "\n".join([answer, *warnings, head, columns, *rows, *more, "why:", *reasons, answer])


def _answer(report: Mapping, paint: Paint) -> str:
    """The plan in a line, and what it is worth."""
    if report["chosen"] is None:
        return paint("plan: none fits", "bad")
    seconds = f"{report['chosen']['seconds_per_step']:.3g} s a step"
    gain = f", {report['speedup']:.2f}x as fast as one device" if report["speedup"] else ""
    return paint(f"plan: {report['plan']}, {seconds}{gain} (predicted)", "good")


def _line(row: Mapping, chosen: bool, paint: Paint) -> str:
    marks = [text for key, text in (("fits", "does not fit"), ("exact", "result differs")) if not row[key]]
    notes = [*marks, *(["with graphs of blocks"] if row["graphs"] else [])]
    if row["blocks_that_stay"]:
        notes.append(f"{row['blocks_that_stay']:.0%} of the blocks stay whole")
    if row["reload_s"]:
        notes.append(f"loaded again before each run, {row['reload_s']:.2g} s")
    note = f" ({', '.join(notes)})" if notes else ""
    gib = row["bytes_per_rank"] / GIB
    line = (
        f"{'>' if chosen else ' '} {row['name']:26} {row['seconds_per_step']:9.4g} {row['seconds_per_run']:9.4g} "
        f"{gib:11.1f}  {row['bound']}{note}"
    )
    return paint(line, "strong" if chosen else "dim") if chosen or marks else line
