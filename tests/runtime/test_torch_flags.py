"""torch's switches of one process are those of another after they travelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_runtime.torch_flags import read_flags

ROOT = Path(__file__).resolve().parents[2]
PROCESS = """
import json, torch
from parallel_runtime.torch_flags import read_flags, set_flags
usual = read_flags()
{turned}
theirs = read_flags()
set_flags(usual)
set_flags({{'torch.backends.unheard_of': True}})
back = read_flags()
set_flags(json.loads(json.dumps(theirs)))
print(json.dumps([usual, theirs, back, read_flags()]))
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
def test_switches_that_were_read_are_set_again() -> None:
    """In a process of its own: switches are those of a whole process."""
    command = [sys.executable, "-c", PROCESS.format(turned=TURNED)]
    usual, theirs, back, again = json.loads(subprocess.check_output(command, cwd=ROOT))
    assert {name: theirs[name] for name in CHANGED} == CHANGED
    assert all(usual[name] != value for name, value in CHANGED.items()), "each was turned"
    assert (back, again) == (usual, theirs)


def test_reading_changes_nothing() -> None:
    assert read_flags() == read_flags()
