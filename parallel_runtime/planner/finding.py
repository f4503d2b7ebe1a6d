"""The plan of a file's class, asked of a process that looks at the class's calls (worker/finding.py), and kept.

Owns the asking and what of the answer is kept. Does not own what is kept where (models/specs/found.py).
"""

import os
from collections.abc import Callable
from typing import Any

from ..checkpoint import ComfyUI
from ..models.specs.found import found_specs, key_in
from ..models.specs.written import from_data
from .comfyui_process import ComfyUIProcess, version_of

PROGRAM = "parallel_runtime.worker.finding"


def find_plan(
    path: str,
    comfyui: ComfyUI,
    *,
    checkpoint: bool = False,
    limit_s: float | None = None,
    tick: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """What `worker.finding.Finding.find` answers of a file, with `comfyui`, its version, and `kept`, the file that has
    it now, "" where none could be written.

    `checkpoint` as `ModelSpec.checkpoint`; `limit_s` and `tick` as `ComfyUIProcess` takes them. Raises `ValueError` for
    a file or a ComfyUI that cannot be used, and for a model of which no call is made; `NoAnswerError` where the process
    ended or ran out of time; and what `tick` raises.
    """
    with ComfyUIProcess(comfyui, "cpu", counting=True, program=PROGRAM, limit_s=limit_s, tick=tick) as process:
        report = process.ask("find", path=os.path.abspath(path), checkpoint=checkpoint, limit_s=limit_s)
    report |= {"comfyui": version_of(comfyui), "kept": ""}
    key, kept = key_in(report), found_specs()
    if report["refused"]:
        done = kept.save_refusal(key, report["refused"])
    else:
        errors = {name: report[name] for name in ("error", "control")}
        done = kept.save(key, from_data(report["plan"]), cuts=report["cuts"], errors=errors)
    return report | {"kept": str(kept.path) if done else ""}
