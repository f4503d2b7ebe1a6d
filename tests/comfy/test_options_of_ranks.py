"""What ranks are told of ComfyUI's command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from host.fetch import comfyui_path

OPTIONS = ("use_ck_attention", "use_sage_attention", "dont_upcast_attention")
SCRIPT = """
import importlib, sys
from trace_samplers import NAME, load
load(sys.argv[1])
import comfy.cli_args
told = importlib.import_module(f"{NAME}.nodes.host.hosted_source").this_comfyui
for option in sys.argv[0].split():
    print(f"--{option.replace('_', '-')}" in told().options)
    setattr(comfy.cli_args.args, option, True)
    print(f"--{option.replace('_', '-')}" in told().options)
"""


def test_the_attention_that_comfyui_was_started_with_is_that_of_the_ranks() -> None:
    """Also where this ComfyUI has no such option yet."""
    folder = Path(__file__).resolve().parents[1] / "host"
    script = SCRIPT.replace("sys.argv[0]", repr(" ".join(OPTIONS)))
    done = subprocess.run(
        [sys.executable, "-c", script, str(comfyui_path())],
        env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["False", "True"] * len(OPTIONS)
