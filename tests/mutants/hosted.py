"""Mistakes in how ComfyUI's own modules run in the ranks: uneven heads, the call's tree, cuts, and sharded blocks."""

from __future__ import annotations

from .mutant import Mutant

UNEVEN = "test_attention.py::test_attention_equals_one_process"
TREE = "test_call_tree.py"
PROOF = "test_proof.py"
UNETS = "test_unets.py"
LOOP = "test_hosted_loop.py"
SAMPLED = f"{LOOP}::test_a_model_samples_in_the_workers_as_stock_does_and_wrong_runs_are_seen"
QUANTISED = "test_quantised.py::test_a_shared_file_equals_the_same_module_in_one_process"

BESIDE = "test_side_branches.py::test_loras_beside_the_weights_equal_those_that_comfyui_merges"

MUTANTS = (
    Mutant(
        "a rank takes the heads of its neighbour",
        "            group += shares * count\n",
        "            group += shares * count - 1\n",
        (f"{UNEVEN}[heads that no degree divides-ulysses 2]",),
    ),
    Mutant(
        "heads of queries are shared out without their groups",
        "groups, queries_a_group = qkv[1].shape[1], qkv[0].shape[1] // qkv[1].shape[1]",
        "groups, queries_a_group = qkv[1].shape[1], 1",
        (f"{UNEVEN}[grouped heads-ulysses 2]",),
    ),
    Mutant(
        "keys come as the queries' tokens lie",
        "for lengths in (queries, keys)[: len(whole)]",
        "for lengths in (queries, queries)[: len(whole)]",
        (f"{UNEVEN}[other lengths of keys-ulysses 2]",),
    ),
    Mutant(
        "a mask by head is the first rank's on every rank",
        "of_heads = mask.narrow(1, first * queries_a_group, mine * queries_a_group)",
        "of_heads = mask.narrow(1, 0, mine * queries_a_group)",
        (f"{UNEVEN}[a mask by head-ulysses 2]",),
    ),
    Mutant(
        "a ring's group uses the first group's rows of a mask",
        "mask = mask.narrow(2, sum(totals[: self.ring.index]), totals[self.ring.index])",
        "mask = mask.narrow(2, 0, totals[self.ring.index])",
        (f"{UNEVEN}[a mask of scores, added-ring 2]",),
    ),
    Mutant(
        "a ring forgets the scale",
        "(q.shape[-1] ** -0.5 if scale is None else scale)",
        "(q.shape[-1] ** -0.5)",
        (f"{UNEVEN}[a scale of its own-ring 2]",),
    ),
    Mutant(
        "gathered keys keep only the first part's mask rows",
        "mask = mask.narrow(2, sum(query_lengths[: self.index]), query_lengths[self.index])",
        "mask = mask.narrow(2, 0, query_lengths[self.index])",
        (f"{UNEVEN}[a mask by head-ulysses 2 x ring 2]",),
        file="attention.py",
    ),
    Mutant(
        "the way back puts ranks' heads in another order",
        "return torch.cat(by_token, 2).transpose(1, 2)",
        "return torch.cat(by_token[::-1], 2).transpose(1, 2)",
        (f"{UNEVEN}[thirty heads-ulysses 2]",),
    ),
    Mutant(
        "every chunk has the rows of a mask of the first one's heads",
        "first = sum(map(sum, cut[:chunk])) + before",
        "first = before",
        (f"{UNEVEN}[a mask by head-ulysses 2]",),
    ),
    Mutant(
        "few tokens count as keys on every rank",
        "if not self.index or not elsewhere:",
        "if True:",
        ("test_cuts.py::test_few_tokens_count_once_among_the_keys",),
    ),
    Mutant(
        "a tuple of a call becomes a list",
        "return tuple(_list(inner, tensors, path))",
        "return _list(inner, tensors, path)",
        (f"{TREE}::test_plain_values_come_out_as_they_went_in",),
    ),
    Mutant(
        "a tensor given twice is sent twice",
        "if id(tensor) not in self._numbers:",
        "if True:",
        (f"{TREE}::test_a_tensor_in_two_places_is_sent_once",),
    ),
    Mutant(
        "a tree's tensor may have any number",
        "or not 0 <= inner < len(tensors)",
        "or not inner < len(tensors)",
        (f"{TREE}::test_a_tree_that_nobody_writes_is_refused",),
    ),
    Mutant(
        "a plan is proven by a control that differs from nothing",
        "if without <= least:",
        "if without < 0:",
        (f"{PROOF}::test_the_verdict_follows_from_error_control_and_dtype",),
    ),
    Mutant(
        "a plan that computes something else is proven",
        "if error > mistake and max(error, without) > least:",
        "if error > least and max(error, without) > least:",
        (f"{PROOF}::test_the_verdict_follows_from_error_control_and_dtype",),
    ),
    Mutant(
        "a proof of another version is believed",
        'if not isinstance(entry, dict) or entry.get("key") != json.loads(json.dumps(asdict(key))):',
        "if not isinstance(entry, dict):",
        (f"{PROOF}::test_a_proof_of_another_version_is_not_believed",),
    ),
    Mutant(
        "a rank rounds by the largest number of its own tokens",
        "largest = ranks.maximum(largest)",
        "ranks.maximum(largest)",
        (f"{QUANTISED}[nvfp4, its inputs rounded too-replicated]",),
    ),
    Mutant(
        "layers of q, k and v each exchange the scale of the same tensor",
        "if whole is not None and last is not None and last[0] is whole and last[1] == layout_cls:",
        "if False:",
        (f"{QUANTISED}[nvfp4, its inputs rounded too-replicated]",),
    ),
    Mutant(
        "weights of a file in plain fp8 are loaded as what they are computed in",
        'kept = next((name for name, dtype in FP8.items() if dtype == stored), "")',
        'kept = ""',
        ("test_formats_as_stock.py::test_a_rank_uses_the_kernels_of_stock_and_moves_its_bytes[8.9]",),
    ),
    Mutant(
        "batch groups of cfg parallel round by the largest number of their own rows",
        'over = mesh.axes["cfg"] if alike and',
        'over = mesh.axes["cfg"] if not alike and',
        (f"{QUANTISED}[nvfp4, its inputs rounded too-replicated]",),
    ),
    Mutant(
        "scales of a quantised file are held beside its pages",
        "return as_parameter(make(found))",
        "return as_parameter(weight)",
        (f"{QUANTISED}[mxfp8-replicated]",),
    ),
    Mutant(
        "a whole call for a proof is shared",
        'if options.get("whole"):',
        'if options.get("all"):',
        ("test_proving.py::test_a_wrong_plan_is_refused_with_its_error_and_the_next_right_one_is_proven[attention]",),
    ),
    Mutant(
        "any size of call is computed whole",
        "small = tokens <= MAX_TOKENS and fits >= 1",
        "small = tokens <= MAX_TOKENS",
        ("test_proving.py::test_a_call_that_is_too_large_is_proven_on_a_smaller_latent",),
    ),
    Mutant(
        "a proof of a class that keeps something looks at its first call alone",
        "times = 2 if keeps else 1",
        "times = 1",
        (
            "test_hosted_hooks.py::test_every_rank_finds_that[3-a_proof_covers_the_call_that_finds_what_another_one_kept]",
        ),
    ),
    Mutant(
        "a smaller call of a class that keeps something is compared with the one before",
        "getattr(self.transformer, plan.keeps.reset)(False)",
        "getattr(self.transformer, plan.keeps.reset)(True) if self._told else None",
        ("test_possible_calls.py::test_a_class_that_keeps_something_compares_no_values_that_are_not_there",),
    ),
    Mutant(
        "what a class kept is found by another model's steps, and after its weights changed",
        "self.models.end_runs(but=request.model if isinstance(request, Step) else None)",
        "self.models.end_runs(but=7)",
        ("test_given_back.py::test_what_a_class_keeps_goes_with_any_request_that_is_no_step_of_its_model",),
    ),
    Mutant(
        "keys that every rank has are sent around the ring",
        "around = RingPass(self.ring, k[:, common:], v[:, common:], lengths=lengths)",
        "around = RingPass(self.ring, k, v, lengths=[common + length for length in lengths])",
        ("test_attention.py::test_keys_that_every_rank_has_are_not_sent",),
    ),
    Mutant(
        "masks of any number of dims are one kind of call",
        "{call.tensors[f't{inner}'].ndim}",
        "tensor",
        ("test_proving.py::test_a_call_is_known_by_its_arguments_and_not_by_their_sizes",),
    ),
    Mutant(
        "each rank of a U-Net runs both sides under cfg 2 with sharded weights",
        "find_spec(type(self.module)) is not None or find_whole(type(self.module)) is not None",
        "find_spec(type(self.module)) is not None",
        (f"{UNETS}::test_sdxl_at_cfg_7_with_lora_and_controlnet_on_two_ranks_equals_stock",),
    ),
    Mutant(
        "what a U-Net's checkpoint says beside the weights is not read",
        "partial(read_hosted, checkpoint=function.__name__ != LOADERS[0])",
        "partial(read_hosted, checkpoint=False)",
        (f"{UNETS}::test_a_checkpoint_that_predicts_v_equals_stock",),
    ),
    Mutant(
        "what a mask keeps is noised as a flow's whatever the model sampling says",
        "kept = _near(_factors(noised), kept)",
        "_factors(noised)",
        (f"{LOOP}::test_a_noise_mask[sdxl koala]",),
    ),
    Mutant(
        "the model is told sigma in place of its timestep",
        "return torch.full_like(sigma, self.state.timestep)",
        "return sigma.clone()",
        (f"{SAMPLED}[wan 2.1 i2v]",),
    ),
    Mutant(
        "the latent goes to the model unscaled",
        "self._seen = x if scale == 1.0 else x * scale",
        "self._seen = x",
        (
            "test_in_worker_sampling.py::test_a_model_sampling_that_is_no_flow_is_read_by_its_numbers",
            f"{SAMPLED}[sdxl koala]",
        ),
    ),
    Mutant(
        "a rank without work leaves the others waiting for its part of a block",
        "return busy[:1] if self.gathers_beyond(mesh.plan.parts) else []",
        "return []",
        (f"{LOOP}::test_idle_ranks_keep_up_with_the_others",),
    ),
    Mutant(
        "a loop in the workers asks nobody whether its plan is proven",
        "context.check(cond.module_call, check_cancelled)",
        "pass",
        ("test_self_proof.py::test_a_plan_that_the_present_comfyui_does_not_fit_is_refused_by_name",),
    ),
    Mutant(
        "a step cache lies around what shares tokens, and is given whole ones",
        "ORDER = (BEAT, GATHER, SHARE, CACHE,",
        "ORDER = (BEAT, GATHER, CACHE, SHARE,",
        (
            "test_block_chain.py::test_the_links_of_a_block_have_one_order_whichever_is_put_first",
            "test_step_cache.py::test_a_call_that_skips_is_what_one_process_makes_of_kept_residuals[names0]",
        ),
    ),
    Mutant(
        "each batch group decides by its own rows whether blocks are skipped",
        "sums = group.gather(sums[None], dim=0, lengths=[1] * group.parts).cpu().sum(0)",
        "sums = group.gather(sums[None], dim=0, lengths=[1] * group.parts)[group.index]",
        ("test_step_cache.py::test_rows_of_one_call_decide_together",),
    ),
    Mutant(
        "a step cache adds what blocks made, not what they added",
        "return -leaf.float() if total is None else total.sub_(leaf)",
        "return leaf.float() * 0 if total is None else total",
        ("test_step_cache.py::test_a_call_that_skips_is_what_one_process_makes_of_kept_residuals[names0]",),
    ),
    Mutant(
        "a LoRA beside a layer ignores from which output on it is",
        "out.narrow(-1 if self._convolve is None else 1, run.first, run.up.shape[0])",
        "out.narrow(-1 if self._convolve is None else 1, 0, run.up.shape[0])",
        (f"{BESIDE}[Flux.1-ulysses=2]",),
    ),
    Mutant(
        "every LoRA beside a layer has the strength of the first",
        "numbers = [strengths[number] * factor for number, factor in self.factors]",
        "numbers = [strengths[0] * factor for _, factor in self.factors]",
        (f"{BESIDE}[Wan-ulysses=2]",),
    ),
    Mutant(
        "a merged LoRA keeps its strength where another one beside it changes",
        "elif known is not None and known != strength:",
        "elif known is None:",
        ("test_side_branches.py::test_another_strength_moves_no_tensor_and_another_lora_moves_only_loras",),
    ),
)
