"""A call of a class's `_forward`, around which ComfyUI has wrappers: ranks share it as they share its `forward`.

Does not own what wrappers get (tests/comfy/checked/wrappers.py).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from parallel_runtime.models.hosted.calls import forward_call
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs import spec_of
from parallel_runtime.plan import BatchSlice
from parallel_runtime.timing import RegionTimer
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.hosted import HostedForward

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .tiny import difference

CPU = torch.device("cpu")


class Shared(SimpleNamespace):
    """What a forward asks of a model in a rank: its module, with the hooks of a plan."""

    def install_hooks(self, *_: object, **__: object) -> torch.nn.Module:
        module: torch.nn.Module = self.module
        return module


@pytest.mark.parametrize("name", ["Flux.1", "Wan t2v", "HiDream-O1, two references", "Z-Image in pixel space"])
@in_ranks(2)
def test_a_call_inside_wrappers_is_shared_and_is_what_the_class_returns_there(group: GlooGroup, name: str) -> None:
    model: Any
    model, inputs = CASES[name]()
    (first, x), *others = inputs.items()
    named = dict(others)
    want = model._forward(x.clone(), **named).float()
    shared, sharing = SharedModel(model, spec_of(type(model)), group), []
    block = model.get_submodule(f"{next(iter(spec_of(type(model)).attention))}.0")
    block.register_forward_pre_hook(lambda *_: sharing.append(shared.call is not None))
    forward = HostedForward(Shared(module=model), group, RegionTimer(CPU, on=False), lambda: None, HeldState(CPU))
    forward._around = forward._scales = lambda *_, **__: torch.no_grad()  # type: ignore[method-assign]
    call = forward_call(model, want.shape[1], [x], named, inside=True)
    for inside in (True, False, True):
        options = call.options if inside else {key: value for key, value in call.options.items() if key != "inside"}
        tensors = {key: each.clone() for key, each in call.tensors.items()} | {"out": torch.zeros(call.out_shape)}
        out = forward.call(BatchSlice(0, 0, call.out_shape[0]), tensors, options, sequence=group, over=None).float()
        assert (difference(out, want) <= ROUNDING) is (inside or name != "Z-Image in pixel space"), (first, inside)
    assert len(sharing) >= 3 and all(sharing)
