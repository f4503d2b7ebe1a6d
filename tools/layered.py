"""An environment for one ComfyUI, with what its requirements.txt asks for, over the one that runs this.

Owns: the environment's folder, named by what it was made from, so that a second run finds it; what is installed there.
Does not own: the environment below it (install.py), which it reads and never changes.

A `.pth` file puts the packages of the environment below behind its own, so pip installs only what differs: seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from host.fetch import exclusive

from .install import ROOT, host_requirements

HOSTS = ROOT / "build" / "hosts"
INSTALL_TIMEOUT_S = 1800
DONE = ".installed"


def environment_for(comfyui: Path, more: Sequence[str] = ()) -> Path:
    """The Python of an environment that has what `comfyui` requires; made when there is none yet.

    `more` are requirements that replace those of the same package, as `comfyui-frontend-package` for its newest
    release. Raises RuntimeError with pip's words when an install fails.
    """
    wanted = required(host_requirements(comfyui), more)
    constraints = unconstrained((ROOT / "constraints.txt").read_text(encoding="utf-8"), more)
    more = resolved(more, constraints)
    made_from = "\n".join([sys.version, sysconfig.get_path("purelib"), *wanted, *more, constraints])
    folder = HOSTS / hashlib.sha256(made_from.encode()).hexdigest()[:12]
    HOSTS.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_suffix(".lock")):
        if not (folder / DONE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder, wanted, constraints, more)
    return folder / "bin" / "python"


def name_of(requirement: str) -> str:
    """The package that a requirement names, as pip compares names."""
    for end, letter in enumerate(requirement):
        if not (letter.isalnum() or letter in "._-"):
            return name_of(requirement[:end])
    return requirement.lower().replace("_", "-").replace(".", "-")


def required(lines: Sequence[str], more: Sequence[str]) -> list[str]:
    """The lines of a requirements.txt but those of a package that `more` names."""
    replaced = {name_of(each) for each in more}
    return [line for line in lines if name_of(line) not in replaced]


def unconstrained(constraints: str, more: Sequence[str]) -> str:
    """The constraints; without those on torch and its companions where `more` names torch, which all follow it."""
    replaced = {name_of(each) for each in more}
    if "torch" in replaced:
        replaced |= {"torchvision", "torchaudio"}
    return "".join(line for line in constraints.splitlines(keepends=True) if name_of(line.strip()) not in replaced)


def resolved(more: Sequence[str], constraints: str) -> list[str]:
    """The requirements with the versions that pip would install now, as an index has another newest one tomorrow.

    Raises RuntimeError with pip's words when there is none.
    """
    if not more:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        held, report = Path(scratch) / "constraints.txt", Path(scratch) / "report.json"
        held.write_text(constraints, encoding="utf-8")
        asked = ["--dry-run", "--ignore-installed", "--no-deps", "--upgrade", "--report", str(report), "-c", str(held)]
        install(Path(sys.executable), *asked, *more)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [f"{each['metadata']['name']}=={each['metadata']['version']}" for each in found]


def install(python: Path, *arguments: str) -> None:
    """Runs pip in an environment. Raises RuntimeError with its words when it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments]
    environment = {**os.environ, "PIP_NO_INPUT": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
    )
    if result.returncode:
        raise RuntimeError(f"pip could not install what this ComfyUI requires: {result.stderr.strip()[-2000:]}")


def make(folder: Path, wanted: Sequence[str], constraints: str, more: Sequence[str]) -> Path:
    """Makes the environment and installs what the one below does not have in the version that is wanted."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    below = list(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))
    (own / "below.pth").write_text("".join(f"{each}\n" for each in below), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        held, asked = Path(scratch) / "constraints.txt", Path(scratch) / "requirements.txt"
        held.write_text(constraints, encoding="utf-8")
        asked.write_text("\n".join(wanted), encoding="utf-8")
        install(python, "-c", str(held), "-r", str(asked))
        if more:
            install(python, "-c", str(held), "--upgrade", *more)
    (folder / DONE).touch()
    return python
