"""Models and meshes as handles in one set of workers: many at once, evicted by age of use, no process restarted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from host.tiny_hosted import call, spec_of, write_tiny
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

pytestmark = pytest.mark.slow

CALL = call(text=5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[ModelSpec]:
    """Three different models of the same size."""
    folder = tmp_path_factory.mktemp("handles")
    return [spec_of(write_tiny(folder / f"{seed}.safetensors", seed=seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def room_for_two(files: list[ModelSpec]) -> Iterator[Pool]:
    budget = 2 * sum(tensor.num_bytes for tensor in read_header(files[0].path).tensors.values()) + 1000
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1, memory_budget_bytes=budget) as pool:
        yield pool


def run(pool: Pool, spec: ModelSpec, plan: ParallelPlan) -> torch.Tensor:
    return pool.run(spec, plan, [CALL]).outs[0]


def names(pool: Pool) -> list[str]:
    return [model["name"] for model in pool.status()["models"]]


def test_evicting_gives_the_memory_back(room_for_two: Pool, files: list[ModelSpec]) -> None:
    """Shards and the buffers in which blocks become whole are a rank's own, so they show in its resident memory."""
    (resident, outs), plan = ([], []), ParallelPlan(ulysses=2, weights="sharded")
    for turn in range(9):
        outs.append(run(room_for_two, files[turn % 3], plan))
        assert torch.equal(outs[turn], outs[turn % 3]), "it is loaded again as it was"
        resident.append(room_for_two.status()["memory"][0]["resident_bytes"])
    assert relative_error(outs[0], outs[1]) > 0.05 and room_for_two.generation == 1
    assert names(room_for_two) == [Path(spec.path).name for spec in files[1:]]
    assert resident[-1] - resident[5] < 6 * 2**20, resident  # three models that stayed would be 11 MiB
    for which in (1, 0):
        run(room_for_two, files[which], plan)
    assert names(room_for_two) == [Path(files[which].path).name for which in (1, 0)], "2 was used longest ago"


def test_what_a_load_evicted_before_it_was_cancelled_is_loaded_again(
    room_for_two: Pool, files: list[ModelSpec]
) -> None:
    def give_up(loaded: int, total: int) -> None:
        raise InterruptedError(f"{loaded} of {total} bytes")

    plan = ParallelPlan(ulysses=2)
    first, _ = (run(room_for_two, spec, plan) for spec in files[:2])
    generation = room_for_two.generation
    with pytest.raises(InterruptedError):
        room_for_two.load(files[2], progress=give_up)
    room_for_two.unload(files[2])  # which is not there; what the ranks said of it is heard now
    assert names(room_for_two) == [Path(files[1].path).name]
    assert torch.equal(run(room_for_two, files[0], plan), first)
    assert room_for_two.generation == generation
