"""torch's switches of one process are those of another after they travelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def process(code: str) -> dict:
    """What a process of its own says last: switches are those of a whole process."""
    command = [sys.executable, "-c", f"{CHANGE}{code}\nprint(json.dumps(read_flags()))"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout)


def test_switches_of_one_process_reach_another() -> None:
    usual, theirs = process(""), process(TURNED)
    assert {name: theirs[name] for name in CHANGED} == CHANGED
    assert all(usual[name] != value for name, value in CHANGED.items()), "each was turned"
    assert process(f"set_flags({theirs!r})") == theirs


def test_a_switch_that_this_torch_lacks_is_left_alone() -> None:
    assert process("set_flags({'torch.backends.unheard_of': True})") == process("")


def test_reading_changes_nothing() -> None:
    assert read_flags() == read_flags()
