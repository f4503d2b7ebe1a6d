"""ComfyUI's own classes shared by ranks equal the same module in one process.

Owns: the bound and the negative control, for every case of tiny.py; which layers of a module are given the same tensor
one after the other, and whether it is written to in between, as what ranks exchange once for such layers
(models/hosted/scales.py) is of the tensor as the first of them had it. Does not own: which cases there are, how ranks
run.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rounding import ROUNDING
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from host.outcomes import RefusedError, StockFailsError
from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.models.hosted.deltas import MergedDeltas
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.side_branches import WEIGHT, LowRank, SideBranches, runs_as_branch
from parallel_runtime.models.specs import spec_of
from parallel_runtime.weight_delta import WeightDelta
from tools.known import cases

from .cases import CASES
from .gloo_group import GlooGroup, OwnTokensOnly, pairs_in_a_ring
from .ranks import in_ranks
from .tiny import call, difference

CONTROL = 1e-3  # without exchange a case must be this wrong, or it would not notice

# Three have a rank in the middle: heads that they do not divide, tokens that not all have, each kind of cut.
THREE = {
    "Flux.1, 3 tokens of text and 3 of image",
    "Flux.1, 4 heads",
    "Flux.1, mask",
    "Krea 2",
    "MiniMax H3",
    "Cosmos Predict2, a timestep for each frame",
    "HunyuanVideo, text mask",
    "LTX-2, a timestep for each frame",
    "Stable Audio 3, what is to be kept, more tokens of its own than one rank has",
    "Z-Image Omni, reference and what vision sees",
}
RUNS = [pytest.param(name, 2, id=name) for name in CASES]
RUNS += [
    pytest.param(name, 3, id=f"{name}, 3 ranks", marks=[] if name in THREE else pytest.mark.full) for name in CASES
]


# With these two ranks have one group of heads each, and no chunks. Another case of the class has more.
FEW_HEADS = {
    "HiDream-O1, two references",
    "Stable Audio 3, what is to be kept, more tokens of its own than one rank has",
}


@dataclass
class Found:
    """Names of layers whose input was the last layer's too, and of those for whom it was another by then."""

    shared: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


class Writes(TorchDispatchMode):
    """Remembers the storages that were written to since `since_then` was emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.since_then: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch says."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.since_then.add(value.untyped_storage().data_ptr())
        for value in (kwargs or {}).values() if func._schema.is_mutable else ():
            if isinstance(value, Tensor):  # out=
                self.since_then.add(value.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(model: torch.nn.Module) -> Iterator[Found]:
    """Around a call of the module."""
    found, writes = Found(), Writes()
    last: list[Any] = [None]

    def forward(name: str, inner: Any, given: Tensor, *more: Any, **named: Any) -> Any:
        if given is last[0]:
            found.shared.append(name)
            if given.untyped_storage().data_ptr() in writes.since_then:
                found.changed.append(name)
        else:
            last[0] = given
            writes.since_then.clear()
        return inner(given, *more, **named)

    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    for name, layer in layers:
        layer.forward = partial(forward, name, layer.forward)
    try:
        with writes:
            yield found
    finally:
        for _, layer in layers:
            vars(layer).pop("forward", None)


def whole(name: str, *, watch: bool = False) -> tuple[nn.Module, dict[str, Any], Tensor, Found]:
    """A case's model and inputs, what stock makes of them, and what its layers were given if that is watched."""
    try:
        model, inputs = CASES[name]()
        with watched(model) if watch else nullcontext(Found()) as given:
            return model, inputs, call(model, inputs), given
    except Exception as error:
        raise StockFailsError(f"{type(error).__name__}: {error}") from error


def shared_by(group: GlooGroup, model: nn.Module) -> SharedModel:
    """A case's model, shared by the group."""
    try:
        return SharedModel(model, spec_of(type(model)), group)
    except ValueError as error:
        raise RefusedError(str(error)) from error


