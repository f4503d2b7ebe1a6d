"""How much of a ControlNet's residuals a rank has on its device: its own rows, where the ranks share their tokens.

Does not own how they are cut (test_hosted_parity.py) and added.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from torch import Tensor, nn

from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.block_hooks import OPTION
from parallel_runtime.models.hosted.calls import forward_call
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.timing import RegionTimer
from parallel_runtime.wire.requests import Step
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.hosted import HostedForward, HostedModel

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .tiny import difference

CPU = torch.device("cpu")


class Rank:
    """A rank that has a model; `come` are the bytes of residuals that came to its device since a call began."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        weights: Any = SimpleNamespace(module=model, blocks={})
        self.held, self.come, self.model = HeldState(CPU), 0, HostedModel(weights)
        self._module, self._inputs = model, inputs
        here = self.held.input_here

        def input_here(whole: Tensor, part: Tensor, *, copy: bool = False) -> Tensor:
            self.come += 0 if copy else part.nbytes  # of all that a call is given, residuals alone are no copies
            return here(whole, part, copy=copy)

        self.held.input_here = input_here  # type: ignore[method-assign]

    def forward(self, sequence: SequenceParallelAttention) -> HostedForward:
        """The model for one request."""
        forward = HostedForward(self.model, sequence, RegionTimer(CPU, on=False), lambda: None, self.held)
        forward._around = forward._scales = lambda *_, **__: torch.no_grad()  # type: ignore[method-assign]
        return forward

    def made(self, **options: Any) -> ModelCall:
        """The call as it travels, its tensors new; `options` are further ones of the transformer's."""
        x, *others = self._inputs
        named = {name: self._inputs[name] for name in others} | {"transformer_options": options}
        made = forward_call(self._module, self._inputs[x].shape[1], [self._inputs[x]], named)
        return replace(made, tensors={name: each.clone() for name, each in made.tensors.items()})

    def call(self, sequence: SequenceParallelAttention) -> Tensor:
        """What the model returns."""
        made, self.come = self.made(), 0
        tensors, rows = {**made.tensors, "out": torch.zeros(made.out_shape)}, BatchSlice(0, 0, made.out_shape[0])
        out: Tensor = self.forward(sequence).call(rows, tensors, made.options, sequence=sequence, over=None)
        return out


def residuals_of(inputs: dict[str, Any]) -> list[Tensor]:
    """Each residual of a call once."""
    found = [each for listed in inputs["control"].values() for each in listed if each is not None]
    return list({id(each): each for each in found}.values())


QWEN = "Qwen-Image-Edit, reference at timestep zero, ControlNet"
CONTROLLED = ["Flux.1, ControlNet", QWEN, "SD3.5 medium, ControlNet"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CONTROLLED)
@in_ranks()
def test_each_rank_takes_its_own_rows_of_a_controlnets_residuals_and_each_once(group: GlooGroup, name: str) -> None:
    for sharing in (group, GlooGroup(shares=(1, 3, 2), ring=True)):
        model, inputs = CASES[name]()
        inputs["control"] = {kind: listed + listed[:1] for kind, listed in inputs["control"].items()}
        given = {key: each.clone() if isinstance(each, Tensor) else each for key, each in inputs.items()}
        want, whole = model(**given), sum(each.nbytes for each in residuals_of(inputs))
        rank = Rank(model, inputs)
        for _ in range(2):
            assert difference(rank.call(sharing), want) <= ROUNDING
            come = int(group.gather(torch.tensor([rank.come]), dim=0, lengths=[1] * group.parts).sum())
            assert come == whole, f"{come} bytes came to all ranks together, of {whole}"
        assert rank.model.shared is not None and rank.model.shared.moved is None, "it keeps a call's memory"
        assert difference(rank.call(SequenceParallelAttention()), want) <= ROUNDING
        assert rank.come == whole, "of a call that is not shared a rank takes all"


@in_ranks(1)
def test_residuals_come_whole_where_patches_are_between_blocks_and_those_that_repeat_stay(group: GlooGroup) -> None:
    model, inputs = CASES[QWEN]()
    whole, rank = sum(each.nbytes for each in residuals_of(inputs)), Rank(model, inputs)
    made = rank.made(**{OPTION: []})
    tensors = {**made.tensors, "out": torch.zeros(made.out_shape)}
    forward, rows = rank.forward(group), BatchSlice(0, 0, made.out_shape[0])
    assert forward._given(rows, tensors, made.options, cut=True)[1] is None
    assert rank.come == whole
    numbers = {f"t{number}": number for number in range(len(made.tensors))}
    step = Step(model=1, plan=ParallelPlan(), calls=(), batch_groups=(), repeated=numbers)
    for _ in range(2):
        made = rank.made()
        rank.held.begin(step, made.tensors)
        tensors = {**made.tensors, "out": torch.zeros(made.out_shape)}
        rank.come = 0
        given, moved = forward._given(rows, tensors, made.options, cut=True)
        (residual, *_) = given["kwargs"]["control"]["input"]
        assert moved is not None and rank.come == 0
        kept = [moved(residual, residual[:, 3:5]) for _ in range(2)]
        assert torch.equal(kept[0], residual[:, 3:5]) and kept[0] is kept[1]
