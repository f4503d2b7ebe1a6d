"""Mistakes at ComfyUI's side: what reaches the workers, what may run at once, and which samplers are taken apart."""

from __future__ import annotations

from .mutant import Mutant

BENT = "test_bent_samplers.py::test_a_sampler_that_is_slightly_bent_is_refused_by_the_check_of_linearity_itself"

MUTANTS = (
    Mutant(
        "a sampler that is slightly bent passes for linear",
        "_check(recurrence, random, plain, randoms, 100 * TOLERANCES[dtype])",
        "_check(recurrence, random, plain, randoms, 1e6 * TOLERANCES[dtype])",
        (BENT,),
    ),
    Mutant(
        "only a sampler's result is checked",
        "        _check_close(x, run.inputs[number], tolerance)\n        return vectors[number + 1]",
        "        return vectors[number + 1]",
        ("test_bent_samplers.py::test_a_sampler_whose_last_step_hides_what_was_bent_is_refused_too",),
    ),
    Mutant(
        "calls in tasks get each other's results",
        "running.outs = [outs.popleft() for _ in running.calls]",
        "running.outs = [outs.pop() for _ in running.calls]",
        ("test_cooperative_tasks.py::test_calls_of_all_tasks_go_in_one_request_and_each_gets_its_own_result",),
    ),
    Mutant(
        "calls that cannot travel together are sent with the first one's model",
        "numbers.setdefault(handed.key, []).append(number)",
        "numbers.setdefault(calls[0].key, []).append(number)",
        ("test_cooperative_tasks.py::test_calls_that_cannot_travel_together_go_in_requests_of_their_own",),
    ),
    Mutant(
        "all tasks draw from one random number generator",
        "    for each, version in kept:\n        each.put(version)\n    try:",
        "    try:",
        ("test_cooperative_tasks.py::test_random_numbers_of_a_task_do_not_depend_on_those_beside_it",),
    ),
    Mutant(
        "a task's thread has torch's defaults",
        "        with self._thread_state.restored():\n            return self._task()",
        "        return self._task()",
        ("test_cooperative_tasks.py::test_a_task_has_the_settings_of_the_callers_thread",),
    ),
    Mutant(
        "blocks that visit count for one buffer",
        "return 2 * self.sizes.biggest_block if layout.shards",
        "return self.sizes.biggest_block if layout.shards",
        ("test_pooled_model.py::test_blocks_that_visit_count_only_where_weights_are_apart",),
    ),
    Mutant(
        "a proof holds for calls of every size",
        'kind = (call.options["call"], [tensor.shape for tensor in call.tensors.values()])',
        'kind = (call.options["call"], [])',
        ("test_run_context.py::test_a_proof_is_asked_for_once_for_each_form_and_shape_of_a_runs_calls",),
    ),
    Mutant(
        "SP Config keeps the number of patches for itself",
        'pipeline = {"patches": patches, "warmup_steps": warmup_steps} if',
        'pipeline = {"warmup_steps": warmup_steps} if',
        (
            "test_nodes_pipefusion.py::"
            "test_after_its_warm_up_a_pipeline_equals_stock_comfyui_with_keys_of_the_step_before",
        ),
    ),
)
