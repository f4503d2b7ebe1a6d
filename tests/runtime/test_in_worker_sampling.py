"""A whole sampling run inside the pool equals the same loop around calls of one rank, step by step.

The loop around it has the order of operations that ComfyUI has.
"""

import pytest
import torch
from rounding import ROUNDING

from host.hosted_runs import AskModel, asking, host_loop, make_run, read_otherwise, with_options
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

pytestmark = pytest.mark.slow

PLANS = (
    *("ulysses=1", "ulysses=2", "ring=2", "ring=3", "ulysses=2,ring=2", "cfg=2", "cfg=2,ulysses=2", "cfg=3", "data=2"),
    *("data=2,cfg=2,ring=2", "ulysses=5", "cfg=2,ulysses=2,weights=sharded", "data=2,ring=2,weights=sharded"),
    *("ulysses=3,weights=offloaded", "pipefusion=2,warmup_steps=5"),  # three steps, all of warm-up
)
KINDS = {
    "one side": {},
    "two sides of unequal texts, three images": {"batch": 3, "texts": (7, 12)},
    "a mask": {"mask": True, "texts": (5, 5)},
}
# Every plan runs one kind, in turn; all kinds under all plans are left to the full tier.
CASES = [
    *(pytest.param(kind, PLANS[index :: len(KINDS)], id=kind) for index, kind in enumerate(KINDS)),
    *(pytest.param(kind, PLANS, id=f"{kind}, every plan", marks=pytest.mark.full) for kind in KINDS),
]


@pytest.fixture(scope="module")
def model(eight_ranks: Pool, tiny_hosted: ModelSpec) -> AskModel:
    """One rank."""
    return asking(eight_ranks, tiny_hosted, ParallelPlan())


@pytest.mark.parametrize(("kind", "names"), CASES)
def test_every_plan_samples_as_a_host_loop_does(
    eight_ranks: Pool, tiny_hosted: ModelSpec, model: AskModel, kind: str, names: tuple[str, ...]
) -> None:
    run = make_run(**KINDS[kind])
    expected, previews = host_loop(model, run)
    errors = {}
    for name in names:
        seen: list[torch.Tensor] = []
        plan = ParallelPlan.parse(name)
        result = eight_ranks.sample(tiny_hosted, plan, run, on_step=lambda step, x, s=seen: s.append((step, x.clone())))
        assert [step for step, _ in seen] == [0, 1, 2]
        pairs = zip((x for _, x in seen), previews, strict=True)
        errors[name] = max(relative_error(result.out, expected), *(relative_error(*pair) for pair in pairs))
    assert not {name: error for name, error in errors.items() if not error <= ROUNDING}, errors


def test_a_model_sampling_that_is_no_flow_is_read_by_its_numbers(
    eight_ranks: Pool, tiny_hosted: ModelSpec, model: AskModel
) -> None:
    flow = make_run(texts=(7, 12), mask=True)
    run = read_otherwise(flow)
    expected = host_loop(model, run)[0]
    result = eight_ranks.sample(tiny_hosted, ParallelPlan.parse("cfg=2,ulysses=2"), run)
    assert relative_error(result.out, expected) <= ROUNDING
    assert relative_error(host_loop(model, flow)[0], expected) > 0.01


@pytest.mark.parametrize("name", ["ulysses=2", "cfg=2,ring=2"])
def test_without_the_exchange_the_latent_is_wrong(
    eight_ranks: Pool, tiny_hosted: ModelSpec, model: AskModel, name: str
) -> None:
    run = make_run(texts=(7, 7))
    result = eight_ranks.sample(tiny_hosted, ParallelPlan.parse(name), with_options(run, local_attention=True))
    assert relative_error(result.out, host_loop(model, run)[0]) > 0.01
