"""A run's context in ComfyUI's options: whoever copies them, and whatever run begins inside of another."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def run_context(module_of_pack) -> ModuleType:
    return module_of_pack("nodes.host.run_context")


@pytest.fixture(scope="module")
def new_run(module_of_pack, run_context) -> Any:
    """Makes a run with a MODEL of a file, with a LoRA; nothing is started."""
    pooled = module_of_pack("nodes.host.pooled_model")
    device = module_of_pack("parallel_runtime.devices").Device("cpu", 0)
    plan = module_of_pack("parallel_runtime.plan").ParallelPlan()
    decision = module_of_pack("parallel_runtime.planner.automatic").Decision(plan=plan)
    patch = module_of_pack("parallel_runtime.weight_patch")

    def make(path: str) -> Any:
        model = pooled.PooledModel(
            devices=(device,),
            spec=module_of_pack("parallel_runtime.checkpoint").ModelSpec(path, "bfloat16", "flux", 1, 0),
            plan=plan,
            sizes=pooled.WeightSizes(total=1, biggest_block=1),
            num_heads=24,
        )
        diff = patch.WeightPatch(key="img_in.weight", kind="diff", strength=1.0, values=(torch.ones(2),))
        patches = patch.WeightPatchSet("a", (diff,))
        return run_context.RunContext(model=model, decision=decision, patches=patches, recorder=run_context.Recorder())

    return make


def test_a_node_that_copies_the_options_deeply_hands_on_the_same_run(run_context, new_run) -> None:
    """Another object would be the run of no model, and the step would go by the plan and LoRAs loaded last."""
    run = new_run("/a.safetensors")
    with run_context.begun(options := {}, run):
        copied = copy.deepcopy(options)
    assert run_context.run_of(copied) is run
    assert run == run and run != new_run("/a.safetensors"), "options are compared by packs, a LoRA's tensors cannot be"
    assert hash(run) == hash(run_context.run_of(copied))


def test_a_run_inside_of_another_gives_the_options_back_to_it(run_context, new_run) -> None:
    """A wrapper around a guider's run that samples with the same guider once more."""
    outer, inner, options = new_run("/a.safetensors"), new_run("/b.safetensors"), {}
    with run_context.begun(options, outer):
        with run_context.begun(options, inner):
            assert run_context.run_of(options) is inner
            assert run_context.run_inside(inner.model) is inner
            assert run_context.run_inside(outer.model) is None, "its memory was counted by another model's plan"
        assert run_context.run_of(options) is outer
        assert run_context.run_inside(outer.model) is outer
    assert run_context.run_of(options) is None
    assert run_context.run_inside(outer.model) is None
