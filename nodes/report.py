"""TIMING: what a node measured, in the one schema of docs/report.md. Owns which record becomes which part."""

import re
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from ..parallel_runtime.devices import Device
from ..parallel_runtime.exchange_formats import rounding_of
from ..parallel_runtime.planner.automatic import Decision
from ..parallel_runtime.pool.known_errors import OVER_HOST
from ..parallel_runtime.proof import NOT_PROVEN, Proof
from ..parallel_runtime.report.build import (
    Span,
    cached_calls,
    kept_part,
    new_report,
    plan_part,
    proof_part,
    rank_parts,
    span_timings,
    spans_of_run,
)
from ..parallel_runtime.report.environment import utilisation
from .host.contract.like_host import options_part
from .host.contract.version import comfyui_version
from .host.model.measures import other_attention, unequal, widened
from .host.model.pooled_model import PooledModel
from .host.panel.progress import prompt_id
from .host.sampling.run_context import MeasuredRequest
from .host.sampling.stock import SamplingRecord
from .host.tasks.list_sampling import ListRecord
from .host.vae.decoding import DecodeRecord

ASKED = {"steps": "steps", "seed": "seed", "sampler_name": "sampler", "scheduler": "scheduler", "cfg": "cfg"}
ASKED |= {"denoise": "denoise"}


def denoise_report(record: SamplingRecord, settings: Mapping[str, object], applied: Mapping[str, object]) -> dict:
    """The report of a sampling run with these settings; `applied` to it as host/sampling/applied.py says."""
    spans = steps_of(record)
    ranks = _ranks(record.pooled, spans, began_s=record.began_s, took_s=record.denoise_s)
    for rank in ranks:
        if rank["rank"] in record.rank_load_s:
            rank["load_s"] = record.rank_load_s[rank["rank"]]
    timings: dict = {"load_s": record.load_s, "denoise_s": record.denoise_s, "step_s": record.step_s}
    if record.step_s:
        timings |= {"per": "step", "first_step_s": record.step_s[0]}
    if record.loop == "resident":
        timings["prepare_s"] = max(rank.ran.prepare_s for rank in record.requests[-1].ranks if rank.ran is not None)
    return _report(
        "denoise",
        record.pooled,
        applied=applied,
        decision=record.decision,
        devices=[] if record.device is None else [_device(record.device)],
        warnings=[*unproven(record.proofs), *_rounded(record.requests), *record.remarks],
        exchange=_exchange_of(record.requests),
        sampling=_asked(settings),
        sizes=record.sizes,
        loop=loop_of(record),
        proof=proof_part(record.proofs, found=record.pooled.found_by if record.pooled else ""),
        step_caches=_step_caches([record]),
        kept=kept_part([request.ranks for request in record.requests]),
        timings=timings | _request_timings(record.requests) | span_timings(ranks),
        ranks=ranks,
    )


def list_report(
    record: ListRecord,
    latents: Sequence[dict],
    settings: Sequence[Mapping[str, object]],
    applied: Mapping[str, object],
) -> dict:
    """The report of a list of sampling runs with these settings that ended with `latents`; `applied` to the first."""
    began_s = min((run.began_s for run in record.runs if run.began_s), default=0.0)  # of denoise 0 none begins
    spans = [Span(wall_s=request.wall_s, requests=[request.ranks]) for request in record.requests]
    ranks = _ranks(record.pooled, spans, began_s=began_s, took_s=record.denoise_s)
    runs = zip(record.runs, latents, settings, strict=True)
    timings = {"per": "request", "denoise_s": record.denoise_s}
    proofs = [proof for run in record.runs for proof in run.proofs]
    return _report(
        "denoise",
        record.pooled,
        applied=applied,
        decision=record.runs[-1].decision,
        warnings=[
            *unproven(proofs),
            *_rounded(record.requests),
            *dict.fromkeys(text for run in record.runs for text in run.remarks),
        ],
        exchange=_exchange_of(record.requests),
        sampling=_asked(settings[0]) | {"at_once": record.at_once},
        sizes=record.runs[0].sizes | {"images": len(latents)},
        loop={"kind": "host"},
        proof=proof_part(proofs, found=record.pooled.found_by if record.pooled else ""),
        step_caches=_step_caches(record.runs),
        kept=kept_part([request.ranks for request in record.requests]),
        timings=timings | _request_timings(record.requests) | span_timings(ranks),
        images=[
            {
                "denoise_s": run.denoise_s,
                "step_s": run.step_s,
                "latent": list(latent["samples"].shape),
                "seed": asked["seed"],
            }
            for run, latent, asked in runs
        ],
        ranks=ranks,
    )


