"""What a shared call keeps of the values that it cuts, and when it makes tokens whole: by blocks, not all of them."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.models.hosted import hooks
from parallel_runtime.models.hosted.call import TokenCall
from parallel_runtime.models.hosted.hook_points import Argument
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs import spec_of

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .tiny import call

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("name", ["Wan t2v", "Wan HuMo, reference, audio by frames"])
@in_ranks(2)
def test_tokens_of_a_block_are_gone_once_the_next_one_runs(group: GlooGroup, name: str) -> None:
    """Those of 75,600 tokens of Wan 14B are 774 MB, which stock drops after each block."""
    model, inputs = CASES[name]()
    SharedModel(model, spec_of(type(model)), group)
    given: list[tuple[str, weakref.ref[Tensor]]] = []
    alive: list[dict[str, set[int]]] = []
    change = hooks._change_arguments

    def noted(of: TokenCall, title: str, arguments: Any, args: Any, kwargs: Any) -> Any:
        values = {
            each.name: kwargs.get(each.name, args[each.position] if each.position < len(args) else None)
            for each in arguments
        }
        given.extend((each, weakref.ref(value)) for each, value in values.items() if isinstance(value, Tensor))
        living: dict[str, set[int]] = {}
        for each, there in given:
            if there() is not None:
                living.setdefault(each, set()).add(id(there()))
        alive.append(living)
        return change(of, title, arguments, args, kwargs)

    hooks._change_arguments = noted
    try:
        call(model, inputs)
    finally:
        hooks._change_arguments = change
    assert all(len(living.get("#0", ())) <= 1 for living in alive), "of audio's layers, one a block"
    assert "x" in alive[0] and "x" not in alive[-1], "the tokens before the first block"
    assert len(alive[-1]["freqs"]) == 1


@pytest.mark.parametrize(
    "name", ["Wan S2V, poses, motion before", "WanDancer, music, 15 frames a second, another picture"]
)
@in_ranks(2)
def test_tokens_become_whole_for_the_blocks_that_are_given_sound_and_for_no_other(group: GlooGroup, name: str) -> None:
    model, inputs = CASES[name]()  # of three blocks, the first and the last
    SharedModel(model, spec_of(type(model)), group)
    gather, came = TokenCall.gather, list[str]()

    def counted(of: TokenCall, stream: str, *arguments: Any, **options: Any) -> Any:
        came.append(stream)
        return gather(of, stream, *arguments, **options)

    TokenCall.gather = counted  # type: ignore[method-assign]
    try:
        call(model, inputs)
    finally:
        TokenCall.gather = gather  # type: ignore[method-assign]
    assert came == ["x"] * 3, "for two blocks, and at the end"


def test_a_cut_is_let_go_before_the_next_one_is_made_and_made_once_of_the_same_value() -> None:
    made: list[weakref.ref[Tensor]] = []

    def change(_: Any, value: Tensor) -> Tensor:
        assert not made or made[-1]() is None, "both would be there at once"
        cut = value[:1].clone()
        made.append(weakref.ref(cut))
        return cut

    call_, argument = SimpleNamespace(changed={}), Argument("freqs", 0, change, 7)
    for value in (torch.ones(2), torch.zeros(2)):
        for _ in range(2):
            assert torch.equal(hooks._changed(call_, argument, value), value[:1])  # type: ignore[arg-type]
    assert len(made) == 2 and list(call_.changed) == [7]
