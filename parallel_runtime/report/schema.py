"""The schema of a report, version 1: which fields there are, what they may hold, and a validator.

docs/report.md explains each field; a test holds the two together. A report is plain JSON. What was not measured is
absent: no field is ever null, and 0 means that it was measured and is 0.

Owns the schema alone; build.py fills it in. Plain Python.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..plan import AXES
from ..redact_paths import NOT_SHM

SCHEMA = "parallel-dit/report/1"
KINDS = ("denoise", "vae", "benchmark")
LOOPS = ("host", "resident")  # "resident": the worker loop
PROOFS = ("not proven", "proven", "not needed")  # the least that is known first; a refused plan has no run
CASE_KINDS = ("plan", "one_rank", "one_process")
REGIONS = (
    "hand_over_s",
    "embed_s",
    "double_blocks_s",
    "single_blocks_s",
    "modulation_s",
    "attention_s",
    "communication_s",
    "weights_s",
    "compile_s",
    "head_s",
    "gather_s",
)
# From / or C:\ or a home folder, at the start or after a space or quote: what a report must not tell about a machine.
_PLACE = re.compile(rf"""(^|[\s"'=(])({NOT_SHM}/[\w.]|~/|[A-Za-z]:\\)""")

Check: TypeAlias = Callable[[object], str]  # "" when the value is well, else what it should be


class ReportError(ValueError):
    """A report that is not as the schema says; the text names the field, the value and what belongs there."""


@dataclass(frozen=True)
class Field:
    """One field: what it may hold, or, for an object, its own fields; `many` for a list of these."""

    check: Check | None = None
    required: bool = False
    many: bool = False
    fields: Mapping[str, "Field"] = field(default_factory=dict)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        return "a text that is not empty"
    return "a text without the path of a file or folder" if _PLACE.search(value) else ""


def _name(value: object) -> str:
    if not isinstance(value, str) or not value or "/" in value or "\\" in value:
        return "a name without slashes"
    return ""


def _number(value: object) -> str:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return "" if good else "a finite number"


def _count(value: object) -> str:
    return "" if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "a whole number from 0 on"


def _seconds(value: object) -> str:
    return _number(value) or ("" if float(value) >= 0 else "0 or more")  # type: ignore[arg-type]  # _number has seen it


def _share(value: object) -> str:
    return _seconds(value) or ("" if float(value) <= 1 else "0 to 1")  # type: ignore[arg-type]  # _number has seen it


def _pieces(value: object) -> str:
    good = isinstance(value, list) and all(
        isinstance(piece, list) and len(piece) == 3 and not any(map(_count, piece)) for piece in value
    )
    return "" if good else "a list of [call, first row, row after the last]"


def _flag(value: object) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _created(value: object) -> str:
    good = isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value)
    return "" if good else "a time in UTC such as 2026-01-31T12:00:00Z"


def _run_id(value: object) -> str:
    return "" if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) else "32 hexadecimal digits"


def _digest(value: object) -> str:
    good = isinstance(value, str) and re.fullmatch(r"[0-9a-f]{12}", value)
    return "" if good else "12 hexadecimal digits"


def _one_of(*values: str) -> Check:
    return lambda value: "" if value in values else f"one of {', '.join(values)}"


def _needed(check: Check) -> Field:
    return Field(check, required=True)


def _object(fields: Mapping[str, Field], *, required: bool = False, many: bool = False) -> Field:
    return Field(required=required, many=many, fields=fields)


