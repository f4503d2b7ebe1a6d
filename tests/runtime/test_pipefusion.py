"""PipeFusion: exact while every step is warm-up, equal to one process of the same staleness after, and not the same."""

import pytest
import torch

from parallel_runtime.adapters.flux_config import FluxConfig
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.sample_model import sample_config, write_sample
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.oracle import Oracle
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.pool.resident import ResidentRun
from runtime.resident_runs import host_loop, make_run
from runtime.stale_model import StaleModel

# fp32 sums in another order, four calls of the model after one another
TOLERANCE = 1e-5
# The random model's latent moves a lot from step to step; a pipeline that never went stale would be below TOLERANCE.
DIFFERENT = 1e-3
STEPS = 3
KINDS = {
    "one side": {},
    "two sides of unequal texts, three images": {"batch": 3, "sides": (7, 12)},
    "a mask, references, an odd length": {"mask": True, "references": 31, "sides": (5, 5)},
}
PLANS = (
    "pipefusion=2",
    "pipefusion=2,patches=5",
    "pipefusion=3",
    "pipefusion=4,patches=7",
    "pipefusion=2,ulysses=2",
    "pipefusion=2,ring=2,patches=3",
    "pipefusion=2,ring=2,ulysses=2",
    "pipefusion=2,ulysses=3",
    "pipefusion=3,cfg=2",
    "pipefusion=2,cfg=3",
    "pipefusion=2,data=2,cfg=2",
)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model of two double and two single blocks: up to four stages."""
    path = tmp_path_factory.mktemp("deep") / "deep.safetensors"
    write_sample(path, sample_config(heads=12, depth=2, depth_single=2))
    return ModelSpec.of(path)


@pytest.fixture(scope="module")
def config(deep: ModelSpec) -> FluxConfig:
    """Its sizes."""
    return FluxConfig.from_header(read_header(deep.path))


def sample(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: ResidentRun
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The result and the denoised latent of every step, which come in order."""
    seen: dict[int, torch.Tensor] = {}
    result = pool.sample(spec, plan, run, on_step=lambda step, x: seen.setdefault(step, x.clone()))
    assert list(seen) == list(range(STEPS))
    return result.out, tuple(seen.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_in_warm_up_equals_one_process(
    eight_ranks: Pool, deep: ModelSpec, config: FluxConfig, kind: str
) -> None:
    run = make_run(config, **KINDS[kind])
    expected, previews = host_loop(Oracle(deep.path), run)
    errors = {}
    for name in PLANS:
        plan = ParallelPlan.parse(f"{name},warmup_steps={STEPS}")
        out, seen = sample(eight_ranks, deep, plan, run)
        errors[name] = max(map(relative_error, (out, *seen), (expected, *previews)))
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}, errors


@pytest.mark.parametrize("kind", KINDS)
def test_after_the_warm_up_it_is_as_stale_as_the_same_in_one_process(
    eight_ranks: Pool, deep: ModelSpec, config: FluxConfig, kind: str
) -> None:
    run = make_run(config, **KINDS[kind])
    synchronous, _ = host_loop(Oracle(deep.path), run)
    errors, differences = {}, {}
    for name in PLANS:
        plan = ParallelPlan.parse(name)
        stale = StaleModel(deep.path, patches=plan.num_patches, warm_calls=1, sides=len(run.conds))
        expected, previews = host_loop(stale, run)
        out, seen = sample(eight_ranks, deep, plan, run)
        errors[name] = max(map(relative_error, (out, *seen), (expected, *previews)))
        differences[name] = relative_error(out, synchronous)
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}, errors
    assert all(difference > DIFFERENT for difference in differences.values()), differences
