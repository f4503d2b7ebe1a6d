"""A first-block cache over ComfyUI's own classes: what one process with replaced blocks computes, on one rank and two.

Owns the bounds, and which classes are refused one. How a cache and its simulation run is skipping.py's.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rounding import ROUNDING

from host.fetch import comfyui_path
from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.model_call import CallPlace
from parallel_runtime.models.specs import SPECS
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import RunResult
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error
from tools.known import cases

from .cases import CASES as ALL
from .ranks import Ranks
from .skipping import skipping

pytestmark = pytest.mark.slow
Command = Callable[..., subprocess.CompletedProcess[str]]

VISIBLE = 1e-4  # what skipping must move
# Streams of one kind and of two in another order, residuals between blocks, two lists of blocks, a grid, fewer tokens
# than ranks.
CASES = (
    *("SD3.5 medium, ControlNet", "Qwen-Image, text mask", "Wan 5B, a timestep for each frame", "Z-Image"),
    *("Flux.1, ControlNet and mask", "Cosmos Predict2, an upright image (Anima)"),
)


def has_chain(path: str) -> bool:
    """Whether blocks of a class follow one another."""
    return not SPECS[path].unchained and not SPECS[path].whole


RUNS = [
    pytest.param(each.name, id=each.name, marks=() if each.name in CASES else pytest.mark.full)
    for each in cases().values()
    if each.name in ALL and has_chain(each.path)
]


@pytest.mark.parametrize("name", RUNS)
def test_a_call_that_skips_is_what_one_process_makes_of_kept_residuals(comfyui_ranks: Ranks, name: str) -> None:
    (one,), two = (comfyui_ranks.run(skipping, name, ranks=ranks) for ranks in (1, 2))
    for row in (one, *two):
        assert max(row["skipped"], row["whole"]) <= ROUNDING, row
        assert row["visible"] > VISIBLE, row
        assert not row["held"] and row["kept"], "what was kept must go before the call that replaces it is computed"
    assert two[0]["change"] == two[1]["change"] == pytest.approx(one["change"], rel=ROUNDING)
    assert abs(two[0]["alone"] - two[1]["alone"]) > 10 * ROUNDING * one["alone"], "without the others' sums it is alike"


TEXTS = (7, 12)  # of the two conditionings, so they are two calls
STEPS = (0.0, 0.1, 0.2, 1.0, 1.05, 1.1)  # of the latent: small moves, a large one, small ones again


def run(pool: Pool, spec: ModelSpec, plan: str, threshold: float) -> list[RunResult]:
    """A step a latent, of two calls, by the plan."""
    found = []
    for step in STEPS:
        calls = []
        for text in TEXTS:
            made = call(step, text=text, batch=2)
            place = CallPlace(f"{plan} {threshold}", f"text of {text}")
            calls.append(replace(made, place=place, options={**made.options, "step_cache": threshold}))
        found.append(pool.run(spec, ParallelPlan.parse(plan), calls))
    return found


def skipped(results: list[RunResult]) -> list[list[int]]:
    """By step and rank, how many calls skipped their blocks."""
    return [[each.cached.skipped if each.cached else 0 for each in result.ran] for result in results]


def errors(got: list[RunResult], want: list[RunResult]) -> list[float]:
    """By step, of both calls."""
    return [relative_error(torch.cat(a.outs, 1), torch.cat(b.outs, 1)) for a, b in zip(got, want, strict=True)]


THRESHOLD = 0.15  # one of the two calls skips where the other does not


@pytest.fixture(scope="module")
def one(four_ranks: Pool, wan: ModelSpec) -> list[RunResult]:
    """What one rank computes, which skips some calls; without a cache it skips none."""
    exact, found = run(four_ranks, wan, "ulysses=1", 0.0), run(four_ranks, wan, "ulysses=1", THRESHOLD)
    assert [sum(each) for each in skipped(exact)] == [0] * len(STEPS)
    counts = [each[0] for each in skipped(found)]
    assert counts[0] == counts[3] == 0 and 0 < sum(counts) < 2 * len(STEPS), counts
    moved = [error > VISIBLE for error in errors(found, exact)]
    assert moved == [count > 0 for count in counts], (moved, counts)
    return found


@pytest.mark.parametrize("plan", ["ring=2", "cfg=2,ulysses=2,weights=sharded"])
def test_every_plan_skips_the_calls_that_one_rank_skips(
    pool: Pool, wan: ModelSpec, one: list[RunResult], plan: str
) -> None:
    counts = [each[0] for each in skipped(one)]
    got = run(pool, wan, plan, THRESHOLD)
    parts = ParallelPlan.parse(plan).parts
    for step, by_rank in enumerate(skipped(got)):
        groups = [by_rank[first] for first in range(0, len(by_rank), parts)]
        assert by_rank == [count for count in groups for _ in range(parts)], "ranks of a call decided apart"
        assert sum(groups) == counts[step]
    assert max(errors(got, one)) <= ROUNDING


SIZE = ("--width", "128", "--height", "96", "--frames", "5", "--text-tokens", "9", "--dtype", "float32", "--json")


def tried(command: Command, spec: ModelSpec, *more: str) -> subprocess.CompletedProcess[str]:
    """`verify` of the Wan with a step cache."""
    return command("verify", "--model", spec.path, "--comfyui", str(comfyui_path()), *SIZE, "--step-cache", *more)


def test_verify_holds_a_plans_cache_to_one_ranks(wan: ModelSpec, command: Command) -> None:
    done = tried(command, wan, "0.5", "--plan", "ulysses=2", "--steps", "6")
    report = json.loads(done.stdout)
    told = report["step_cache"]
    assert done.returncode == 0 and report["within_tolerance"], done.stdout
    assert 0 < told["skipped"] == told["one_rank_skipped"] < told["of"] == told["one_rank_of"] == 6
    assert told["one_rank_rel_err"] <= ROUNDING and told["difference"] > VISIBLE
    wrong = tried(command, wan, "0.5", "--plan", "ulysses=2", "--steps", "6", "--negative-control")
    assert wrong.returncode == 1
    assert json.loads(wrong.stdout)["step_cache"]["one_rank_rel_err"] > VISIBLE