@pytest.mark.parametrize(("name", "ranks"), RUNS)
@in_ranks()
def test_a_shared_model_equals_the_same_module_in_one_process(group: GlooGroup, name: str) -> None:
    """Of its layers, none is given a tensor that is written to before another has it: what ranks exchange once for
    both, a scale of it, would be another for the second."""
    model, inputs, want, given = whole(name, watch=group.index == 0)  # which is slow, and the same on all ranks
    shared = shared_by(group, model)
    assert not given.changed
    got = call(model, inputs)
    assert difference(got, want) <= ROUNDING
    shared.group = in_chunks = GlooGroup(chunks=3)
    assert torch.equal(call(model, inputs), got), "heads in chunks give other bits than all at once"
    more = in_chunks.axis.traffic.calls - group.axis.traffic.calls
    assert more >= 2 * in_chunks.divisible, "a chunk of its own is an exchange there and one back"
    assert in_chunks.divisible or name in FEW_HEADS or group.axis.size > 2
    shared.group = OwnTokensOnly()
    assert difference(call(model, inputs), want) > CONTROL, "without exchange the case must be wrong"
    shared.group = None
    assert torch.equal(call(model, inputs), want), "with the hooks inactive the model is as it was"


# Of four ranks: what two share by their heads goes around a ring of the two pairs.
GRID = {"Flux.1, 4 heads", "MiniMax H3", "LTX-2, a timestep for each frame"}
FEW_TOKENS = "Flux.1, 3 tokens of text and 3 of image"  # which four ranks do not share, and no shares cut far apart
IN_A_RING = [name for name in CASES if name != FEW_TOKENS]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in GRID else pytest.mark.full) for name in IN_A_RING]
)
@in_ranks(4)
def test_pairs_of_ranks_around_a_ring_compute_the_same_with_heads_in_chunks(group: GlooGroup, name: str) -> None:
    model, inputs, want, _ = whole(name)
    shared = shared_by(group, model)
    with pairs_in_a_ring() as (at_once, in_chunks):
        shared.group = at_once
        got = call(model, inputs)
        assert difference(got, want) <= ROUNDING
        sent = at_once.ulysses.traffic.calls
        shared.group = in_chunks
        assert torch.equal(call(model, inputs), got), "heads in chunks give other bits than all at once"
        assert in_chunks.ulysses.traffic.calls > 2 * sent or name in FEW_HEADS
    shared.group = OwnTokensOnly()
    assert difference(call(model, inputs), want) > CONTROL, "without exchange the case must be wrong"


SHARES = (5, 1, 2)
UNEQUAL = {"Flux.1, 4 heads", "MiniMax H3", "LTX-2, a timestep for each frame"}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, id=f"{name}, {ranks}", marks=[] if name in UNEQUAL else pytest.mark.full)
        for name in CASES
        for ranks in (2, 3)
    ],
)
@in_ranks()
def test_ranks_with_unequal_shares_compute_the_same(group: GlooGroup, name: str) -> None:
    """Of heads and of keys, in one chunk and in several."""
    model, inputs, want, _ = whole(name)
    shared = shared_by(group, model)
    for kind in ({}, {"ring": True}, {"chunks": 3}):
        shared.group = unequal = GlooGroup(**kind, shares=SHARES)
        with mock.patch.object(unequal, "attend", wraps=unequal.attend) as attend:
            assert difference(call(model, inputs), want) <= ROUNDING, kind
        lengths = [each.kwargs["query_lengths"] for each in attend.call_args_list]
        assert name == FEW_TOKENS or any(max(each) > 2 * min(each) for each in lengths), lengths


CPU = torch.device("cpu")
HOOKED_LAYERS = {"Qwen-Image, text mask"}  # of the classes with a plan that names a layer, the first


def loras(model: nn.Module) -> dict[str, WeightDelta]:
    """A LoRA of rank 2 on each weight beside whose layer one can run."""
    numbers, found = torch.Generator().manual_seed(3), {}
    for name, weight in model.named_parameters():
        if not name.endswith(WEIGHT) or weight.ndim < 2:
            continue
        up, down = (
            torch.randn(weight.shape[0], 2, generator=numbers),
            torch.randn(2, *weight.shape[1:], generator=numbers),
        )
        values = (up, down / down[0].numel() ** 0.5, 2.0, None)
        patch = WeightDelta(key=name, kind="lora", strength=0.3, values=values)
        if runs_as_branch(patch, model.get_submodule(name.removesuffix(WEIGHT)), weight):
            found[name] = patch
    return found


def by_layer(model: nn.Module, deltas: dict[str, WeightDelta]) -> dict[str, list[LowRank]]:
    """What runs beside each layer."""
    return {
        name.removesuffix(WEIGHT): [LowRank.of(patch, model.get_parameter(name), dtype=torch.float32, device=CPU)]
        for name, patch in deltas.items()
    }


