"""Ranks reuse the inputs that they are told are the same, and only those."""

from dataclasses import replace

import pytest
import torch
from rounding import ROUNDING

from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool import arena
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error
from parallel_runtime.wire.requests import Step
from parallel_runtime.worker.held_state import HeldState

# fp32 sums in another order: what the design allows any plan
PLANS = (ParallelPlan(ulysses=2), ParallelPlan(cfg=2), ParallelPlan(), ParallelPlan(pipefusion=2, warmup_steps=99))
TEXT = "t2"  # the context, among a call's tensors
# The prompts of one call, and of cond and uncond: each comes again, and of two both change, or one alone.
ASKED = ([0], [0], [1], [1, 0], [1, 0], [0, 0])


def prompts(batch: int = 1) -> list[ModelCall]:
    """Calls that differ in the text alone."""
    first, second = (call(text=5, batch=batch, seed=seed) for seed in range(2))
    return [first, replace(second, tensors={**first.tensors, TEXT: second.tensors[TEXT]})]


def again(made: ModelCall) -> ModelCall:
    """The same call in other memory."""
    return replace(made, tensors={name: tensor.clone() for name, tensor in made.tensors.items()})


def repeating(numbers: dict[str, int]) -> Step:
    """A step that repeats inputs of these numbers."""
    return Step(model=1, plan=ParallelPlan(), calls=(), batch_groups=(), repeated=numbers)


def one_rank(pool: Pool, spec: ModelSpec, made: ModelCall) -> torch.Tensor:
    """What one rank makes of a call that it never saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "_holds", lambda *_: False)
        return pool.run(spec, ParallelPlan(), [again(made)]).outs[0]


@pytest.mark.slow
def test_swaps_of_prompts_and_plans_give_what_one_rank_gives(eight_ranks: Pool, tiny_hosted: ModelSpec) -> None:
    given = prompts(batch=3)
    expected = [one_rank(eight_ranks, tiny_hosted, made) for made in given]
    assert relative_error(expected[0], expected[1]) > 100 * ROUNDING
    for plan in (*PLANS, PLANS[0]):
        for chosen in ASKED:
            outs = eight_ranks.run(tiny_hosted, plan, [again(given[index]) for index in chosen]).outs
            pairs = zip(outs, (expected[index] for index in chosen), strict=True)
            assert max(relative_error(*pair) for pair in pairs) <= ROUNDING, (plan.name, chosen)


@pytest.mark.slow
def test_inputs_wrongly_taken_for_the_same_would_be_noticed(
    eight_ranks: Pool, tiny_hosted: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above."""
    given, plan = prompts(), ParallelPlan(ulysses=2)
    expected = [one_rank(eight_ranks, tiny_hosted, made) for made in given]
    for _ in range(3):
        eight_ranks.run(tiny_hosted, plan, [given[0]])
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_holds", lambda *_: True)
        (out,) = eight_ranks.run(tiny_hosted, plan, [given[1]]).outs
    assert relative_error(out, expected[0]) <= ROUNDING
    assert relative_error(out, expected[1]) > 100 * ROUNDING
    eight_ranks.run(tiny_hosted, plan, [prompts(batch=2)[1]])


def test_a_part_is_copied_once_and_let_go_when_it_is_repeated_no_more() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    kept = HeldState(torch.device("cpu"))

    def last_rows(**numbers: int) -> torch.Tensor:
        kept.begin(repeating(numbers), {"txt": whole})
        return kept.input_here(whole, whole[1:])

    assert last_rows().data_ptr() == whole[1:].data_ptr()  # nothing is kept of what is new
    copies = [last_rows(txt=5) for _ in range(2)]
    assert copies[0] is copies[1]
    assert copies[0].data_ptr() != whole[1:].data_ptr()
    for part in (whole, whole[:3], whole[:, 1:], whole.T, whole[1:]):
        assert torch.equal(kept.input_here(whole, part), part)
    whole += 1
    assert torch.equal(last_rows(txt=6), whole[1:])
    kept.begin(repeating({}), {})
    whole += 1
    assert torch.equal(last_rows(txt=6), whole[1:])


def test_rows_that_were_gathered_are_never_taken_for_others_at_their_address() -> None:
    whole, room = torch.arange(24.0).reshape(4, 6), torch.empty(2, 6)
    kept = HeldState(torch.device("cpu"))
    for rows in ([0, 2], [1, 3], [3, 0]):
        torch.index_select(whole, 0, torch.tensor(rows), out=room)
        kept.begin(repeating({"0.txt": 5}), {"0.txt": whole})
        assert torch.equal(kept.input_here(whole, room), whole[rows])


def test_an_empty_input_beside_a_repeated_one_stays_empty() -> None:
    whole, empty = torch.ones(3, 4), torch.ones(3, 0)
    kept = HeldState(torch.device("cpu"))
    kept.begin(repeating({"a": 1, "b": 2}), {"a": whole, "b": empty})
    assert kept.input_here(empty, empty).shape == (3, 0)
    assert kept.input_here(whole, whole[:0]).shape == (0, 4)
