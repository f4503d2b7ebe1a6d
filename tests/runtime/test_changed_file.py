"""The weights file changes under the workers: refused by name, or named by the death it causes; never wrong."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from host.tiny_hosted import WIDTH, call, spec_of, write_tiny
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_delta import PRISTINE, WeightDelta, WeightDeltas

pytestmark = pytest.mark.slow

PLAN = ParallelPlan(ulysses=2)
SHARDED = ParallelPlan(ulysses=2, weights="sharded")
KEY = "blocks.0.self_attn.o.weight"
CHANGE = torch.ones(WIDTH, WIDTH)
PATCHES = WeightDeltas("one", (WeightDelta(key=KEY, kind="diff", strength=1.0, values=(CHANGE,)),))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as shared:
        yield shared


@pytest.fixture(autouse=True)
def forgiven(pool: Pool) -> Iterator[None]:
    """Every test may fail the workers; the pool counts the failures of a minute."""
    yield
    pool._failures.forget()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    return write_tiny(path)


def step(
    pool: Pool,
    spec: ModelSpec,
    *,
    width: int = 8,
    deltas: WeightDeltas = PRISTINE,
    check: Callable[[], None] | None = None,
) -> torch.Tensor:
    made = call(text=5, size=(1, width, width))
    (out,) = pool.run(spec, PLAN, [made], deltas=deltas, check_cancelled=check).outs
    return out


def other_weights(path: Path) -> Path:
    """A file of the same size with other values."""
    other = path.with_name("other.safetensors")
    write_tiny(other, seed=9)
    assert other.stat().st_size == path.stat().st_size
    return other


def write_over(path: Path) -> None:
    """Other values into the same file, as `cp` does."""
    shutil.copyfile(other_weights(path), path)


def first_line(error: pytest.ExceptionInfo[PoolError]) -> str:
    return str(error.value).partition("\n")[0]


def refusal(pool: Pool, spec: ModelSpec, ask: Callable[[], object]) -> str:
    """The first line of what `ask` raises, which names the file, what it was and is, and what to do."""
    with pytest.raises(PoolError) as caught:
        ask()
    line = first_line(caught)
    size = Path(spec.path).stat().st_size
    for part in (spec.path, "was changed after it was chosen", f"{spec.size_bytes} bytes", f"{size} bytes", "load it"):
        assert part in line
    return line


def test_a_file_replaced_before_it_is_loaded_is_refused(pool: Pool, file: Path) -> None:
    spec = spec_of(file)
    os.replace(other_weights(file), file)
    refusal(pool, spec, lambda: pool.load(spec))
    with pytest.raises(ValueError, match="was changed after it was chosen"):
        spec.refuse_changed()
    pool.load(spec_of(file))


def test_a_file_that_is_gone_before_it_is_loaded_is_named(file: Path) -> None:
    spec = spec_of(file)
    file.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors was there and is gone; put it back"):
        spec.refuse_changed()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_replaced_by_another_of_its_name_stays_what_it_was_for_who_holds_it(
    pool: Pool, file: Path, dtype: str
) -> None:
    spec = spec_of(file, dtype)
    before = step(pool, spec)
    os.replace(other_weights(file), file)
    assert not torch.equal(step(pool, spec, deltas=PATCHES), before)
    assert torch.equal(step(pool, spec), before)
    assert not torch.equal(step(pool, spec_of(file, dtype)), before)


def test_a_file_written_over_is_refused_at_the_next_step(pool: Pool, file: Path) -> None:
    spec = spec_of(file)
    step(pool, spec)
    write_over(file)
    refusal(pool, spec, lambda: step(pool, spec))
    step(pool, spec_of(file))
    pool.unload(spec)


@pytest.mark.parametrize(
    ("plan", "before", "after"),
    [(PLAN, PRISTINE, PATCHES), (SHARDED, PATCHES, PRISTINE)],
    ids=["made, of whole weights", "taken back, of sharded ones"],
)
def test_a_patch_of_a_file_written_over_is_refused(
    pool: Pool, file: Path, plan: ParallelPlan, before: WeightDeltas, after: WeightDeltas
) -> None:
    """What the file says now would stand beside what it said at the load."""
    spec = spec_of(file)
    pool.load(spec, plan, deltas=before)
    write_over(file)
    refusal(pool, spec, lambda: pool.load(spec, plan, deltas=after))


def test_a_rank_that_dies_of_a_file_cut_short_names_the_file(pool: Pool, file: Path) -> None:
    spec = spec_of(file)
    step(pool, spec)
    segments = pool._workers.generation.segments
    before = [segments.beats(rank) for rank in range(2)]

    def cut() -> None:
        """In the middle of the step: each rank has found the file whole and done a block."""
        if all(segments.beats(rank) > before[rank] for rank in range(2)):
            os.truncate(file, 4096)

    line = refusal(pool, spec, lambda: step(pool, spec, width=128, check=cut))
    assert "killed by SIGBUS: " in line
    assert "4096 bytes" in line
