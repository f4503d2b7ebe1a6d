"""Installs everything tests and the demo need into the virtual environment that runs this script.

Owns: the order of installs and what of ComfyUI's own requirements is left out. Does not own: versions (constraints.txt,
pyproject.toml, ComfyUI's requirements.txt), the environment itself (the Makefile makes it).

Every install passes the constraints: without them a dependency may replace torch by another build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from host.fetch import comfyui_path

from .mend_cpu_torch import main as mend_cpu_torch

ROOT = Path(__file__).resolve().parents[1]
METADATA = ("pyproject.toml", "LICENSE")
LEFT_OUT = {
    "comfyui-workflow-templates": "large, and the server starts without it",
    "comfyui-embedded-docs": "large, and the server starts without it",
}


def pip_install(*arguments: str) -> None:
    """Runs pip under the constraints; ends the script with pip's own status when it fails."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    result = subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *arguments], cwd=ROOT, check=False)
    if result.returncode:
        raise SystemExit(result.returncode)


def host_requirements(comfyui: Path) -> list[str]:
    """The lines of ComfyUI's requirements.txt, without comments and without what is left out."""
    lines = []
    for line in (comfyui / "requirements.txt").read_text(encoding="utf-8").splitlines():
        requirement = line.split("#")[0].strip()
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
        if requirement and name not in LEFT_OUT:
            lines.append(requirement)
    return lines


def main() -> None:
    """Installs torch first, then the pack's dependencies with their extras, then what the host needs."""
    if sys.prefix == sys.base_prefix:
        raise SystemExit(f"{sys.executable} is not in a virtual environment; run `make venv`")
    print("installing torch", flush=True)  # noqa: T201
    pip_install("torch")
    print("installing the pack's dependencies and the test tools", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as scratch:  # built outside the repository, so nothing is left in it
        for name in METADATA:
            shutil.copy(ROOT / name, scratch)
        pip_install("-r", "requirements.txt", f"{scratch}[test,bench]")
    comfyui = comfyui_path()
    print(f"installing what ComfyUI in {comfyui} needs", flush=True)  # noqa: T201
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(host_requirements(comfyui)))
        file.flush()
        pip_install("-r", file.name)
    mend_cpu_torch()


if __name__ == "__main__":
    main()
