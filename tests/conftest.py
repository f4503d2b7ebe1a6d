"""Fixtures all tests share: tiny models and real ComfyUI servers, each made once a session; how hypothesis runs.

Owns: what is started once and stopped at the end. Does not own: how (host/).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from host.client import ComfyClient
from host.server import ComfyServer
from host.tiny_models import TinyModels, write_tiny_models

# A busy machine is no failure, nothing is kept between runs, and a failure says how to see it again.
quiet = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile(
    "quiet", deadline=None, database=None, print_blob=True, suppress_health_check=quiet
)
hypothesis.settings.load_profile("quiet")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The tiny models, written once; `tiny_models.models` is a models folder, the fields are file names."""
    return write_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def models_dir(tiny_models: TinyModels) -> Path:
    """The `models` folder with the tiny files."""
    return tiny_models.models


@pytest.fixture(scope="session")
def comfy_server(models_dir: Path) -> Iterator[ComfyServer]:
    """One ComfyUI with the pack for the whole session. A test that may hurt it starts its own."""
    with ComfyServer(models=models_dir) as server:
        yield server


@pytest.fixture
def client(comfy_server: ComfyServer) -> ComfyClient:
    """A client of the session's server."""
    return ComfyClient(comfy_server.url)


@pytest.fixture(scope="session")
def stock_server(models_dir: Path) -> Iterator[ComfyServer]:
    """One ComfyUI without the pack, for what must hold of ComfyUI itself and for comparisons."""
    with ComfyServer(models=models_dir, pack=False) as server:
        yield server


@pytest.fixture
def stock_client(stock_server: ComfyServer) -> ComfyClient:
    """A client of the server without the pack."""
    return ComfyClient(stock_server.url)