SERIES = Field(_seconds, many=True)
PLAN = {
    "name": _needed(_name),
    "ranks": _needed(_count),
    "degrees": _object({axis: _needed(_count) for axis in AXES}, required=True),
    "weights": _needed(_text),
    "patches": Field(_count),
    "warmup_steps": Field(_count),
    "chosen_for": Field(_text),
    "reasons": Field(_text, many=True),
}
RANK = {
    "rank": _needed(_count),
    "device": _needed(_name),
    "lane": Field(_count),
    "released_bytes": Field(_count),  # in reports of versions up to 0.2
    "load_s": Field(_seconds),
    "prepare_s": Field(_seconds),
    "prepare_regions": _object({name: Field(_seconds) for name in REGIONS}),
    "finish_s": Field(_seconds),
    "begin_s": SERIES,
    "end_s": SERIES,
    "busy_s": SERIES,
    "compute_s": SERIES,
    "communication_s": SERIES,
    "idle_s": SERIES,
    "regions": _object({name: SERIES for name in REGIONS}),
    "collectives": Field(_count, many=True),
    "sent_bytes": Field(_count, many=True),
    "weight_bytes": Field(_count, many=True),
    "run_sent_bytes": Field(_count),
    "run_weight_bytes": Field(_count),
    "pieces": Field(_pieces, many=True),
    "attention": Field(_text),
    "memory": _object({f"{kind}_bytes": Field(_count) for kind in ("allocated", "reserved", "resident", "staying")}),
    "utilisation": Field(_share),
}
LOOP = {"kind": _needed(_one_of(*LOOPS)), "reason": Field(_text)}
PATCHES = {
    "name": _needed(_digest),
    "weights": _needed(_count),
    "strengths": Field(_number, required=True, many=True),
    "side_branch": _needed(_flag),
}
CONTROL = {
    "kind": _needed(_name),
    "name": _needed(_digest),
    "strength": _needed(_number),
    "start": _needed(_share),
    "end": _needed(_share),
}
CASE = {
    "work": Field(_digest),
    "name": _needed(_text),
    "kind": _needed(_one_of(*CASE_KINDS)),
    "engine": _needed(_name),
    "plan": _object(PLAN),
    "loop": _object(LOOP),
    "threads": Field(_count),
    "run_s": Field(_seconds, required=True, many=True),
    "median_s": _needed(_seconds),
    "min_s": _needed(_seconds),
    "max_s": _needed(_seconds),
    "spread_s": Field(_seconds),
    "slowest_rank_s": Field(_seconds),
    "compile_s": Field(_seconds),
    "graphs": Field(_count),
    "blocks_s": SERIES,
    "blocks_median_s": Field(_seconds),
    "speedup": Field(_seconds),
    "speedup_over_one_process": Field(_seconds),
    "block_speedup": Field(_seconds),
    "end_to_end_over_block": Field(_seconds),
    "error": Field(_seconds),
    "stale_difference": Field(_seconds),
    "ranks": _object(RANK, many=True),
}
REPORT = {
    "schema": _needed(_one_of(SCHEMA)),
    "kind": _needed(_one_of(*KINDS)),
    "run_id": _needed(_run_id),
    "created": _needed(_created),
    "from_cache": _needed(_flag),
    "prompt_id": Field(_name),
    "warnings": Field(_text, many=True),
    "versions": _object(
        {name: _needed(_text) for name in ("pack", "python", "torch")}
        | {name: Field(_text) for name in ("comfyui", "cuda", "driver")},
        required=True,
    ),
    "devices": _object(
        {
            "name": _needed(_name),
            "kind": _needed(_name),
            "model": Field(_text),
            "memory_bytes": Field(_count),
            "free_bytes": Field(_count),
            "gflops": Field(_seconds),
        },
        required=True,
        many=True,
    ),
    "work": Field(_digest),
    "model": _object({"file": _needed(_name), "dtype": _needed(_name), "patches": _object(PATCHES)}),
    "controls": _object(CONTROL, many=True),
    "plan": _object(PLAN),
    "proof": _object(
        {"verdict": _needed(_one_of(*PROOFS)), "reason": Field(_text), "found": Field(_text)}
        | {name: Field(_seconds) for name in ("error", "control", "tolerance", "seconds")}
        | {name: Field(_count) for name in ("tokens", "calls")}
    ),
    "sizes": _object(
        {
            name: Field(_count)
            for name in ("width", "height", "frames", "batch", "images", "image_tokens", "text_tokens")
        }
    ),
    "pool": _object({"generation": _needed(_count)}),
    "options": _object({name: Field(_name, required=True, many=True) for name in ("workers", "comfyui_alone")}),
    "sampling": _object(
        {name: Field(_count) for name in ("steps", "seed", "at_once")}
        | {name: Field(_text) for name in ("sampler", "scheduler")}
        | {name: Field(_number) for name in ("cfg", "denoise")}
    ),
    "inputs": _object({"seed": _needed(_count)}),
    "loop": _object(LOOP),
    "exchange": Field(_name),
    "step_caches": _object(
        {"name": _needed(_text), "threshold": _needed(_number), "counts": _needed(_one_of("steps", "calls"))}
        | {"skipped": _needed(_count), "of": _needed(_count)},
        many=True,
    ),
    "kept": _object(
        {name: _needed(_count) for name in ("calls", "found", "bytes")} | {"tokens": Field(_count, many=True)}
    ),
    "warmup": Field(_count),
    "runs": Field(_count),
    "timings": _object(
        {
            "per": Field(_one_of("step", "request")),
            "load_s": Field(_seconds),
            "prepare_s": Field(_seconds),
            "denoise_s": Field(_seconds),
            "first_step_s": Field(_seconds),
            "step_s": SERIES,
            "rank0_s": SERIES,
            "slowest_rank_s": SERIES,
            "slowest_rank": Field(_count, many=True),
            "skew_s": SERIES,
            "request_s": SERIES,
            "calls": Field(_count, many=True),
        }
    ),
    "images": _object(
        {"denoise_s": Field(_seconds), "step_s": SERIES, "latent": Field(_count, many=True), "seed": Field(_count)},
        many=True,
    ),
    "ranks": _object(RANK, many=True),
    "vae": _object(
        {
            "decode_s": _needed(_seconds),
            "run_s": SERIES,
            "device": _needed(_name),
            "tiles": Field(_count),
            "load_s": Field(_seconds),
            "rank_tiles": Field(_count, many=True),
            "rank_s": SERIES,
            "latent": Field(_count, many=True),
            "image": Field(_count, many=True),
        }
    ),
    "contenders": _object(CASE, many=True),
    "traces": Field(_name, many=True),
}
# What each kind of report cannot be without.
PARTS = {"denoise": ("sampling", "timings"), "vae": ("vae",), "benchmark": ("contenders", "warmup", "runs", "sizes")}


