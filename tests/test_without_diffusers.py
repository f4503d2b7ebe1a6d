"""diffusers is the judge's alone: the nodes and the workers do without it, and the command line says what to do.

Owns: what happens where diffusers cannot be imported. Does not own: that the requirements leave it out
(test_package.py), that a rank has not imported it (pool/test_environment_of_ranks.py).
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from host import workflows
from host.client import ComfyClient
from host.pack_workflows import latent_of, parallel
from host.server import ComfyServer
from host.tiny_models import TinyModels, write_flux
from parallel_runtime.checkpoint import ModelSpec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
NEED_THE_JUDGE = {
    "parallel_runtime.cli.flux_in_diffusers",
    "parallel_runtime.__main__",
}  # the latter ends the interpreter
AGAINST = ("--against", "diffusers")
REMEDY = 'pip install "diffusers>=0.35"'


@pytest.fixture(scope="module")
def without_diffusers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put first on PYTHONPATH; `import diffusers` then fails as where it is not installed."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "diffusers.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'diffusers'\", name='diffusers')\n"
    )
    return folder


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A small model of random weights."""
    path = tmp_path_factory.mktemp("sample") / "sample.safetensors"
    write_flux(path)
    return ModelSpec.of(str(path))


def run(without: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs python in the pack's folder where diffusers cannot be imported."""
    environment = {**os.environ, "PYTHONPATH": f"{without}{os.pathsep}{ROOT}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment, check=False)


def test_every_module_of_the_runtime_but_the_judge_imports(without_diffusers: Path) -> None:
    package = ROOT / "parallel_runtime"
    names = {each.name for each in pkgutil.walk_packages([str(package)], "parallel_runtime.")}
    assert len(names) > 30 and names > NEED_THE_JUDGE, "modules not found"
    importing = f"import importlib; [importlib.import_module(name) for name in {sorted(names - NEED_THE_JUDGE)}]"
    done = run(without_diffusers, "-c", importing)
    assert done.returncode == 0, done.stderr
    judge = run(without_diffusers, "-c", "import parallel_runtime.cli.flux_in_diffusers")
    assert "No module named 'diffusers'" in judge.stderr, "diffusers could be imported, so nothing was shown"


@pytest.mark.full
def test_the_nodes_sample_without_it(without_diffusers: Path, models_dir: Path, tiny_models: TinyModels) -> None:
    with ComfyServer(models=models_dir, environment={"PYTHONPATH": str(without_diffusers)}) as server:
        graph = parallel(workflows.text_to_image(tiny_models))
        assert latent_of(ComfyClient(server.url), graph).isfinite().all()


def test_what_needs_the_judge_exits_2_with_one_line(sample: ModelSpec, without_diffusers: Path) -> None:
    arguments = ("-m", "parallel_runtime", "verify", "--model", sample.path, "--plan", "ulysses=2", *AGAINST)
    done = run(without_diffusers, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"verify: diffusers is not installed; {REMEDY}")
    reported = json.loads(run(without_diffusers, *arguments, "--json").stdout)
    assert REMEDY in reported["error"]


def test_a_diffusers_that_cannot_be_imported_is_told_apart(sample: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "diffusers.py").write_text("raise ImportError('huggingface-hub>=1 is required')\n")
    done = run(tmp_path, "-m", "parallel_runtime", "verify", "--model", sample.path, "--plan", "ulysses=2", *AGAINST)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "verify: diffusers cannot be imported: huggingface-hub>=1 is required; pip install"
    )
