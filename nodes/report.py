"""TIMING: what one node measured, as plain values for JSON. What was not measured is absent, never zero.

Schema 1. Always: `schema`, `kind`. Kind `denoise`: `steps`, `denoise_s` (the sampler's loop, models already loaded),
`step_s` (per sampler step), `latent` (shape); for a parallel MODEL also `model`, `dtype`, `plan`, `plan_name`,
`devices`, `pool_generation`, `image_tokens`, `text_tokens`, `call_s` (per request to the pool), `calls` (how many calls
of the model each request carried) and `ranks`, each with `rank`, `device`, `call_s`, `communication_s`, `lane`,
`pieces` (per request, the rows it ran: call, first, after the last) and `memory` as the worker reported them, and
`measured` of its device; a rank that the plan does not need only `sleeps`; `warnings` about unequal devices. Kind
`denoise_list`: `images`, each as `denoise` without a MODEL's part, `at_once` (how many were in flight) and `denoise_s`
of all, and that part for all of them together. Kind `vae_decode`: `vae_decode_s`, `device`, `latent` and `image`
(shapes).
"""

import os
from collections.abc import Sequence

from .host.decoding import DecodeRecord
from .host.list_sampling import ListRecord
from .host.measures import unequal
from .host.pooled_model import PooledModel, Request
from .host.sampling import SamplingRecord

SCHEMA = 1
PER_REQUEST = {"call_s": "step_s", "communication_s": "communication_s", "pieces": "pieces"}
LAST = ("lane", "memory")


def denoise_report(record: SamplingRecord, latent: dict) -> dict:
    """The report of a sampling run that ended with `latent`."""
    report = {"schema": SCHEMA, "kind": "denoise"} | _run_report(record, latent)
    return report | _pool_report(record.pooled, record.requests)


def list_report(record: ListRecord, latents: Sequence[dict]) -> dict:
    """The report of a list of sampling runs that ended with `latents`."""
    report = {
        "schema": SCHEMA,
        "kind": "denoise_list",
        "images": [_run_report(run, latent) for run, latent in zip(record.runs, latents, strict=True)],
        "at_once": record.at_once,
        "denoise_s": record.denoise_s,
    }
    return report | _pool_report(record.pooled, record.requests)


def decode_report(record: DecodeRecord) -> dict:
    """The report of one decode."""
    return {
        "schema": SCHEMA,
        "kind": "vae_decode",
        "vae_decode_s": record.decode_s,
        "device": str(record.device),
        "latent": list(record.latent_shape),
        "image": list(record.image_shape),
    }


def _run_report(record: SamplingRecord, latent: dict) -> dict:
    return {
        "steps": len(record.step_s),
        "denoise_s": record.denoise_s,
        "step_s": record.step_s,
        "latent": list(latent["samples"].shape),
    }


def _pool_report(pooled: PooledModel | None, requests: Sequence[Request]) -> dict:
    if pooled is None or not requests:
        return {}
    _, image_tokens, text_tokens = max(requests[-1].calls, key=lambda call: call[1:])
    warnings = unequal(pooled.measured[: pooled.plan.ranks])
    report = {
        "model": os.path.basename(pooled.spec.path),
        "dtype": pooled.spec.dtype,
        "plan": pooled.plan.to_dict(),
        "plan_name": pooled.plan.name,
        "devices": [str(device) for device in pooled.devices],
        "pool_generation": pooled.pool.generation,
        "image_tokens": image_tokens,
        "text_tokens": text_tokens,
        "call_s": [request.wall_s for request in requests],
        "calls": [len(request.calls) for request in requests],
        "ranks": [_rank_report(pooled, rank, requests) for rank in range(len(pooled.devices))],
    }
    return report | ({"warnings": warnings} if warnings else {})


def _rank_report(pooled: PooledModel, rank: int, requests: Sequence[Request]) -> dict:
    report = {"rank": rank, "device": str(pooled.devices[rank])}
    if rank >= pooled.plan.ranks:
        return report | {"sleeps": True}
    said = [request.ranks[rank] for request in requests]
    for name, in_worker in PER_REQUEST.items():
        if all(in_worker in each for each in said):
            report[name] = [each[in_worker] for each in said]
    report |= {name: said[-1][name] for name in LAST if name in said[-1]}
    measured = pooled.measured
    return report | ({"measured": measured[rank]} if measured else {})
