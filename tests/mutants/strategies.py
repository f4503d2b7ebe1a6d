"""Mistakes in what ranks exchange, and in who has which tokens, heads, rows and blocks."""

from __future__ import annotations

from .mutant import Mutant

SENT = "test_parity.py::test_a_plan_sends_what_numbers_by_hand_say"
EXCHANGED = "test_parity.py::test_every_plan_equals_one_process[cond and uncond]"
MERGED = "test_kernels.py::test_merged_parts_equal_the_whole_and_a_wrong_log_sum_exp_does_not"

MUTANTS = (
    Mutant(
        "parts of a ring are merged by the wrong side's weight",
        "torch.sigmoid(part - ours)",
        "torch.sigmoid(ours - part)",
        (MERGED,),
    ),
    Mutant(
        "the log-sum-exp of merged parts is the larger one's",
        "return out, torch.logaddexp(ours, part)",
        "return out, torch.maximum(ours, part)",
        (MERGED,),
    ),
    Mutant(
        "the longer runs come last",
        "base + (part < extra) for part in range(parts)",
        "base + (part >= parts - extra) for part in range(parts)",
        ("test_shard.py::test_lengths_add_up_and_differ_by_at_most_one",),
    ),
    Mutant(
        "a hop of the ring goes the other way",
        "owner = (self.ring.index - hop) % self.ring.size",
        "owner = (self.ring.index + hop) % self.ring.size",
        (EXCHANGED,),
    ),
    Mutant(
        "what an all-to-all keeps is counted as sent",
        "axis.traffic.add((send.shape[0] - send_lengths[axis.index]) * row_bytes)",
        "axis.traffic.add(send.shape[0] * row_bytes)",
        (SENT,),
    ),
    Mutant(
        "an all-gather's own part is left out",
        "        parts[index].copy_(self.source)\n",
        "",
        (
            "test_side_branches.py::test_loras_beside_the_weights_equal_those_that_comfyui_merges[Wan-ulysses=2,weights=sharded]",
        ),
    ),
    Mutant(
        "stages are cut without looking at what blocks cost",
        "(max(cost, before[end] - before[begin]), (*cuts, end))",
        "(max(cost, float(end - begin)), (*cuts, end))",
        ("test_stages.py::test_no_other_cut_has_a_cheaper_most_costly_stage",),
    ),
    Mutant(
        "a batch group's limit is one row too generous",
        "        if before[row] - before[begin] > limit:\n",
        "        if before[row - 1] - before[begin] > limit:\n",
        ("test_batch_groups.py::test_no_other_cut_has_a_smaller_largest_batch_group",),
    ),
    Mutant(
        "a batch group that passes through the blocks twice costs no more",
        "cost = (extra + passes, squares",
        "cost = (extra, squares",
        ("test_batch_groups.py::test_a_batch_group_runs_rows_of_one_call_where_that_costs_nothing",),
    ),
)