def decode_report(record: DecodeRecord) -> dict:
    """The report of one decode."""
    vae = {
        "decode_s": record.decode_s,
        "device": ", ".join(map(str, record.devices)) or str(record.device),
        "latent": list(record.latent_shape),
        "image": list(record.image_shape),
    }
    if record.ranks:
        vae |= {
            "tiles": record.num_tiles,
            "load_s": record.load_s,
            "rank_tiles": [rank.num_tiles for rank in record.ranks],
            "rank_s": [rank.decode_s for rank in record.ranks],
        }
    height, width = record.image_shape[-3:-1]
    return _report(
        "vae",
        None,
        devices=record.devices or [_device(record.device)],
        warnings=[record.note] if record.note else (),
        vae=vae,
        sizes={"width": width, "height": height, "images": record.image_shape[0]},
    )


def benchmark_report(
    pooled: PooledModel,
    settings: Mapping[str, object],
    requests: Sequence[MeasuredRequest],
    *,
    applied: Mapping[str, object],
    warnings: Sequence[str],
    decodes: Sequence[DecodeRecord],
    sizes: Mapping[str, int],
    **parts: object,
) -> dict:
    """The report of a benchmark of sampling runs with these settings; `requests` are of any run in the workers."""
    if decodes:
        seconds = [each.decode_s for each in decodes]
        parts["vae"] = {"decode_s": median(seconds), "run_s": seconds, "device": str(decodes[0].device)}
    return _report(
        "benchmark",
        pooled,
        applied=applied,
        warnings=[*warnings, *_rounded(requests)],
        exchange=_exchange_of(requests),
        sampling=_asked(settings),
        sizes=sizes,
        **parts,
    )


def unproven(proofs: Sequence[Proof]) -> list[str]:
    """A warning for each kind of call whose plan could not be proven, which the panel shows too."""
    texts = [f"with this ComfyUI the plan is {proof.text}" for proof in proofs if proof.verdict == NOT_PROVEN]
    return list(dict.fromkeys(texts))


def _exchange_of(requests: Sequence[MeasuredRequest]) -> str:
    """As what ranks sent each other heads in these requests, where that rounded; "" where it did not."""
    return next((rank.ran.exchange for each in requests for rank in each.ranks if rank.ran and rank.ran.exchange), "")


def _rounded(requests: Sequence[MeasuredRequest]) -> list[str]:
    """A warning where what ranks sent each other was rounded."""
    exchange = _exchange_of(requests)
    return [rounding_of(exchange)] if exchange else []


def loop_of(record: SamplingRecord) -> dict[str, str]:
    """Where the loop of a run was, and why there where the other was asked for."""
    return {"kind": record.loop} | ({} if record.loop_reason is None else {"reason": record.loop_reason})


