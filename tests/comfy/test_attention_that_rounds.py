"""A file or a command line that asks for attention that rounds: which one it is here, and what Ring says of it."""

import json

import pytest

# Finds the kernel for a file that asks for none, one that asks for int8 where this machine has it and where it has not,
# with one layer that asks for a kernel with a number, and under another attention function. The class that reads a
# file's wish is a newer ComfyUI's: where there is none, one by its rules stands in.
SCRIPT = """
import functools, importlib, json, sys
from trace_samplers import NAME, load
load(sys.argv[1])
import torch
import comfy.ldm.modules.attention as attention
source = importlib.import_module(f"{NAME}.nodes.host.model.source")

def attention_comfy_kitchen_int8(): ...
def attention_comfy_kitchen_sol(): ...
def attention_sage(): ...

class Asked(torch.nn.Module):
    here = True
    def _load_from_state_dict(self, state, prefix, *_):
        told = json.loads(state.pop(prefix + "config").numpy().tobytes())
        if isinstance(told, list):
            self.function = functools.partial(attention_comfy_kitchen_sol, tau=told[0]["tau"])
        else:
            assert told == {"attention": "comfy_kitchen_int8"}
            self.function = attention_comfy_kitchen_int8 if self.here else None

plain = {"blocks.0.attn.weight": torch.ones(2)}
def config(told): return torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
wish = config({"attention": "comfy_kitchen_int8"})
asking = plain | {"blocks.0.attn.comfy_attention.config": wish}
found = [source.rounding_attention(plain), source.rounding_attention(asking)]
if hasattr(attention, "ComfyAttention"):
    assert attention.ComfyAttention().load_state_dict({"config": wish}).unexpected_keys == []
attention.ComfyAttention = Asked
found.append(source.rounding_attention(asking))
Asked.here = False
found.append(source.rounding_attention(asking))
sol = config([{"attention": "comfy_kitchen_sol", "tau": 0.5}, {"attention": "comfy_kitchen_int8"}])
found.append(source.rounding_attention(asking | {"blocks.1.attn.comfy_attention.config": sol}))
attention.optimized_attention = attention_sage
found += [source.rounding_attention(asking), source.rounding_attention(plain)]
import comfy.cli_args
for _ in range(2):  # the second time code has set it, as a pack may
    found.append("--use-sage-attention" in source.this_comfyui().options)
    comfy.cli_args.args.use_sage_attention = True
print(json.dumps(found))
"""


def test_the_kernel_that_rounds_is_the_files_where_it_is_here_else_the_command_lines_as_it_is_now(in_comfyui) -> None:
    (found,) = in_comfyui(SCRIPT)
    assert json.loads(found) == ["", "", "comfy_kitchen_int8", "", "comfy_kitchen_sol", "sage", "sage", False, True]


@pytest.mark.parametrize(("ring", "kernel", "said"), [(2, "sage", 1), (1, "sage", 0), (2, "", 0)])
def test_ring_says_that_it_leaves_such_a_kernel_out(module_of_pack, ring: int, kernel: str, said: int) -> None:
    found = module_of_pack("nodes.host.model.measures").other_attention(kernel, ring)
    assert len(found) == said
    assert all("ring=2 attends with exact kernels, not with sage" in each for each in found)


@pytest.mark.parametrize("ring", [1, 2])
def test_workers_say_under_every_plan_that_they_attend_to_all_tokens(module_of_pack, ring: int) -> None:
    (found,) = module_of_pack("nodes.host.model.measures").other_attention("comfy_kitchen_sol", ring)
    assert found.startswith("workers attend to all tokens, not by comfy_kitchen_sol, which the file asks for")


SAGE, FP8 = {"attention": "SageAttention"}, {"exchange": "fp8"}


@pytest.mark.parametrize(
    ("plan", "asked", "told"),
    [
        ("ulysses=2", SAGE, "attention by SageAttention, which rounds, where there is no mask"),
        ("ring=2", FP8, "heads travel as fp8, which rounds: not the same picture"),
    ],
)
def test_what_rounds_and_was_asked_for_is_told_where_a_plan_uses_it(
    module_of_pack, plan: str, asked: dict[str, str], told: str
) -> None:
    devices = module_of_pack("parallel_runtime.devices").parse_devices("cpu:2")
    parsed = module_of_pack("parallel_runtime.plan").ParallelPlan.parse(plan)
    choice = module_of_pack("nodes.choice").ParallelChoice(
        devices_text="cpu:2", selection=devices, plan=parsed, **asked
    )
    assert choice.describe()[-1] == told


@pytest.mark.parametrize("formats", [(), ("float8_e4m3fn", "nvfp4")])
def test_a_format_that_the_device_does_not_multiply_in_is_named(module_of_pack, formats: tuple[str, ...]) -> None:
    found = module_of_pack("nodes.host.model.measures").widened(formats)
    assert len(found) == len(formats[:1])
    assert all("cannot multiply in float8_e4m3fn, nvfp4: as in ComfyUI, weights are widened" in each for each in found)
