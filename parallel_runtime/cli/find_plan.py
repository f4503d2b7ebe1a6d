"""`find-plan`: the plan of a file's class, found by looking at its calls, proven, printed and kept.

A process of its own looks (worker/finding.py). What is proven is kept by models/specs/found.py.
"""

import argparse
import os
import pprint
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from ..models.specs import SPECS
from ..models.specs.found import FoundKey, FoundPlans
from ..models.specs.written import from_data
from ..planner.comfyui_process import ComfyUIProcess, find_comfyui, version_of
from .terminal import SILENT, Paint, Progress, plain

PROGRAM = "parallel_runtime.worker.finding"
WHAT_WORKS = "cfg parallel, data parallel and sharded weights need no plan"


def run(arguments: argparse.Namespace, progress: Progress = SILENT) -> dict:
    """Find it. Raises `ValueError` for a file or a ComfyUI that cannot be used, and for a model no call is made of."""
    comfyui = find_comfyui(arguments.comfyui)
    path = os.path.abspath(arguments.file)
    if not Path(path).is_file():
        raise ValueError(f"{arguments.file} is no file; name a .safetensors file of a diffusion model")
    progress.phase("looking at the model's calls in a ComfyUI process")
    with closing(ComfyUIProcess(comfyui, "cpu", counting=True, program=PROGRAM)) as process:
        report = process.ask("find", path=path)
    report |= {"comfyui": version_of(comfyui), "written": report["class"] in SPECS, "kept": ""}
    if not report["refused"]:
        key = FoundKey(model_class=report["class"], source=report["source"], comfyui=report["comfyui"])
        kept = FoundPlans(FoundPlans.default_path(os.environ, Path.home()))
        errors = {"error": report["error"], "control": report["control"]}
        if kept.save(key, from_data(report["plan"]), cuts=report["cuts"], errors=errors):
            report["kept"] = str(kept.path)
    return report


def describe(report: Mapping, paint: Paint = plain) -> str:
    """The report for people: the plan in the words of parallel_runtime/models/specs, and what it rests on."""
    lines = [f"{report['class']} of ComfyUI {report['comfyui']}, {report['seconds']:.0f} s"]
    lines += [f"  refused: {each}" for each in report["tried"]]
    if report["refused"]:
        return "\n".join([*lines, paint(f"no plan: {report['refused']}; {WHAT_WORKS}", "bad")])
    lines += [f"  {each}" for each in pprint.pformat(report["plan"], width=110, sort_dicts=False).splitlines()]
    lines += [f"  seen: {each}" for each in report["rests_on"]]
    if report["written"]:
        lines.append("  the pack has a plan that people wrote for this class, and uses that")
    if report["kept"]:
        lines.append(f"  kept in {report['kept']}")
    said = f"found, proven: {report['cuts']}, relative error {report['error']:.1e}, "
    said += f"without exchange {report['control']:.1e}"
    return "\n".join([*lines, paint(said, "good")])
