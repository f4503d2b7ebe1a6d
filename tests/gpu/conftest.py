"""What these tests share: ranks that know no rules."""

from collections.abc import Iterator

import pytest

from gpu.cases import Reference
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool


@pytest.fixture(scope="session")
def reference(tiny_hosted: ModelSpec) -> Iterator[Reference]:
    """Four CPU ranks over gloo."""
    with Pool(parse_devices("cpu:4").devices, threads_per_rank=1) as pool:
        yield Reference(pool, tiny_hosted)