def validate(report: object) -> None:
    """Raise `ReportError` when `report` is not as the schema says: a field too many, too few, or of other content."""
    if not isinstance(report, Mapping):
        raise ReportError(f"a report is a JSON object, this is a {type(report).__name__}")
    for problem in _problems("", report, REPORT):
        raise ReportError(problem)
    for part in PARTS[report["kind"]]:
        if part not in report:
            raise ReportError(f"{part} is missing in a report of kind {report['kind']}; add it")
    _require_same_length(report)


def fields(of: Mapping[str, Field] = REPORT, inside: str = "") -> Iterator[tuple[str, Field]]:
    """Every field of the schema by its dotted name; `[]` after that of a list of objects."""
    for name, each in of.items():
        yield inside + name, each
        yield from fields(each.fields, f"{inside}{name}{'[]' if each.many else ''}.")


def _problems(inside: str, values: Mapping, known: Mapping[str, Field]) -> Iterator[str]:
    for name in values:
        if name not in known:
            yield f"{inside}{name} is not a field of {SCHEMA}; use one of {', '.join(known)}"
    for name, each in known.items():
        if name in values:
            yield from _field_problems(inside + name, values[name], each)
        elif each.required:
            yield f"{inside}{name} is missing; add it"


def _field_problems(name: str, value: object, each: Field) -> Iterator[str]:
    if each.many:
        if not isinstance(value, list):
            yield f"{name} is {value!r}; use a list"
            return
        for number, entry in enumerate(value):
            yield from _value_problems(f"{name}[{number}]", entry, each)
    else:
        yield from _value_problems(name, value, each)


def _value_problems(name: str, value: object, each: Field) -> Iterator[str]:
    if each.check is not None:
        expected = each.check(value)
        if expected:
            yield f"{name} is {value!r}; use {expected}, or leave it out when it was not measured"
    elif not isinstance(value, Mapping):
        yield f"{name} is {value!r}; use an object"
    else:
        yield from _problems(f"{name}.", value, each.fields)


def _require_same_length(report: Mapping) -> None:
    """All series of all ranks run over the same steps, or they could not be drawn side by side."""
    groups = [report.get("ranks", [])] + [each.get("ranks", []) for each in report.get("contenders", [])]
    for ranks in groups:
        lengths: dict[int, str] = {}
        for rank in ranks:
            for name, values in [*rank.items(), *rank.get("regions", {}).items()]:
                if isinstance(values, list):
                    lengths[len(values)] = f"ranks[{rank['rank']}].{name}"
        if len(lengths) > 1:
            found = ", ".join(f"{name} has {length}" for length, name in sorted(lengths.items()))
            raise ReportError(f"series of different lengths: {found}; give every series one entry a step")
