"""Calls of Qwen-Image 2.1 in a pool: later steps compute the picture's rows alone, and nothing of a run outlives it.

There where ComfyUI can load the model. Owns when a run begins and ends in the ranks, and that the planner counts what
they keep and compute; the rows and keys of one call are test_kept_state.py's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from families import qwen21
from families.qwen21 import FILE
from families.variants import NEWER, write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.model_call import CallPlace, ModelCall
from parallel_runtime.models.hosted.calls import travelling
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import choose_plan
from parallel_runtime.planner.comfyui_process import find_comfyui
from parallel_runtime.planner.cost import step_cost
from parallel_runtime.planner.counted import CountedModel, kept_by_class
from parallel_runtime.planner.counting import Counts
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.memory import memory_of
from parallel_runtime.planner.work import Work
from parallel_runtime.pool.calls import RunResult
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

pytestmark = pytest.mark.slow
TEXTS, TARGET, STEPS = (7, 11), 35, 3  # tokens of the prompts and of the picture, as many as the reference


def call(step: int, text: int, run: str | None, *, stored: str = "", reference: bool = True) -> ModelCall:
    """A call of a step of a run, None for one of no run; `stored`: in which format something is kept."""
    numbers = torch.Generator().manual_seed(text)
    context, references = torch.randn(1, text, 48, generator=numbers), [torch.randn(1, 64, 5, 7, generator=numbers)]
    x = torch.randn(1, 64, 5, 7, generator=numbers.manual_seed(step))
    told = {"qwen_image21_cache": {"device": "gpu", "dtype": stored}} if stored else {}
    kwargs = {"ref_latents": references if reference else [], "transformer_options": told}
    given = [x, torch.tensor([0.9 - 0.2 * step]), context]
    tensors, options = travelling("Qwen-Image 2.1", given, kwargs, batched=[*given, *kwargs["ref_latents"]])
    place = None if run is None else CallPlace(run, "")
    return ModelCall(tensors=tensors, out_shape=(1, x.numel()), options=options, place=place)


def step_of(pool: Pool, spec: ModelSpec, plan: ParallelPlan, step: int, run: str | None, **more: Any) -> RunResult:
    """A step of two conditionings."""
    return pool.run(spec, plan, [call(step, text, run, **more) for text in TEXTS])


if qwen21 in NEWER:

    @pytest.fixture(scope="module")
    def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
        """The model's file."""
        models = write_families(Path(tmp_path_factory.mktemp("qwen")), only=["qwen-image 2.1"])
        path, comfyui = models / "diffusion_models" / FILE, ComfyUI(str(comfyui_path()), ())
        return ModelSpec.of(path, "float32", comfyui=comfyui)

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
                assert relative_error(torch.cat(got.outs, 1), torch.cat(want.outs, 1)) <= ROUNDING
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

    @pytest.fixture(scope="module")
    def model(spec: ModelSpec) -> CountedModel:
        """The model as it is counted, on the meta device."""
        found = Counts().of(spec.path, "float32", find_comfyui(str(comfyui_path()))).model
        assert not found.from_real_calls
        return found

    @pytest.mark.parametrize("stored", ["default", "int8", "int4"])
    def test_the_planner_counts_the_bytes_that_ranks_keep(
        pool: Pool, spec: ModelSpec, model: CountedModel, stored: str
    ) -> None:
        rates = known_calibration("cpu").rates
        for plan in (ParallelPlan(ulysses=2), ParallelPlan(cfg=2, ulysses=2)):
            run, guided = (
                f"{stored}, {plan.name}",
                Work(image_tokens=TARGET, text_tokens=0, guided=True, kept_as=stored),
            )
            of_sides = [kept_by_class(model, replace(guided, text_tokens=text), rates)[0] for text in TEXTS]
            (ran, *_), first, *_ = (
                step_of(pool, spec, plan, 0, f"{run}, {more}", stored=stored, reference=more).ran
                for more in (False, True)
            )
            assert ran.kept.kept_bytes == round(sum(of_sides) if plan.cfg == 1 else of_sides[0])
            # of a reference the key has as many numbers as the latent has channels, of the text as the encoder has
            longer = [kept_by_class(model, replace(guided, text_tokens=each + TARGET), rates)[0] for each in TEXTS]
            said = sum(longer) if plan.cfg == 1 else longer[0]
            assert first[0].kept.kept_bytes == pytest.approx(said, rel=0.05)
            work = replace(guided, text_tokens=max(TEXTS))
            told, off = (memory_of(model, each, plan, rates) for each in (work, replace(work, kept_on="off")))
            sides = 2 // plan.cfg
            assert told.activations - off.activations == pytest.approx(sides * of_sides[1], abs=1)

    def test_the_planner_weighs_steps_that_find_what_the_first_one_kept(model: CountedModel) -> None:
        """References of four times the picture: without what is kept each rank computes all of them in every step."""
        there = Work(image_tokens=1024, text_tokens=4096, guided=False, element_bytes=4)
        off, table = replace(there, kept_on="off"), known_calibration("cpu")
        quick = replace(table, link=replace(table.link, latency_s=0.0, bandwidth=1e15))
        one, two = (
            [step_cost(model, each, plan, quick) for each in (there, off)]
            for plan in (ParallelPlan(), ParallelPlan(ulysses=2))
        )
        assert two[0].step_s < 0.7 * one[0].step_s < one[0].warmup_step_s
        assert two[1].step_s > 0.9 * one[1].step_s == 0.9 * one[1].warmup_step_s
        assert model.count("module.matmul_flops", there) < 0.3 * model.in_first_step.count("module.matmul_flops", there)
        slow = replace(quick, link=replace(quick.link, latency_s=0.1 * one[0].step_s))
        chosen = [choose_plan(model, each, [10**12] * 2, slow).plan for each in (there, off)]
        assert [plan and plan.parts for plan in chosen] == [2, 1]
