"""diffusers is the judge's alone: the nodes and the workers do without it, and the command line says what to do."""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from host.tiny_models import write_flux

ROOT = Path(__file__).resolve().parents[1]
JUDGE = "parallel_runtime.trials.flux_in_diffusers"
PROGRAM = "parallel_runtime.__main__"  # it ends the interpreter
AGAINST = ("--against", "diffusers")
REMEDY = 'pip install "diffusers>=0.35"'


def test_every_module_of_the_runtime_but_the_judge_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {each.name for each in pkgutil.walk_packages([str(ROOT / "parallel_runtime")], "parallel_runtime.")}
    assert len(names) > 30 and names > {JUDGE, PROGRAM}, "modules not found"
    without_diffusers(tmp_path, "ModuleNotFoundError('no', name='diffusers')", monkeypatch)
    for name in {*names, "parallel_runtime"}:  # read anew here; what was imported before comes back
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    for name in sorted(names - {JUDGE, PROGRAM}):
        importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError, match="no"):
        importlib.import_module(JUDGE)


def without_diffusers(folder: Path, raised: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have diffusers raise this when it is imported, as if nobody had imported it before."""
    (folder / "diffusers.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "diffusers" or name == JUDGE]:
        monkeypatch.delitem(sys.modules, name)


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
    without_diffusers(tmp_path, raised, monkeypatch)
    done = command("verify", "--model", str(tmp_path / "flux.safetensors"), "--plan", "ulysses=2", *AGAINST)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"verify: {said}; {REMEDY}")
