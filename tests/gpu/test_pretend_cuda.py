"""Plans on pretend GPUs, where torch's CUDA sanitizer finds a wait that is left out (pretend_cuda/device.py).

The whole of them, memory refused, and mistakes that they must find: `make pretend-cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu.cases import Reference, write_model
from gpu.pretend_cuda.pool import PretendPool, Trial, pretending
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool

TRIALS = (
    Trial(plan="ulysses=2", run="a mask, an odd length"),
    Trial(plan="ulysses=1", weights="offloaded"),
    Trial(plan="ulysses=2", weights="sharded", in_workers=False),
    Trial(plan="ring=2", run="two sides of unequal texts, two images"),
    Trial(plan="pipefusion=2,patches=3"),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """What CPU ranks compute of the same."""
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as plain:
        yield Reference(plain, write_model(tmp_path_factory.mktemp("pretend")))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendPool]:
    with pretending(), PretendPool(2, tmp_path_factory.mktemp("pool")) as made:
        yield made


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.plan} {trial.weights}")
def test_no_stream_uses_what_another_writes(reference: Reference, pool: PretendPool, trial: Trial) -> None:
    assert pool.wrong(reference, trial, deadline_s=30.0) == ""  # beside other tests a rank may be slow
