"""How long the look at ComfyUI takes that the pack does when it is loaded, in milliseconds; at most 50 are allowed.

    python -m benchmarks.host_contract COMFYUI      # the folder of its main.py; in ComfyUI's own Python

A process has imported what ComfyUI's main.py has imported before packs are loaded. `first` imports what of it nobody
had asked for yet; `again` is the same look once more. Prints a line, whose figure docs/design.md has ("The host
contract"); writes no page.
"""

import importlib
import os
import sys
import time
from pathlib import Path

from parallel_runtime.models.hosted.contract import LINES
from parallel_runtime.models.hosted.contract_check import look

LIMIT_MS = 50.0


def start(comfyui: Path) -> None:
    """Import what main.py does; the pack's folder `nodes` must not stand for ComfyUI's file."""
    here = Path(__file__).resolve().parents[1]
    sys.path[:] = [str(comfyui), *(each for each in sys.path if Path(each or os.getcwd()).resolve() != here)]
    sys.argv = ["main.py", "--cpu"]
    importlib.import_module("comfy.options").enable_args_parsing()
    for name in ("utils.extra_config", "execution", "nodes", "server"):
        importlib.import_module(name)


def main() -> None:
    """Print both times, and what is missing."""
    start(Path(sys.argv[1]).resolve())
    took = []
    for _ in range(2):
        began_s = time.perf_counter()
        missing = look()
        took.append((time.perf_counter() - began_s) * 1e3)
    version = importlib.import_module("comfyui_version").__version__
    first, again = took
    print(  # noqa: T201  a command line
        f"ComfyUI {version}: {len(LINES)} lines, first {first:.1f} ms, again {again:.1f} ms, at most {LIMIT_MS:.0f}; "
        f"missing: {', '.join(line.text for line in missing) or 'none'}"
    )


if __name__ == "__main__":
    main()
