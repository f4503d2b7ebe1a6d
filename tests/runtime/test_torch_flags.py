"""torch's switches of one process are those of another after they travelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from parallel_runtime.torch_flags import read_flags

ROOT = Path(__file__).resolve().parents[2]
# One process forks another, whose switches it takes.
PROCESS = """
import json, os, torch
from parallel_runtime.torch_flags import read_flags, set_flags
usual = read_flags()
told, tell = os.pipe()
if os.fork() == 0:
{turned}
    os.write(tell, json.dumps(read_flags()).encode())
    os._exit(0)
os.wait()
theirs = json.loads(os.read(told, 1 << 16))
set_flags({{'torch.backends.unheard_of': True}})
unmoved = read_flags()
set_flags(theirs)
print(json.dumps([usual, theirs, unmoved, read_flags()]))
"""
TURNED = """
torch.backends.cudnn.benchmark = True
torch.backends.cuda.enable_math_sdp(False)
torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
torch.set_float32_matmul_precision("high")
torch.use_deterministic_algorithms(True, warn_only=True)
"""
CHANGED = {
    "torch.backends.cudnn.benchmark": True,
    "torch.backends.cuda.math_sdp": False,
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp": True,
    "torch.float32_matmul_precision": "high",
    "torch.deterministic_algorithms": "warn",
}


@pytest.mark.slow
def test_switches_of_one_process_reach_another() -> None:
    command = [sys.executable, "-c", PROCESS.format(turned=indent(TURNED, "    "))]
    usual, theirs, unmoved, reached = json.loads(subprocess.check_output(command, cwd=ROOT))
    assert {name: theirs[name] for name in CHANGED} == CHANGED
    assert all(usual[name] != value for name, value in CHANGED.items()), "each was turned"
    assert (unmoved, reached) == (usual, theirs)


def test_reading_changes_nothing() -> None:
    assert read_flags() == read_flags()
