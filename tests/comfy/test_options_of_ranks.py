"""What ranks are told of ComfyUI's options where code has set one since it started; given ones are told by
test_ranks_are_what_the_host_is.py.
"""

from __future__ import annotations

SCRIPT = """
import importlib, sys
from trace_samplers import NAME, load
load(sys.argv[1])
import comfy.cli_args
told = importlib.import_module(f"{NAME}.nodes.host.model.source").this_comfyui
options = [name for name in vars(comfy.cli_args.args) if name.startswith("use_") and name.endswith("_attention")]
print(len(options))
for option in options:
    print(f"--{option.replace('_', '-')}" in told().options)
    setattr(comfy.cli_args.args, option, True)
    print(f"--{option.replace('_', '-')}" in told().options)
"""


def test_an_attention_that_a_pack_has_set_since_is_told_as_well(in_comfyui) -> None:
    number, *told = in_comfyui(SCRIPT)
    assert int(number) >= 5  # split, quad, pytorch, sage, flash; newer ones have ck
    assert told == ["False", "True"] * int(number)
