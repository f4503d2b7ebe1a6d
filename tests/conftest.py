"""Fixtures all tests share: tiny models and ComfyUI servers, each made once a session; tiers; how hypothesis runs."""

import os

# Before torch is imported, here and in servers: where others want the cores, a team of threads waits for its slowest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from demo.graphs import TEXT_ENCODER, add_demo_model
from families.variants import SMALL, write_families
from host.client import ComfyClient
from host.forked_ranks import fork_ranks, start_ranks
from host.server import ComfyServer
from host.tiny_hosted import spec_of, write_tiny
from host.tiny_models import TinyModels, write_tiny_models
from parallel_runtime.__main__ import EXIT_INTERRUPTED, main
from parallel_runtime.checkpoint import ModelSpec

pytest_plugins = ["dealing"]

# A busy machine is no failure, nothing is kept between runs, and a failure says how to see it again.
quiet = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile(
    "quiet", deadline=None, database=None, print_blob=True, suppress_health_check=quiet
)
hypothesis.settings.load_profile("quiet")


TESTS = Path(__file__).resolve().parent
# Their tests need a server, a browser or workers that are made to fail: `make test-quick` leaves them out.
SLOW_FOLDERS = {
    "browser",
    "comfy",
    "families",
    "faults",
    "gpu",
    "host",
    "machines",
    "parity",
    "refusals",
    "saved_workflows",
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave slow folders alone where their tests would all be left out: to import them takes longer than many tests."""
    slow = collection_path.parent == TESTS and collection_path.name in SLOW_FOLDERS
    return True if slow and "not slow" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow folders."""
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)


# What a rank or a ComfyUI is started with is what these are about, so each is an interpreter of its own there.
STARTING_FILES = {
    "test_packed_archive.py",
    "test_respawn_storm.py",
    "test_environment_of_ranks.py",
}


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork ranks, which saves 2 s of a core for each, and ComfyUIs, 7 s, but where their start is tested."""
    start_ranks() if item.path.name in STARTING_FILES else fork_ranks()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The tiny models, written once; `tiny_models.models` is a models folder, the fields are file names."""
    return write_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_hosted(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The model of host/tiny_hosted.py, which ComfyUI's own module computes in fp32."""
    return spec_of(write_tiny(tmp_path_factory.mktemp("hosted") / "tiny.safetensors"))


@pytest.fixture(scope="session")
def family_models() -> Iterator[Path]:
    """A `models` folder with the tiny files of all families but those that only full tests add (`write_families`).

    Gone at the end, since one of them is of 1.5 GB.
    """
    with tempfile.TemporaryDirectory(prefix="families-") as folder:
        yield write_families(Path(folder) / "models", only=SMALL)


@pytest.fixture(scope="session")
def models_dir(tiny_models: TinyModels) -> Path:
    return tiny_models.models


@pytest.fixture(scope="session")
def comfy_server(models_dir: Path) -> Iterator[ComfyServer]:
    """One ComfyUI with the pack for the whole session, and the demo's model. A test that may hurt it starts its own."""
    add_demo_model(models_dir)
    with ComfyServer(models=models_dir, packs=(TEXT_ENCODER,)) as server:
        yield server
        assert not server.leaks


@pytest.fixture
def client(comfy_server: ComfyServer) -> ComfyClient:
    return ComfyClient(comfy_server.url)


@pytest.fixture(scope="session")
def hosted_server(family_models: Path) -> Iterator[ComfyServer]:
    """A ComfyUI with the pack and the families' tiny files, which ComfyUI's own modules compute."""
    with ComfyServer(models=family_models) as server:
        yield server
        assert not server.leaks


@pytest.fixture
def hosted_client(hosted_server: ComfyServer) -> ComfyClient:
    return ComfyClient(hosted_server.url)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m parallel_runtime ARGUMENTS` in this process: to import torch again takes longer than most do."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = main(arguments)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt  # meant for pytest
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run
