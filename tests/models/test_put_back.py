"""What calls leave on a model's modules is taken away, wherever they keep it, and all else stays what it is."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel_runtime.worker.put_back import put_back


class Cache:
    """An object of a class's own."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}


class Slots:
    """The same, without a dictionary."""

    __slots__ = ("seen", "later")

    def __init__(self) -> None:
        self.seen = 0


class Keeps(nn.Module):
    """Has something in every place that calls may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.inside = nn.ModuleList([nn.Linear(3, 3)])
        self.tokens, self.cache, self.slots, self.nested = 0, Cache(), Slots(), {"a": ([1], {2})}
        self.last, self.ordered = deque([1], maxlen=2), OrderedDict(a=1, b=2)
        self.tensors = [torch.zeros(2)]
        self.cache.seen["model"] = self  # a circle


def set_later(model: Any) -> None:
    model.slots.later = 1


WRITES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda model: setattr(model, "tokens", 5),
    "a new attribute": lambda model: setattr(model.inside[0], "tokens", 5),
    "another buffer": lambda model: setattr(model, "mean", torch.ones(3)),
    "a new buffer": lambda model: model.register_buffer("more", torch.ones(3)),
    "numbers in a buffer": lambda model: model.mean.add_(1),
    "numbers in a tensor of a list": lambda model: model.tensors[0].fill_(7),
    "a new weight": lambda model: setattr(model, "weight", nn.Parameter(torch.ones(3))),
    "a new module": lambda model: setattr(model, "more", nn.Linear(3, 3)),
    "an object": lambda model: model.cache.seen.update(mean=1),
    "an attribute of an object": lambda model: setattr(model.cache, "mean", 1),
    "another object": lambda model: setattr(model, "cache", Cache()),
    "a slot": lambda model: setattr(model.slots, "seen", 9),
    "an empty slot": set_later,
    "a list in a tuple": lambda model: model.nested["a"][0].append(3),
    "a set in a tuple": lambda model: model.nested["a"][1].clear(),
    "the last few": lambda model: model.last.extend([2, 3]),
    "an order": lambda model: model.ordered.move_to_end("a"),
}


def state(model: Keeps) -> list[Any]:
    return [
        {name: value for name, value in vars(model.inside[0]).items() if not name.startswith("_")},
        *(sorted(names) for names in (vars(model), vars(model.cache), model._buffers, model._modules)),
        list(model._parameters),
        (model.mean.tolist(), model.tensors[0].tolist(), model.tokens, sorted(model.cache.seen)),
        (model.slots.seen, hasattr(model.slots, "later"), repr(model.nested), list(model.last), list(model.ordered)),
        [id(each) for each in (model.mean, model.cache, model.cache.seen, model.nested, model.last, model.inside)],
    ]


@pytest.mark.parametrize("place", WRITES)
def test_what_a_call_keeps_is_taken_away_wherever_it_is(place: str) -> None:
    model = Keeps()
    before = state(model)
    with torch.inference_mode():
        with put_back(model):
            WRITES[place](model)
            assert state(model) != before
        assert state(model) == before


def test_it_is_taken_away_where_the_call_ends_with_an_error() -> None:
    model = Keeps()
    before = state(model)
    with pytest.raises(ZeroDivisionError), put_back(model):
        for write in WRITES.values():
            write(model)
        raise ZeroDivisionError
    assert state(model) == before


def test_a_dictionary_that_refuses_changes_is_left_alone() -> None:
    class Frozen(dict):
        """As diffusers keeps a class's arguments."""

        def update(self, *_: Any, **__: Any) -> None:
            raise AssertionError

    model = nn.Linear(3, 3)
    model.config = Frozen(width=3)
    with put_back(model):
        model.tokens = 3
    assert model.config == {"width": 3} and not hasattr(model, "tokens")


def test_weights_are_not_copied_and_objects_of_other_packages_stay_as_calls_left_them() -> None:
    class Weight(nn.Parameter):
        def clone(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    model = nn.Linear(3, 3)
    model.weight = Weight(torch.zeros(3, 3), requires_grad=False)
    keeps = Keeps()
    keeps.numbers = torch.Generator().manual_seed(3)
    model.kept = keeps
    first = keeps.numbers.get_state()
    with put_back(model):
        torch.rand(1, generator=keeps.numbers)
    assert not torch.equal(keeps.numbers.get_state(), first)
