"""torch's switches of one process are those of another after they travelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_runtime.torch_flags import read_flags

ROOT = Path(__file__).resolve().parents[2]
CHANGE = """
import json, torch
from parallel_runtime.torch_flags import read_flags, set_flags
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


def process(code: str) -> list[dict]:
    """What a process of its own prints, a line each: switches are those of a whole process."""
    command = [sys.executable, "-c", f"{CHANGE}{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_switches_of_one_process_reach_another() -> None:
    tell = "print(json.dumps(read_flags()))"
    usual, theirs = process(f"{tell}{TURNED}{tell}")
    assert {name: theirs[name] for name in CHANGED} == CHANGED
    assert all(usual[name] != value for name, value in CHANGED.items()), "each was turned"
    unheard = "set_flags({'torch.backends.unheard_of': True})"
    assert process(f"{unheard}\n{tell}\nset_flags({theirs!r})\n{tell}") == [usual, theirs]


def test_reading_changes_nothing() -> None:
    assert read_flags() == read_flags()