def beside_and_merged(model: nn.Module, inputs: dict[str, Any], plain: Tensor) -> dict[str, float]:
    """How far the LoRAs beside are from those merged, and how far those move the output. The model stays as it was."""
    deltas, changes, branches = loras(model), MergedDeltas(model, {}, None), SideBranches()
    each = {name: [patch] for name, patch in deltas.items()}
    changes.merge(each, device=CPU, cancelled=lambda: False, beat=lambda: None)
    merged = call(model, inputs)
    changes.undo_except(set(), cancelled=lambda: False, beat=lambda: None)
    made = by_layer(model, deltas)
    branches.have(model, made)
    beside = call(model, inputs)
    branches.have(model, {})
    return {"error": difference(beside, merged), "moved": difference(plain, merged), "layers": len(made)}


def of_each_class() -> list[str]:
    """The first case of each class."""
    firsts = {known.path: known.name for known in reversed(cases().values()) if known.name in CASES}
    return list(firsts.values())


@pytest.mark.parametrize("name", of_each_class())
@in_ranks(1)
def test_loras_beside_every_layer_of_each_class_equal_merged_ones(group: GlooGroup, name: str) -> None:
    """A class that reads a layer's weight itself would compute without the LoRA."""
    model, inputs, plain, _ = whole(name)
    row = beside_and_merged(model, inputs, plain)
    assert row["layers"] and row["moved"] > CONTROL, row
    assert row["error"] <= ROUNDING, row


@in_ranks(1)
def test_a_lora_for_which_there_is_no_memory_is_not_said_to_misfit(group: GlooGroup) -> None:
    """ComfyUI logs whatever it meets as it merges one, and goes on."""
    changes = MergedDeltas(nn.Linear(4, 4), {}, None)
    values = torch.ones(4, 1), torch.ones(1, 4), None, None
    delta = WeightDelta(key="weight", kind="lora", strength=1.0, values=values)

    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "mm", full)
        changes.merge({"weight": [delta]}, device=CPU, cancelled=lambda: False, beat=lambda: None)


@in_ranks(1)
def test_a_cancelled_change_goes_on_where_all_ranks_are_needed_for_it(group: GlooGroup) -> None:
    delta = WeightDelta(key="weight", kind="diff", strength=1.0, values=(torch.ones(4, 4),))
    for spread, goes_on in ((None, False), (False, False), (True, True)):
        held = (
            None
            if spread is None
            else SimpleNamespace(collective=spread, pristine=lambda _: None, by_block=lambda paths: [list(paths)])
        )
        changes = MergedDeltas(nn.Linear(4, 4), {}, held)
        beats: list[int] = []
        with nullcontext() if goes_on else pytest.raises(RequestCancelledError):
            changes.merge({"weight": [delta]}, device=CPU, cancelled=lambda: True, beat=partial(beats.append, 1))
        assert bool(beats) == goes_on, spread


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in HOOKED_LAYERS else pytest.mark.full) for name in of_each_class()],
)
@in_ranks(2)
def test_loras_beside_layers_that_ranks_share_are_those_of_one_process(group: GlooGroup, name: str) -> None:
    """Whether they came before the hooks or after: plans cut what some layers are given, or gather what they make."""
    model, inputs, plain, _ = whole(name)
    branches, made = SideBranches(), by_layer(model, loras(model))
    branches.have(model, made)
    want = call(model, inputs)
    assert difference(want, plain) > CONTROL
    for before in ({}, made):
        branches.have(model, before)
        try:
            shared = SharedModel(model, spec_of(type(model)), group)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        for now, out in ((made, want), ({}, plain)):
            branches.have(model, now)
            assert difference(call(model, inputs), out) <= ROUNDING
        shared.remove()
    assert torch.equal(call(model, inputs), plain)


class Overwriting(nn.Module):
    """Gives two layers the same tensor, and writes to it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, 4), which it changes."""
        out = self.first(x) + self.second(x)
        return out + self.third(x.add_(1))


def test_a_write_between_two_layers_would_be_seen() -> None:
    with torch.inference_mode(), watched(model := Overwriting()) as found:
        model(torch.ones(2, 4))
    assert (found.shared, found.changed) == (["second", "third"], ["third"])
