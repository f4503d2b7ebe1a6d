"""Mistakes in who may ask the ranks, in whose answer is believed, in what is kept, and in how a failure is told."""

from __future__ import annotations

from .mutant import Mutant

STALE = "test_kv_book.py::test_calls_of_a_run_warm_up_and_then_find_what_the_one_before_left"
JOINS = "test_layouts.py::test_weights_changed_on_one_rank_are_changed_on_a_rank_that_joins"
SHARES = "test_shares.py::test_each_side_goes_to_a_batch_group_of_its_own_and_images_to_the_replicas"

MUTANTS = (
    Mutant(
        "a VAE's weights are rounded on their way",
        'self._coming[name] = tensors[f"w{number}"].clone()',
        'self._coming[name] = tensors[f"w{number}"].bfloat16()',
        ("test_parallel_decode.py::test_ranks_decode_what_tiled_decode_makes",),
    ),
    Mutant(
        "one rank decodes all tiles",
        "        rank = sums.index(min(sums))\n",
        "        rank = 0\n",
        ("test_held_vae.py::test_every_tile_is_decoded_once_and_the_largest_are_shared_first",),
    ),
    Mutant(
        "a reply of an older generation is taken for this one's",
        "if (message.rank, message.generation, message.request) != (rank.rank, self.number, request.number):",
        "if (message.rank, message.request) != (rank.rank, request.number):",
        ("test_failures.py::test_a_rank_that_breaks_the_protocol_is_ended",),
    ),
    Mutant(
        "a reply to an older request is taken for this one's",
        "if (message.rank, message.generation, message.request) != (rank.rank, self.number, request.number):",
        "if (message.rank, message.generation) != (rank.rank, self.number):",
        ("test_failures.py::test_a_rank_that_breaks_the_protocol_is_ended",),
    ),
    Mutant(
        "a model that is evicted stays on its rank",
        "            if self.pop(handle, None) is not None:\n                evicted",
        "            if self.get(handle) is not None:\n                evicted",
        ("test_handles.py::test_the_model_used_longest_ago_is_evicted_when_there_is_no_room",),
    ),
    Mutant(
        "a rank may give up what nobody cancelled",
        "elif message.op is Op.CANCELLED and self.segments.cancelled_request == request.number:",
        "elif message.op is Op.CANCELLED:",
        ("test_failures.py::test_a_rank_that_breaks_the_protocol_is_ended",),
    ),
    Mutant(
        "a consequence is blamed where the cause came later",
        "return next((sign for sign in signs if not sign.weak), signs[0])",
        "return signs[0]",
        ("test_failures.py::test_the_cause_is_blamed_and_not_what_followed_from_it",),
    ),
    Mutant(
        "a file of NCCL's may say where ranks meet",
        "REFUSED = tuple(name for name in NEVER_PASSED_ON if name not in LISTEN_HERE)",
        "REFUSED: tuple[str, ...] = ()",
        ("test_nccl_files.py::test_a_file_that_has_ranks_meet_elsewhere_is_named_and_refused",),
    ),
    Mutant(
        "NCCL's files are not looked at before ranks start",
        'if self._ranks.backend == "nccl" and (refused := ',
        'if self._ranks.backend == "none" and (refused := ',
        ("test_nccl_files.py::test_a_pool_on_gpus_does_not_start_with_such_a_file",),
    ),
    Mutant(
        "groups of plans that nobody uses stay for ever",
        "if other == plan or extra_bytes(more - own, self._num_ranks) <= kept_bytes(self._num_ranks):",
        "if True:",
        ("test_meshes.py::test_ranks_never_have_more_groups_than_the_planner_counts",),
    ),
    Mutant(
        "groups of weights that are held are freed",
        "kept = {group for layout in held for group in weight_groups(layout)}",
        "kept = set()",
        ("test_meshes.py::test_groups_of_weights_that_are_held_outlive_every_plan",),
    ),
    Mutant(
        "groups of the plan used last go first",
        "for other, its_handle in reversed(self._handles.items()):",
        "for other, its_handle in self._handles.items():",
        ("test_meshes.py::test_what_was_used_longest_ago_goes_first",),
    ),
    Mutant(
        "groups are freed only where another plan makes some",
        "if handle is not None and not dropped:",
        "if handle is not None:",
        ("test_meshes.py::test_ranks_never_have_more_groups_than_the_planner_counts",),
    ),
    Mutant(
        "an input that changed is not sent again",
        "here, holds = source, content is not None and _holds(place, content.last_sent, source)",
        "here, holds = source, content is not None",
        ("test_repeated_inputs.py::test_bits_are_compared_and_not_values",),
    ),
    Mutant(
        "not a number is never equal to itself",
        "INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}",
        "INTEGERS = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}",
        ("test_repeated_inputs.py::test_bits_are_compared_and_not_values",),
    ),
    Mutant(
        "a copy that failed counts as sent",
        "before, self._contents = self._contents, {}",
        "before = self._contents",
        ("test_repeated_inputs.py::test_a_copy_that_fails_leaves_nothing_that_counts_as_sent",),
    ),
    Mutant(
        "a step's deadline is the last step's alone",
        "return max(least_s, TIMES * max(self._seconds.get(shape, (0.0,))))",
        "return max(least_s, TIMES * self._seconds.get(shape, (0.0,))[-1])",
        ("test_silent_ranks.py::test_the_pace_keeps_the_slowest_of_the_last_steps_and_forgets_shapes_unused_for_long",),
    ),
    Mutant(
        "a rank that does not run is waited for as long as one that loads",
        "    if without_s > pulse_deadline_s:\n",
        "    if without_s > max(deadline_s, pulse_deadline_s):\n",
        ("test_silent_loads.py::test_a_rank_that_is_stopped_while_it_loads_is_found_by_its_silence",),
    ),
    Mutant(
        "a rank whose load does not get on is taken for one that does not run",
        "time.sleep(PULSE_S)",
        "return",
        ("test_silent_loads.py::test_a_load_that_waits_for_its_disk_is_left_alone",),
    ),
    Mutant(
        "a deadline that never passes is taken",
        "if not (deadline_s > 0 and math.isfinite(deadline_s)):",
        "if not deadline_s > 0:",
        ("test_silent_ranks.py::test_the_deadline_is_what_the_environment_says_or_two_minutes",),
    ),
    Mutant(
        "a thread may ask inside its own request, and waits for ever",
        "        if self._owner == threading.get_ident():\n",
        "        if self._owner == 0:\n",
        ("test_request_lock.py::test_a_thread_that_asks_inside_its_own_request_is_told_so",),
    ),
    Mutant(
        "the lock is kept after an error",
        "            yield check\n        finally:\n            self._owner = None\n            self.lock.release()\n",
        "            yield check\n        finally:\n            self._owner = None\n",
        ("test_request_lock.py::test_the_lock_is_released_after_an_error",),
    ),
    Mutant(
        "keys of another run are used",
        "(plan, model) != self._place or not runs <= self._runs):",
        "(plan, model) != self._place):",
        (STALE,),
    ),
    Mutant(
        "a pipeline goes stale a call too late",
        "warm=self._calls[slot] <= plan.warmup_steps)",
        "warm=self._calls[slot] <= plan.warmup_steps + 1)",
        (STALE,),
    ),
    Mutant(
        "keys of a request that failed are used",
        "        if self._under_way:\n            self.forget()\n",
        "",
        ("test_kv_book.py::test_nothing_is_known_after_a_request_that_was_not_done",),
    ),
    Mutant(
        "both batch groups of cfg do the same side",
        "conds = tuple(side for side in conds if side == batch_group % plan.cfg)",
        "conds = tuple(side for side in conds if side == batch_group // plan.cfg % 2)",
        (SHARES,),
    ),
    Mutant(
        "batch groups without an image work all the same",
        "conds=conds if works else ()",
        "conds=conds",
        (SHARES,),
    ),
    Mutant(
        "a preview is told before every rank has written its rows",
        "done = min(progress[rank].done for rank in self._writers)",
        "done = max(progress[rank].done for rank in self._writers)",
        ("test_shares.py::test_a_step_is_told_once_every_writer_has_done_it_in_order",),
    ),
    Mutant(
        "ranks may run ahead of the previews that were taken",
        "self._grant(self._done + CREDIT_AHEAD)",
        "self._grant(self._done + CREDIT_AHEAD + 1)",
        ("test_shares.py::test_a_step_is_told_once_every_writer_has_done_it_in_order",),
    ),
    Mutant(
        "a program's noise is added twice",
        "            if given is not None:\n                x.add_(given)\n",
        "            if given is not None:\n                x.add_(given, alpha=2)\n",
        ("test_sampler_recurrence.py::test_noise_given_ahead_is_added_where_its_state_says",),
    ),
    Mutant(
        "a program changes the latent that it was given",
        "            x = first * factor\n",
        "            x = first.mul_(factor)\n",
        ("test_sampler_recurrence.py::test_a_latent_that_was_given_is_left_alone",),
    ),
    Mutant(
        "a smaller layout serves where a bigger one is asked for",
        "return self.kind == other.kind and self.ranks >= other.ranks",
        "return self.kind == other.kind",
        ("test_plan.py::test_weights_serve_plans_of_their_kind_and_of_no_more_ranks",),
    ),
    Mutant(
        "ranks that join count as changed like those before them",
        "patches = self.patches if self.patches == more.patches else None",
        "patches = self.patches",
        (JOINS,),
    ),
    Mutant(
        "the same change of weights is made again",
        "(held.name, held.side_branch) == (patches.name, patches.side_branch):",
        "held.name == patches.name and held.side_branch:",
        (JOINS,),
    ),
    Mutant(
        "weights used last are taken for what they were, whatever was changed since",
        "ensured is self._newest and ensured.version == self._weights.version:",
        "ensured is self._newest:",
        ("test_ensured_once.py::test_what_changed_in_between_is_made_right_before_a_step[freed]",),
    ),
)
