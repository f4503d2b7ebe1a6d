"""Experiment 4: what a file's format costs, with ComfyUI's options for it: a process for each choice of options.

ComfyUI reads its options once, when it is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .setting import ROOT, Result, Setting

PLAIN = "float8_e4m3fn"  # matrices of blocks rounded, without scales
# The others as tests/host/quantised.py writes them; half of the official templates' use is of the last.
FORMATS = (PLAIN, "fp8 e4m3", "int8, a scale a row", "int8, rotated")
OPTIONS: tuple[tuple[str, ...], ...] = ((), ("--fast", "fp8_matrix_mult"))
LIMIT_S = 240


def write_format(source: Path, kind: str, device: torch.device) -> Path:
    """A file's model in a format, beside it; one that is there is taken."""
    path = source.with_name(f"{kind.replace(',', '').replace(' ', '_')}_{source.name}")
    if path.is_file():
        return path
    new = path.with_name(f"{path.name}.new")
    from safetensors import safe_open
    from safetensors.torch import save_file

    from host.quantised import quantised

    with safe_open(source, framework="pt", device=str(device)) as file:
        whole, said = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    tensors, more = (_rounded(whole), {}) if kind == PLAIN else quantised(whole, kind)
    save_file({key: each.cpu() for key, each in tensors.items()}, new, metadata={**said, **more})
    os.replace(new, path)
    del whole, tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()  # others use the device next
    return path


def _rounded(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stored = getattr(torch, PLAIN)
    return {key: each.to(stored) if each.ndim == 2 and "block" in key else each for key, each in whole.items()}


def run(setting: Setting) -> Result:
    """Each format with each option that it is affected by."""
    name = setting.model_names()[0]
    lines = ["| format | options | device ms | host ms | clock ms | ranks |", "| --- " * 6 + "|"]
    seconds: dict[tuple[str, tuple[str, ...]], float] = {}  # of kernels: a few blocks may wait for their host
    for options, kinds in _cases(setting).items():
        plain = setting.file(name)
        paths = [plain if kind == setting.dtype else write_format(plain, kind, setting.device) for kind in kinds]
        for kind, shares in zip(kinds, measured(setting, name, paths, options), strict=True):
            for share in shares:
                if share["ranks"] == 1:
                    seconds[kind, options] = share["device_s"]
                cells = " | ".join(f"{1e3 * share[each]:.2f}" for each in ("device_s", "host_s", "clock_s"))
                lines.append(f"| {kind} | {' '.join(options)} | {cells} | {share['ranks']} |")
    plain = seconds[setting.dtype, ()]
    ratios = {key: each / plain for key, each in seconds.items() if key != (setting.dtype, ())}
    said = "; ".join(f"{kind} {' '.join(options)} {ratio:.2f}x" for (kind, options), ratio in ratios.items())
    return Result(table=lines, decided=f"{name}, one rank, time of the device beside {setting.dtype}: {said}")


def measured(
    setting: Setting, name: str, paths: Sequence[Path], options: tuple[str, ...]
) -> list[list[dict[str, Any]]]:
    """One rank's shares of each file in a process with these options of ComfyUI. Raises `ValueError` where it ends."""
    size = setting.size(name)
    command = [sys.executable, "-m", "benchmarks.share", "--json", "--dtype", setting.dtype]
    command += [f"--model={path}" for path in paths]
    command += ["--device", str(setting.device), "--comfyui", setting.comfyui.path, "--steps", str(setting.steps)]
    command += ["--ranks", "1" if setting.small else "1,2", "--width", str(size.width), "--height", str(size.height)]
    command += ["--text-tokens", str(size.text_tokens), *(f"--option={each}" for each in options)]
    done = subprocess.run(  # noqa: S603  our own module
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"the shares of {names} ended with status {done.returncode}: {said[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()[-len(paths) :]]


def _cases(setting: Setting) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The formats by options; the plain one has none."""
    if setting.small:
        return {(): (setting.dtype, PLAIN)}
    return {options: (*([] if options else [setting.dtype]), *FORMATS) for options in OPTIONS}
