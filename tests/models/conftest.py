"""What all tests of this folder share: ranks that have imported ComfyUI, a pool of four workers, a Wan's file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from host.fetch import comfyui_path
from host.hosted_runs import WAN
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
def wan(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """The file of a Wan of three blocks and five heads."""
    return WAN.write(tmp_path_factory.mktemp("wan"))
