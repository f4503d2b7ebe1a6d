"""TIMING: what one node measured, as plain values for JSON. What was not measured is absent, never zero.

Schema 1. Always: `schema`, `kind`. Kind `denoise`: `steps`, `denoise_s` (the sampler's loop, models already loaded),
`step_s` (per sampler step), `latent` (shape); for a parallel MODEL also `model`, `dtype`, `plan`, `plan_name`,
`devices`, `pool_generation`, `image_tokens`, `text_tokens`, `call_s` (per call of the model) and `ranks`, each with
`rank`, `device`, `call_s`, `communication_s` and `memory` as the worker reported them. Kind `vae_decode`:
`vae_decode_s`, `device`, `latent` and `image` (shapes).
"""

import os

from .host.decoding import DecodeRecord
from .host.sampling import SamplingRecord

SCHEMA = 1


def denoise_report(record: SamplingRecord, latent: dict) -> dict:
    """The report of a sampling run that ended with `latent`."""
    report = {
        "schema": SCHEMA,
        "kind": "denoise",
        "steps": len(record.step_s),
        "denoise_s": record.denoise_s,
        "step_s": record.step_s,
        "latent": list(latent["samples"].shape),
    }
    if record.pooled is not None and record.calls:
        report |= _pool_report(record)
    return report


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


def _pool_report(record: SamplingRecord) -> dict:
    pooled, last = record.pooled, record.calls[-1]
    return {
        "model": os.path.basename(pooled.spec.path),
        "dtype": pooled.spec.dtype,
        "plan": pooled.plan.to_dict(),
        "plan_name": pooled.plan.name,
        "devices": [str(device) for device in pooled.devices],
        "pool_generation": pooled.pool.generation,
        "image_tokens": last.image_tokens,
        "text_tokens": last.text_tokens,
        "call_s": [call.wall_s for call in record.calls],
        "ranks": [
            {
                "rank": rank,
                "device": str(device),
                "call_s": [call.ranks[rank]["step_s"] for call in record.calls],
                "communication_s": [call.ranks[rank]["communication_s"] for call in record.calls],
                "memory": last.ranks[rank]["memory"],
            }
            for rank, device in enumerate(pooled.devices)
        ],
    }
