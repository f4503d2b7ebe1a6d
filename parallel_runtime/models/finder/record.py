"""One call of a model, watched: which module was given what, in which order, and where it attended.

Nothing is read of a class but its modules and their signatures. Letters: `B` batch, `H` heads, `S` tokens, `D` head
size.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .values import copied

# (q, k, v (B, H, S, D), mask, what the model's own attention makes of them) -> (B, H, S, D)
Attend = Callable[[Tensor, Tensor, Tensor, Any, Callable[[], Tensor]], Tensor]
Tap = Callable[[Attend], AbstractContextManager[None]]  # inside, every attention call of the model goes to the function
Call = Callable[[], Any]  # calls the model


@dataclass(frozen=True)
class Attended:
    """One attention call. `path`: the module that was running."""

    path: str
    q: Tensor
    k: Tensor
    mask: Any


@dataclass
class ModuleCall:
    """One call of a module. `args`: by the names of its forward's signature, "#n" and "**name" where it has none."""

    path: str
    module: nn.Module
    number: int  # how many calls of this module came before
    within: tuple[str, ...]  # modules that were running
    args: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)  # of these names in `positional` and `named`
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    out: Any = None
    attended: list[Attended] = field(default_factory=list)  # in it, deeper modules' too


def names_of(module: nn.Module, positional: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """How a plan names an argument -> its key in the call: a position or a name."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    taken = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY][1:]
    by_place = [each.name for each in taken if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    known = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    found: dict[str, Any] = {}
    for number in range(len(positional)):
        found[by_place[number] if number < len(by_place) else f"#{number}"] = number
    for key in named:
        found[key if key in known else f"**{key}"] = key
    return found


class CallWatch:
    """Inside `of(model)`, every call of the model's modules is noted, in the order in which they begin.

    `real` and `by_rows` are what attention calls are to go to meanwhile.
    """

    def __init__(self, keep: Callable[[str], bool] = lambda path: True) -> None:
        """`keep`: of which modules arguments and outputs are kept."""
        self.calls: list[ModuleCall] = []
        self._keep, self._stack, self._counts = keep, list[ModuleCall](), Counter[str]()

    @property
    def under_way(self) -> str:
        """The module that runs, or failed."""
        return self._stack[-1].path if self._stack else ""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator["CallWatch"]:
        """Watch a model's calls."""
        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._begin_call, path), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._end_call, path)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _begin_call(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made = ModuleCall(path, module, self._counts[path], tuple(each.path for each in self._stack))
        self._counts[path] += 1
        if self._keep(path):
            made.positional, made.named = copied(args), copied(kwargs)
            every: dict[Any, Any] = {**dict(enumerate(made.positional)), **made.named}
            made.keys = names_of(module, args, kwargs)
            made.args = {name: every[key] for name, key in made.keys.items()}
        self.calls.append(made)
        self._stack.append(made)

    def _end_call(self, path: str, module: nn.Module, args: object, out: Any) -> None:  # noqa: ANN401
        made = self._stack.pop()
        if self._keep(path):
            made.out = copied(out)

    def real(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, own: Callable[[], Tensor]) -> Tensor:  # noqa: ANN401
        """Attention as the model has it."""
        self._note(q, k, mask)
        return own()

    def by_rows(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, own: Callable[[], Tensor]) -> Tensor:  # noqa: ANN401
        """In attention's place, what gives each query its own row back: then rows move only with what is theirs."""
        self._note(q, k, mask)
        width = v.shape[-1]
        if q.shape[-1] >= width:
            return q[..., :width].clone()
        return torch.cat([q, q.new_zeros(*q.shape[:-1], width - q.shape[-1])], -1)

    def _note(self, q: Tensor, k: Tensor, mask: Any) -> None:  # noqa: ANN401
        kept = mask.clone() if isinstance(mask, Tensor) else mask
        said = Attended(self.under_way, q.clone(), k.clone(), kept)
        for each in self._stack:
            each.attended.append(said)