def _step_caches(runs: Sequence[SamplingRecord]) -> list[dict]:
    """What step caches skipped in these runs together: ComfyUI's steps of a run, ours calls of the model."""
    stock = [run.skipped for run in runs if run.skipped is not None]
    found = []
    if stock:
        counts = {"skipped": sum(each.skipped for each in stock), "of": sum(each.steps for each in stock)}
        found.append({"name": stock[0].name, "threshold": stock[0].threshold, "counts": "steps", **counts})
    recorders = {id(run.recorder): run.recorder for run in runs}.values()
    ours = [cached_calls(request.ranks) for recorder in recorders for request in recorder.requests]
    if any(each.calls for each in ours):
        counts = {"skipped": sum(each.skipped for each in ours), "of": sum(each.calls for each in ours)}
        threshold = max(run.step_cache for run in runs)
        found.append({"name": "first block", "threshold": threshold, "counts": "calls", **counts})
    return found


def steps_of(record: SamplingRecord) -> list[Span]:
    """The steps of a run with the requests made in each; a request belongs to the step in which it began.

    A run inside the workers was one request, whose ranks say what each step took.
    """
    if record.loop == "resident":
        return spans_of_run(record.requests[-1].ranks, record.step_s)
    ends, now = [], record.began_s
    for seconds in record.step_s:
        now += seconds
        ends.append(now)
    within: list[list[MeasuredRequest]] = [[] for _ in ends]
    for request in record.requests:
        number = next((number for number, end in enumerate(ends) if request.began_s <= end), len(ends) - 1)
        if within:
            within[number].append(request)
    return [
        Span(wall_s=seconds, requests=[request.ranks for request in requests])
        for seconds, requests in zip(record.step_s, within, strict=True)
    ]


def _report(
    kind: str,
    pooled: PooledModel | None,
    *,
    applied: Mapping[str, object] | None = None,
    decision: Decision | None = None,
    devices: Sequence[Device] | None = None,
    warnings: Sequence[str] = (),
    **parts: object,
) -> dict:
    """A report of `kind` with what a parallel MODEL adds to it; `decision`: what it ran."""
    if pooled is not None:
        devices = pooled.devices
        plan = pooled.plan if decision is None else decision.plan
        warnings = [
            *warnings,
            *pooled.unlike_host,
            *([f"{why}; {OVER_HOST}"] if (why := pooled.pool.broken_copies) else []),
            *unequal(devices, pooled.measured[: plan.ranks]),
            *other_attention(pooled.rounding_attention, plan.ring),
            *widened(pooled.widened_formats),
        ]
        file = re.split(r"[/\\]", pooled.spec.path)[-1]  # archives of Windows leave backslashes in names
        model = {"file": file, "dtype": pooled.spec.dtype}
        more = dict(applied or {})
        controls = more.pop("controls", [])
        parts |= {
            "model": model | more,
            "controls": controls,
            **({} if decision is None else {"plan": _plan(decision)}),
            "pool": {"generation": pooled.pool.generation},
            "options": options_part(),
        }
    report = new_report(
        kind,
        devices=devices or (),
        comfyui=comfyui_version() or "",
        prompt_id=prompt_id(),
        warnings=list(warnings),
        **parts,
    )
    if pooled is not None:
        for device, found in zip(report["devices"], pooled.measured, strict=False):
            device |= {"free_bytes": found.free_bytes, "gflops": found.gflops}
    return report


def _plan(decision: Decision) -> dict:
    return plan_part(decision.plan, chosen_for=decision.chosen_for, reasons=decision.reasons)


def _ranks(pooled: PooledModel | None, spans: Sequence[Span], *, began_s: float, took_s: float) -> list[dict]:
    if pooled is None or not any(span.requests for span in spans):
        return []
    busy = utilisation(pooled.devices, over_s=took_s)
    return rank_parts(spans, pooled.devices, began_s=began_s, utilisation=busy)


def _request_timings(requests: Sequence[MeasuredRequest]) -> dict:
    if not requests:
        return {}
    return {
        "request_s": [request.wall_s for request in requests],
        "calls": [request.num_calls for request in requests],
    }


def _asked(settings: Mapping[str, object]) -> dict:
    return {ours: settings[theirs] for theirs, ours in ASKED.items()}


def _device(device: torch.device) -> Device:
    return Device(device.type, device.index or 0)
