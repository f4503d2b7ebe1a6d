"""diffusers is the judge's alone: the nodes and the workers do without it, and the command line says what to do."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from host.tiny_models import write_flux

ROOT = Path(__file__).resolve().parents[1]
JUDGE = "parallel_runtime.cli.flux_in_diffusers"
PROGRAM = "parallel_runtime.__main__"  # it ends the interpreter
AGAINST = ("--against", "diffusers")
REMEDY = 'pip install "diffusers>=0.35"'


@pytest.mark.slow
def test_every_module_of_the_runtime_but_the_judge_imports(tmp_path: Path) -> None:
    (tmp_path / "diffusers.py").write_text("raise ModuleNotFoundError('no', name='diffusers')\n")
    names = {each.name for each in pkgutil.walk_packages([str(ROOT / "parallel_runtime")], "parallel_runtime.")}
    assert len(names) > 30 and names > {JUDGE, PROGRAM}, "modules not found"
    importing = f"import importlib; [importlib.import_module(name) for name in {sorted(names - {JUDGE, PROGRAM})}]"
    code = f"{importing}\ntry:\n    import {JUDGE}\nexcept ModuleNotFoundError:\n    print('without')"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "without\n", done.stderr


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("ModuleNotFoundError('no', name='diffusers')", "diffusers is not installed"),
        ("ImportError('a newer hub is required')", "diffusers cannot be imported: a newer hub is required"),
    ],
)
def test_what_needs_the_judge_exits_2_with_one_line(
    raised: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable
) -> None:
    write_flux(tmp_path / "flux.safetensors")
    (tmp_path / "diffusers.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "diffusers" or name == JUDGE]:
        monkeypatch.delitem(sys.modules, name)
    done = command("verify", "--model", str(tmp_path / "flux.safetensors"), "--plan", "ulysses=2", *AGAINST)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"verify: {said}; {REMEDY}")
