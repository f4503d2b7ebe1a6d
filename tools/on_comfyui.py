"""Runs what depends on ComfyUI on any ComfyUI, in an environment of its own: `make test-host COMFYUI_PATH=DIR`.

    python -m tools.on_comfyui [--only modules families] [--with comfyui-frontend-package] [OPTIONS OF PYTEST]

COMFYUI_PATH is its folder, or `oldest` for the oldest that the pack names, which is fetched. The last lines are a
table: by kind and family, how many tests found what they should, how many are wrong or refused, and what stock ComfyUI
itself cannot do there. The exit status is 0 only when nothing is wrong.

Owns: the parts and the tests of each. Does not own: the environment (layered.py), the table (tally.py), the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from host.fetch import OLDEST_SDIST, comfyui_path, fetched
from host.tally import PARTS, TESTS

from .layered import environment_for

OLDEST = "oldest"
PACKAGES = ("torch", "comfy-kitchen", "comfy-aimdo", "comfyui-frontend-package")


def chosen_comfyui() -> Path:
    """The folder of the ComfyUI to test with."""
    return fetched(OLDEST_SDIST) if os.environ.get("COMFYUI_PATH") == OLDEST else comfyui_path()


def versions(python: Path) -> list[str]:
    """What an environment has of the packages that ComfyUI's versions differ by."""
    code = f"from importlib.metadata import version\nfor name in {PACKAGES}: print(name, version(name))"
    return subprocess.check_output([str(python), "-c", code], text=True).splitlines()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="the parts to run")
    parser.add_argument(
        "--with",
        nargs="+",
        default=[],
        dest="more",
        metavar="PACKAGE",
        help="its newest release, or NAME==VERSION, instead of what ComfyUI asks for; kept in build/hosts",
    )
    chosen, options = parser.parse_known_args(arguments)
    try:
        comfyui = chosen_comfyui()
        python = environment_for(comfyui, chosen.more)
    except RuntimeError as error:  # HostNotFoundError among them
        raise SystemExit(str(error)) from error
    print(f"{comfyui} with {python}: {', '.join(versions(python))}", flush=True)  # noqa: T201
    tests = [str(TESTS / PARTS[part]) for part in chosen.only]
    command = [str(python), "-m", "pytest", "-p", "host.tally", "-q", "-rN", "--tb=short", *options, *tests]
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui), "PYTHONPATH": str(TESTS)}
    return subprocess.run(command, cwd=TESTS.parent, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
