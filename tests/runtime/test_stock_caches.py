"""ComfyUI's step caches in whole sampling runs: every plan skips what one process skips, and says so.

One process is the model on one rank called step by step, its cache's numbers taken over the whole latent. That
ComfyUI's own functions compute the same is families/test_step_caches.py's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from host.hosted_runs import AskModel, asking, euler, make_run, outputs
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import WorkerLoopRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error
from parallel_runtime.sampler_recurrence import Prediction
from parallel_runtime.stock_caches import CachedRows, Decision, StockCache

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # fp32 sums in another order, as many calls of the model after one another
STEPS = 10
CALLS = {"EasyCache": "--mmmmmmm-", "LazyCache": "nnmmmmmmm-"}
PLANS = ("ulysses=2", "ring=3", "cfg=2", "cfg=2,ring=2,weights=sharded", "cfg=3,ulysses=2")


def cached_run(name: str, *, threshold: float = 0.5, mask: bool = False) -> WorkerLoopRun:
    """A run of two sides and ten Euler steps, with a cache that looks at some numbers."""
    plain = make_run(batch=2, texts=(7, 7), mask=mask, recurrence=euler(STEPS))
    easy = name == "EasyCache"
    cache = StockCache(
        easy=easy, threshold=threshold, calls=CALLS[name], first=int(easy), together=easy, overwrites=easy
    )
    looked_at = torch.rand(1, *plain.shape[1:], generator=torch.Generator().manual_seed(5)) < 0.1
    return replace(plain, cfg=1.5, cache=cache, looked_at=looked_at)


def one_process(model: AskModel, run: WorkerLoopRun) -> tuple[torch.Tensor, int]:
    """The latent, and how many calls were skipped."""
    cache = run.cache
    rows = CachedRows(cache, run.looked_at[0], sides=(0, 1) if cache.easy else (0,))
    decision = Decision(cache, lambda sums: sums)

    def guided(x: torch.Tensor, number: int) -> torch.Tensor:
        state = run.recurrence.states[number]
        reading = state.prediction or Prediction.of_flow(state.sigma)
        skips = decision.skips(number, [(rows, x)])
        if skips and not cache.easy:
            return rows.again(x)[0]
        sides = rows.again(x) if skips else []
        sides += () if skips else outputs(model, run, x, state.timestep)
        if cache.easy and not skips:
            rows.note(number, x, sides)
        first, second = ((side if skips and cache.overwrites else x) + side * reading.weight for side in sides)
        out = second + (first - second) * run.cfg
        if not cache.easy:
            rows.note(number, x, [out])
        return out

    def denoise(number: int, x: torch.Tensor) -> torch.Tensor:
        if run.inpaint is None:
            return guided(x, number)
        sigma, kept = run.recurrence.states[number].sigma, run.inpaint
        x = x * kept.mask + (kept.noise * sigma + kept.latent * (1 - sigma)) * (1 - kept.mask)
        return guided(x, number) * kept.mask + kept.latent * (1 - kept.mask)

    return run.recurrence.run(run.given.__getitem__, denoise), decision.skipped


@pytest.mark.parametrize("name", CALLS)
def test_every_plan_skips_the_calls_that_one_process_skips(
    name: str, eight_ranks: Pool, tiny_hosted: ModelSpec
) -> None:
    run = cached_run(name, mask=name == "LazyCache")
    expected, skipped = one_process(asking(eight_ranks, tiny_hosted, ParallelPlan()), run)
    assert 0 < skipped < STEPS - CALLS[name].count("-") - 2
    for plan in PLANS:
        result = eight_ranks.sample(tiny_hosted, ParallelPlan.parse(plan), run)
        assert relative_error(result.out, expected) <= TOLERANCE, plan
        assert result.skipped_calls == skipped, plan
    other = replace(run, cache=replace(run.cache, threshold=run.cache.threshold / 4))
    wrong = eight_ranks.sample(tiny_hosted, ParallelPlan.parse(PLANS[0]), other)
    assert wrong.skipped_calls < skipped and relative_error(wrong.out, expected) > 100 * TOLERANCE
    never = eight_ranks.sample(tiny_hosted, ParallelPlan.parse(PLANS[0]), replace(run, cache=None, looked_at=None))
    assert never.skipped_calls == 0 and never.ran[0].skipped_calls is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"looked_at": None}, "belong together"),
        ({"looked_at": torch.ones(1, 1, 3, dtype=torch.bool)}, "give bool of shape"),
        ({"cache": StockCache(easy=False, threshold=0.1, calls="m")}, "a step cache for 1 calls, the run makes 10"),
    ],
)
def test_caches_that_do_not_fit_the_run_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(cached_run("LazyCache"), **change)
    with pytest.raises(ValueError, match="calls 'x' of a step cache"):
        StockCache(easy=False, threshold=0.1, calls="x")
