"""`find-plan`: the plan of a file's class, found by looking at its calls, proven, printed and kept."""

import argparse
import os
import pprint
from collections.abc import Mapping

from ..models.specs import SPECS
from ..models.specs.found import told_by
from ..planner.comfyui_process import find_comfyui
from ..planner.finding import find_plan
from .terminal import SILENT, Paint, PhaseLine, plain

WHAT_WORKS = "cfg parallel, data parallel and sharded weights need no plan"


def run(arguments: argparse.Namespace, progress: PhaseLine = SILENT) -> dict:
    """Find it. Raises `ValueError` for a file or a ComfyUI that cannot be used, and for a model no call is made of."""
    comfyui = find_comfyui(arguments.comfyui)
    path = os.path.abspath(arguments.file)
    if not os.path.isfile(path):
        raise ValueError(f"{arguments.file} is no file; name a .safetensors file of a diffusion model")
    progress.phase("looking at the model's calls in a ComfyUI process")
    report = find_plan(path, comfyui)
    return report | {"written": report["class"] in SPECS}


def describe(report: Mapping, paint: Paint = plain) -> str:
    """The report for people: the plan in the words of parallel_runtime/models/specs, and what it rests on."""
    lines = [f"{report['class']} of ComfyUI {report['comfyui']}, {report['seconds']:.0f} s"]
    lines += [f"  refused: {each}" for each in report["tried"]]
    if report["refused"]:
        return "\n".join([*lines, paint(f"no plan: {report['refused']}; {WHAT_WORKS}", "bad")])
    lines += [f"  {each}" for each in pprint.pformat(report["plan"], width=110, sort_dicts=False).splitlines()]
    lines += [f"  seen: {each}" for each in report["rests_on"]]
    lines += [f"  it holds for calls with {each} too" for each in report["with"]]
    if report["written"]:
        lines.append("  the pack has a plan that people wrote for this class, and uses that")
    if report["kept"]:
        lines.append(f"  kept in {report['kept']}")
    return "\n".join([*lines, paint(f"found, proven: {told_by(report['cuts'], report)}", "good")])
