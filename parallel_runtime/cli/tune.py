"""`tune`: which exact plan is quickest for a kind of work, measured on these devices and kept for ComfyUI's next run.

Owns the reading of the options and the printing. The plans are tried by the nodes' own code in a process with ComfyUI
(nodes/host/proof/tuning.py), so that what is kept is found by it.
"""

import argparse
import os
import shlex
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from ..devices import parse_devices
from ..planner.comfyui_process import ComfyUIProcess, find_comfyui
from ..trials.workload import is_guided
from .terminal import SILENT, Paint, PhaseLine, plain

PROGRAM = "parallel_runtime.cli.with_pack"


def run(arguments: argparse.Namespace, progress: PhaseLine = SILENT) -> dict:
    """Tune. Raises `ValueError` for what cannot be tuned, `PoolError` never: a plan that fails is kept out."""
    if not os.path.isfile(arguments.file):
        raise ValueError(f"{arguments.file} is no file; name a .safetensors file of a diffusion model")
    devices = parse_devices(arguments.devices).devices
    comfyui = replace(find_comfyui(arguments.comfyui), options=_options(arguments.comfyui_options))
    asked = {name: getattr(arguments, name) for name in ("width", "height", "frames", "text_tokens", "batch")}
    asked |= {"guided": is_guided(arguments.cfg), "seconds": arguments.seconds}
    config = {"mode": "auto", "devices": arguments.devices, "weights": arguments.weights}
    progress.phase("starting ComfyUI without a server")
    with closing(ComfyUIProcess(comfyui, str(devices[0]).split(":")[0], program=PROGRAM)) as process:
        given = {"path": os.path.abspath(arguments.file), "config": config, "dtype": arguments.dtype, "asked": asked}
        return process.ask("tune", progress.phase, **given)


def _options(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"--comfyui-options={text}: {error}; quote it as a shell would take it") from error


def describe(report: Mapping, paint: Paint = plain) -> str:
    """The report for people: the sentence, each plan as predicted and as measured, and the sentence again."""
    found = report["kept"] is not None
    answer = paint(report["line"], "good" if found else "note")
    head = f"{report['model']}: {report['work']}, on {', '.join(report['devices'])}"
    rows = [f"  {'plan':26} {'predicted s':>11} {'measured s':>11}"]
    for row in report["plans"]:
        said = row["failed"] or ("not measured" if row["step_s"] is None else f"{row['step_s']:.4g}")
        by_graphs = "" if row["graphs_s"] is None else f"  {row['graphs_s']:.4g} with graphs of blocks"
        rows.append(f"  {row['name']:26} {row['predicted_s']:11.4g} {said:>11}{by_graphs}")
    kept = f"kept for the next run of such work in ComfyUI, where SP Config's mode is auto: {report['kept']}"
    spent = f"{report['copies']} copies of a step in {report['took_s']:.1f} s"
    warnings = [paint(f"warning: {text}", "note") for text in report["warnings"]]
    return "\n".join([answer, *warnings, head, *rows, spent, *([kept] if found else []), answer])
