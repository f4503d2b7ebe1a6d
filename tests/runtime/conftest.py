"""What the runtime's tests share: eight CPU ranks, and ComfyUI's module in one process."""

from collections.abc import Iterator

import pytest

from host.tiny_hosted import OneProcess
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool


@pytest.fixture(scope="session")
def one_process(tiny_hosted: ModelSpec) -> Iterator[OneProcess]:
    """ComfyUI's bare module of `tiny_hosted`."""
    with OneProcess(tiny_hosted) as process:
        yield process


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Pool]:
    """One set of workers for every plan of up to eight ranks."""
    pool = Pool(parse_devices("cpu:8").devices, threads_per_rank=1)
    yield pool
    pool.close()
