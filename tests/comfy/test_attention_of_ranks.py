"""The attention function of a rank by the option that it is told, packages that a GPU needs made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from host.fetch import comfyui_path

ROOT = Path(__file__).resolve().parents[2]
# Each says that it was called, and attends exactly.
STAND_INS = {
    "sageattention": """
import torch.nn.functional as F
def sageattn(q, k, v, attn_mask=None, is_causal=False, tensor_layout="NHD", **options):
    print("called sageattn")
    if tensor_layout == "HND":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
""",
    "flash_attn": """
import torch.nn.functional as F
def flash_attn_func(q, k, v, *, dropout_p=0.0, causal=False, **options):
    print("called flash_attn_func")
    return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
""",
    # The real package, with an attention that needs no GPU.
    "comfy_kitchen": """
import importlib, os, sys
import torch.nn.functional as F
sys.path.remove(os.path.dirname(__file__))
del sys.modules["comfy_kitchen"]
kitchen = importlib.import_module("comfy_kitchen")
sys.path.append(os.path.dirname(__file__))
def int8_attention(q, k, v, attn_mask=None, **options):
    print("called int8_attention")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
kitchen.int8_attention, kitchen.int8_attention_is_available = int8_attention, lambda: True
""",
}
IN_A_RANK = """
import sys, torch
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.models.hosted.attention import installed
from parallel_runtime.models.hosted.comfyui import import_comfyui
from parallel_runtime.parallel.kernels import ATTENDED
import_comfyui(ComfyUI(sys.argv[1], (sys.argv[2],)), torch.device("cpu"))
q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16)
out = installed().kernel.heads([q, q, q], 2, None, attn_precision=None, options={}, owned=False, named="")
expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
assert (out.float() - expected.float()).norm() < 0.02 * expected.float().norm()
print("ran", *ATTENDED, sep="|")
"""
# Of the ComfyUI at hand: --use-ck-attention came after 0.30.
HAS = (comfyui_path() / "comfy" / "cli_args.py").read_text(encoding="utf-8")
CASES = [
    ("--use-sage-attention", "called sageattn", "sage"),
    pytest.param("--use-flash-attention", "called flash_attn_func", "flash", marks=pytest.mark.full),
    pytest.param("--use-split-cross-attention", "", "split", marks=pytest.mark.full),
    *([("--use-ck-attention", "called int8_attention", "comfy_kitchen_int8")] if "--use-ck-attention" in HAS else []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "called", "ran"), CASES)
def test_an_option_is_the_function_of_a_rank(tmp_path: Path, option: str, called: str, ran: str) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / f"{name}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", IN_A_RANK, str(comfyui_path()), option]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == f"ran|{ran}"
    assert [line for line in lines if line.startswith("called")] == ([called] if called else [])
