"""ComfyUI's step caches in whole sampling runs: every plan skips what one process skips, and says so.

One process is the unmodified diffusers model called step by step, its cache's numbers taken over the whole latent. That
ComfyUI's own functions compute the same is families/test_step_caches.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import Prediction, RecurrenceStep, SamplerRecurrence
from parallel_runtime.stock_caches import CachedRows, Decision, StockCache
from runtime.in_worker_runs import make_run

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # fp32 sums in another order, as many calls of the model after one another
STEPS = 10
CALLS = {"EasyCache": "--mmmmmmm-", "LazyCache": "nnmmmmmmm-"}
STALE = "pipefusion=2,patches=2,warmup_steps=2"
PLANS = (
    "ulysses=2",
    "ring=3",
    "cfg=2",
    "cfg=2,ring=2,weights=sharded",
    "pipefusion=2,ring=2,patches=3,warmup_steps=10",
)
PLANS += ("cfg=3,pipefusion=2,patches=2,warmup_steps=10",)


def cached_run(config: FluxConfig, name: str, *, threshold: float = 0.5, mask: bool = False) -> InWorkerRun:
    """A run of two sides and ten Euler steps, with a cache that looks at some numbers."""
    sigmas = [1 - step / STEPS for step in range(STEPS)]
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1.0)]
    for step, sigma in enumerate(sigmas[1:]):
        kept = sigma / sigmas[step]
        states.append(RecurrenceStep(inputs=((step, kept),), denoised=((step, 1 - kept),), sigma=sigma, timestep=sigma))
    states.append(RecurrenceStep(denoised=((STEPS - 1, 1.0),)))
    plain = make_run(config, batch=2, sides=(7, 7), mask=mask)
    easy = name == "EasyCache"
    cache = StockCache(
        easy=easy, threshold=threshold, calls=CALLS[name], first=int(easy), together=easy, overwrites=easy
    )
    looked_at = torch.rand(1, *plain.shape[1:], generator=torch.Generator().manual_seed(5)) < 0.1
    recurrence = SamplerRecurrence(states=tuple(states), step_ends=tuple(range(STEPS)))
    return replace(plain, recurrence=recurrence, given={0: plain.given[0]}, cfg=1.5, cache=cache, looked_at=looked_at)


def one_process(model: Callable[[Mapping], torch.Tensor], run: InWorkerRun) -> tuple[torch.Tensor, int]:
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
        for cond in () if skips else run.conds:
            times = torch.full((x.shape[0],), state.timestep)
            sides.append(model({**cond.tensors, "img": x, "timesteps": times}))
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
    name: str, eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig
) -> None:
    run = cached_run(config, name, mask=name == "LazyCache")
    expected, skipped = one_process(reference_model, run)
    assert 0 < skipped < STEPS - CALLS[name].count("-") - 2
    for plan in PLANS:
        result = eight_ranks.sample(sample, ParallelPlan.parse(plan), run)
        assert relative_error(result.out, expected) <= TOLERANCE, plan
        assert result.skipped_calls == skipped, plan
    other = replace(run, cache=replace(run.cache, threshold=run.cache.threshold / 4))
    wrong = eight_ranks.sample(sample, ParallelPlan.parse(PLANS[0]), other)
    assert wrong.skipped_calls < skipped and relative_error(wrong.out, expected) > 100 * TOLERANCE
    never = eight_ranks.sample(sample, ParallelPlan.parse(PLANS[0]), replace(run, cache=None, looked_at=None))
    assert never.skipped_calls == 0 and never.ran[0].skipped_calls is None


def test_stages_with_old_keys_skip_too_and_a_cancelled_run_leaves_nothing_in_flight(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig
) -> None:
    """The last stage says ahead of the latent whether a call is skipped: of a call that nobody makes, too."""
    run, plan = cached_run(config, "EasyCache"), ParallelPlan.parse(STALE)
    seen: list[int] = []

    class Stopped(Exception):  # noqa: N818  as ComfyUI's own interrupt is named
        """What a caller raises to cancel."""

    def check() -> None:
        if len(seen) > after[-1]:
            raise Stopped

    after = [0]
    for steps in range(1, 6):
        after.append(steps)
        seen.clear()
        with pytest.raises(Stopped):
            eight_ranks.sample(
                sample, plan, run, on_step=lambda step, _: (seen.append(step), check()), check_cancelled=check
            )
    whole = eight_ranks.sample(sample, plan, run)
    expected, skipped = one_process(reference_model, run)
    assert abs(whole.skipped_calls - skipped) <= 1  # its latents are others
    assert TOLERANCE < relative_error(whole.out, expected) < 0.2
    warm = eight_ranks.sample(sample, replace(plan, warmup_steps=STEPS), run)
    assert relative_error(warm.out, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"looked_at": None}, "belong together"),
        ({"looked_at": torch.ones(1, 72, 3, dtype=torch.bool)}, "give bool of shape"),
        ({"cache": StockCache(easy=False, threshold=0.1, calls="m")}, "a step cache for 1 calls, the run makes 10"),
    ],
)
def test_caches_that_do_not_fit_the_run_are_refused(config: FluxConfig, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(cached_run(config, "LazyCache"), **change)
    with pytest.raises(ValueError, match="calls 'x' of a step cache"):
        StockCache(easy=False, threshold=0.1, calls="x")
