"""What all tests of this folder share: ranks that have imported ComfyUI, a pool of four workers, files for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from families.variants import write_families
from host.fetch import comfyui_path
from host.hosted_runs import FLUX, SD35, WAN
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool

from .ranks import Ranks


@pytest.fixture(scope="session")
def comfyui_ranks() -> Iterator[Ranks]:
    """Ranks that run functions of these files."""
    ranks = Ranks(comfyui_path())
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    """A pool of the session."""
    with Pool(parse_devices("cpu:4").devices, threads_per_rank=1) as ranks:
        yield ranks


@pytest.fixture
def pool(four_ranks: Pool) -> Iterator[Pool]:
    """Four ranks. After a test that had them fail the pool begins anew: it refuses to start what fails repeatedly."""
    yield four_ranks
    if four_ranks.state == "failed":
        four_ranks.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `models` folder with every file of the pool, written at once, as ComfyUI is started to say their tensors."""
    return write_families(tmp_path_factory.mktemp("models"), only=[each.name for each in (WAN, FLUX, SD35)])


@pytest.fixture(scope="session")
def wan(models: Path) -> ModelSpec:
    """The file of a Wan of three blocks and five heads."""
    return WAN.write(models)
