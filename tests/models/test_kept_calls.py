"""Calls of Qwen-Image 2.1 in a pool: later steps compute the picture's rows alone, and nothing of a run outlives it.

There where ComfyUI can load the model. Owns when a run begins and ends in the ranks; the rows and keys of one call are
checks_kept.py's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families.qwen21 import FILE
from families.variants import NEWER, write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import HOSTED, ComfyUI, ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.hosted.calls import to_tree
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall, RunResult
from parallel_runtime.pool.pool import Pool

pytestmark = pytest.mark.slow
TEXTS, TARGET, STEPS, ERROR = (7, 11), 35, 3, 1e-5  # tokens of the prompts and of the picture, as many as the reference


def call(step: int, text: int, run: str | None) -> ModelCall:
    """A call of a step of a run, None for one of no run."""
    numbers = torch.Generator().manual_seed(text)
    context, reference = torch.randn(1, text, 48, generator=numbers), torch.randn(1, 64, 5, 7, generator=numbers)
    x = torch.randn(1, 64, 5, 7, generator=numbers.manual_seed(step))
    kwargs = {"ref_latents": [reference], "transformer_options": {}}
    tree, tensors = to_tree({"args": [x, torch.tensor([0.9 - 0.2 * step]), context], "kwargs": kwargs})
    options = {"call": tree, "tensors": len(tensors), "batched": [0, 1, 2, 3], "residuals": [], "method": None}
    if run is not None:
        options["pipeline"] = {"run": run, "key": ""}
    named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    return ModelCall(tensors=named, out_shape=(1, x.numel()), out_dtype=torch.float32, options=options)


def step_of(pool: Pool, spec: ModelSpec, plan: ParallelPlan, step: int, run: str | None) -> RunResult:
    """A step of two conditionings."""
    return pool.run(spec, plan, [call(step, text, run) for text in TEXTS])


if NEWER:

    @pytest.fixture(scope="module")
    def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
        """The model's file."""
        models = write_families(Path(tmp_path_factory.mktemp("qwen")), only=["qwen-image 2.1"])
        path, comfyui = models / "diffusion_models" / FILE, ComfyUI(str(comfyui_path()), ())
        return ModelSpec.of(path, "float32", adapter=HOSTED, comfyui=comfyui)

    @pytest.fixture(scope="module")
    def pool() -> Pool:
        """Four ranks."""
        with Pool(parse_devices("cpu:4").devices, threads_per_rank=1) as ranks:
            yield ranks

    @pytest.mark.parametrize(
        "plan", ["ulysses=2", "ring=2", "cfg=2", "cfg=2,ulysses=2", "cfg=2,ulysses=2,weights=sharded"]
    )
    def test_later_steps_compute_the_pictures_rows_alone(pool: Pool, spec: ModelSpec, plan: str) -> None:
        parsed = ParallelPlan.parse(plan)
        wanted = [step_of(pool, spec, ParallelPlan(), step, None) for step in range(STEPS)]
        assert [each.ran[0].kept for each in wanted] == [None] * STEPS, "a call of no run keeps nothing"
        for run in (f"{plan}, first", f"{plan}, second"):
            for step, want in enumerate(wanted):
                got = step_of(pool, spec, parsed, step, run)
                assert relative_error(torch.cat(got.outs, 1), torch.cat(want.outs, 1)) <= ERROR
                counted = [each.kept for each in got.ran]
                assert {each.found for each in counted} == {len(TEXTS) // parsed.cfg if step else 0}
                prefixes = 0 if step else parsed.parts * sum(text + TARGET for text in TEXTS)
                assert sum(each.rows for each in counted) == len(TEXTS) * TARGET + prefixes
                sent = [each.sent_bytes for each in got.ran]
                assert 0 < sent[0] <= 1.1 * max(sent[1:]) or parsed.parts == 1, "what all ranks have is not sent"

    def test_what_is_kept_goes_with_the_run_and_with_the_weights(pool: Pool, spec: ModelSpec) -> None:
        def found(run: str) -> int:
            return step_of(pool, spec, ParallelPlan(ulysses=2), 0, run).ran[0].kept.found

        assert [found(run) for run in "aabba"] == [0, 2, 0, 2, 0]
        pool.give_back([], of_run=True)
        assert [found("a"), found("a")] == [0, 2]
        pool.unload(spec)
        assert [found("a"), found("a")] == [0, 2]
