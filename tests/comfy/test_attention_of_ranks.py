"""The attention function of a rank by the option that it is told, packages that a GPU needs made up here."""

from pathlib import Path

import pytest

from host.fetch import comfyui_path
from host.server import PACK_ROOT

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
}
# ComfyUI is imported anew, as a rank does that was told the option; comfy_kitchen has an attention that needs no GPU.
IN_A_RANK = """
import sys, comfy_kitchen, torch
import torch.nn.functional as F
_, comfyui, pack, stand_ins, option = sys.argv
for name in [each for each in sys.modules if each.partition(".")[0] == "comfy"]:
    del sys.modules[name]
sys.path += [pack, stand_ins]
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.models.hosted.attention import installed
from parallel_runtime.models.hosted.comfyui import import_comfyui
from parallel_runtime.parallel.kernels import ATTENDED
def int8_attention(q, k, v, attn_mask=None, **options):
    print("called int8_attention")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
comfy_kitchen.int8_attention, comfy_kitchen.int8_attention_is_available = int8_attention, lambda: True
import_comfyui(ComfyUI(comfyui, (option,)), torch.device("cpu"))
q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16)
out = installed().kernel.heads([q, q, q], 2, None, attn_precision=None, options={}, owned=False, named="")
expected = F.scaled_dot_product_attention(q, q, q)
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


@pytest.mark.parametrize(("option", "called", "ran"), CASES)
def test_an_option_is_the_function_of_a_rank(tmp_path: Path, in_comfyui, option: str, called: str, ran: str) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / f"{name}.py").write_text(text)
    lines = in_comfyui(IN_A_RANK, str(PACK_ROOT), str(tmp_path), option)
    assert lines[-1] == f"ran|{ran}"
    assert [line for line in lines if line.startswith("called")] == ([called] if called else [])
