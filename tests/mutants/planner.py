"""Mistakes in the predicted time and memory of plans, and in which plan is taken."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "attention around the ring has all rows on every rank",
        "if heads >= ulysses else 1 / ulysses) / ring\n",
        "if heads >= ulysses else 1 / ulysses)\n",
        ("test_cost.py::test_attention_costs_four_operations_a_query_key_and_channel_shared_by_all_ranks",),
    ),
    Mutant(
        "a hop of the ring costs the host nothing",
        "+ HOP_OPERATIONS * (ring - 1) * count(",
        "+ 0 * (ring - 1) * count(",
        ("test_cost.py::test_the_host_starts_an_exchanges_operations_once_and_those_of_each_hop",),
    ),
    Mutant(
        "all that could hide behind attention hides",
        "(HIDDEN * (sent_s + attend_s - both_s) if self.asynchronous else 0.0)",
        "(sent_s + attend_s - both_s if self.asynchronous else 0.0)",
        ("test_cost.py::test_half_of_what_a_hop_could_hide_behind_attention_hides_and_on_a_cpu_nothing",),
    ),
    Mutant(
        "the planner has all heads sent at once",
        "            chunks = choose_chunks(shared, given)\n",
        "            choose_chunks(shared, given)\n",
        ("test_cost.py::test_heads_in_chunks_hide_as_ranks_send_them",),
    ),
    Mutant(
        "the host always runs ahead",
        "    if rates.asynchronous:  # the step ends",
        "    if launch:  # the step ends",
        ("test_cost.py::test_a_host_that_runs_ahead_hides_behind_the_device_and_one_that_does_not_adds",),
    ),
    Mutant(
        "uneven stages cost what even ones do",
        "turns * math.ceil(model.staged_blocks / plan.pipefusion) / model.staged_blocks",
        "turns / plan.pipefusion",
        ("test_cost.py::test_pipefusion_waits_for_the_stage_with_the_most_blocks",),
    ),
    Mutant(
        "every step of a pipeline costs what a warm-up step costs not",
        "return warmup * self.warmup_step_s + (steps - warmup) * self.step_s",
        "return steps * self.step_s",
        ("test_cost.py::test_pipefusion_repeats_the_text_and_starts_with_a_synchronous_step",),
    ),
    Mutant(
        "weights of other ranks travel whole",
        "            num_bytes * (shards - 1) / shards / link.bandwidth\n",
        "            num_bytes / link.bandwidth\n",
        ("test_cost.py::test_sharded_weights_travel_and_hide_behind_all_else",),
    ),
    Mutant(
        "sharded weights take no room for the block that visits",
        "weights = model.weight_bytes - blocks + at_hand + (kept",
        "weights = model.weight_bytes - blocks + (kept",
        ("test_cost.py::test_memory_follows_the_degrees",),
    ),
    Mutant(
        "a batch group of five rows over two has two",
        "return -(-work.rows // plan.batch_groups)",
        "return max(1, work.rows // plan.batch_groups)",
        ("test_cost.py::test_the_longest_batch_group_decides",),
    ),
    Mutant(
        "a class that shares no tokens is given plans that do",
        " or (plan.parts > 1 and not self.shares_tokens):",
        ":",
        ("test_choose.py::test_useful_plans_share_out_the_rows_the_blocks_and_tokens_that_can_be",),
    ),
    Mutant(
        "the auto plan takes the smallest ulysses degree",
        "ulysses = max(d for d in range(1, inside + 1)",
        "ulysses = min(d for d in range(1, inside + 1)",
        ("test_plan.py::test_the_auto_plan_prefers_ulysses_and_falls_back_to_ring",),
    ),
    Mutant(
        "nine ranks are let in",
        "        if self.ranks > MAX_RANKS:\n",
        "        if self.ranks > MAX_RANKS + 1:\n",
        ("test_plan.py::test_a_plan_that_cannot_be_names_value_limit_and_remedy",),
    ),
)
