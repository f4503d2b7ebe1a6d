"""What a class of ComfyUI's keeps on itself between the calls of a run (`ShardingSpec.keeps`): ranks decide together.

    kept = kept_state(model)
    kept.begin(run, ranks=2)             # calls of this run may keep; what is of another run is freed
    with kept.calling(alike_over(group, device)):  # around each call
        out = model(x, t, context=...)
    kept.end()                           # nothing is kept any more, and calls keep nothing

The class itself says what it keeps, where, and whether there is room: of free memory it asks the patcher, which in a
rank is `FreeMemory`. Ranks have different memory, and a rank that uses what it kept runs its blocks otherwise than one
that does not, so they would wait for each other for ever. `alike` says whether all ranks of the call decided the same;
where they did not, none of them keeps anything for the rest of the run.

A class of another ComfyUI that keeps otherwise than its spec says keeps nothing in the ranks, which is logged once. It
shares its calls as before.

Owns one module's state on this rank. Does not own when a run begins and ends, nor which ranks share a call (worker/).
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...parallel.attention import SequenceParallelAttention
from ...wire.replies import KeptCalls
from ..specs import find_spec
from ..specs.spec import Keeps, ShardingSpec
from .bytes_in import bytes_in

Alike = Callable[[int], bool]  # a number of this rank's; whether all ranks of the call say the same one
log = logging.getLogger(__name__)
NONE_USED, FILLED, FOUND = range(3)  # what a call decides


class FreeMemory:
    """Stands for ComfyUI's ModelPatcher where a class asks it how much memory is free."""

    def get_free_memory(self, device: torch.device) -> int:
        """Bytes that are free on a device, as ComfyUI says, which a class may ask itself, too (`host_memory_for`)."""
        import comfy.model_management

        return int(comfy.model_management.get_free_memory(device))


@contextmanager
def host_memory_for(ranks: int) -> Iterator[None]:
    """Inside, ComfyUI is asked for host memory for all `ranks`, each of which asks before any of them takes it, and
    says of what is free there one rank's part."""
    import comfy.model_management as module

    if ranks == 1:
        yield
        return

    def for_all(size: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return stock["ensure_pin_budget"](ranks * size, *args, **kwargs)

    def part(dev: torch.device | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = stock["get_free_memory"](dev, *args, **kwargs)
        on_host = dev is not None and torch.device(dev).type == "cpu"
        return found // ranks if on_host and not isinstance(found, tuple) else found

    instead = {"ensure_pin_budget": for_all, "get_free_memory": part}
    stock = {name: getattr(module, name) for name in instead if hasattr(module, name)}
    vars(module).update((name, instead[name]) for name in stock)
    try:
        yield
    finally:
        vars(module).update(stock)


def forget_keys(module: nn.Module) -> None:
    """Have a module forget keys that it finds by the address of a tensor, which may be another's by now."""
    forget: Callable[[], None] | None = getattr(module, "clear_kv_cache", None)
    if forget is not None:
        forget()


class KeptState:
    """What `model`, an instance of the spec's class, keeps between calls. Until `begin` it keeps nothing."""

    def __init__(self, model: nn.Module, spec: ShardingSpec, keeps: Keeps) -> None:
        self._calls = self._found = self._rows = self._kept_bytes = 0
        self._ranks = 1  # that have the memory of the host in common
        self._reset: Callable[[bool], None] = getattr(model, keeps.reset)
        self._run: object = None
        self._state: Any = None  # what the class keeps, as it is asked for in a call
        self._alike: Alike | None = None
        self._unlike = False  # whether the class has decided otherwise than its spec says
        self._name = type(model).__name__
        setattr(model, keeps.patcher, FreeMemory())
        setattr(model, keeps.decide, partial(self._decided, getattr(model, keeps.decide)))
        _first_block(model, spec).register_forward_hook(self._count_rows)

    def begin(self, run: object, *, ranks: int = 1) -> None:
        """Calls from here on are of `run`, by any name but None; `ranks` have the memory of the host in common."""
        self._ranks = ranks
        if run != self._run:
            self._free(keep=not self._unlike)
            self._run = run

    def end(self) -> None:
        """Free what is kept. Calls keep nothing until a run begins."""
        if self._run is not None:
            self._free(keep=False)
            self._run = None

    def _free(self, *, keep: bool) -> None:
        """Free what is kept; whether calls may keep any from now on."""
        self._reset(keep)
        self._state = None

    @contextmanager
    def calling(self, alike: Alike) -> Iterator[None]:
        """Around one call."""
        self._alike = alike
        self._calls += 1
        try:
            yield
        finally:
            self._alike = None
            if self._unlike:
                self._free(keep=False)
            self._kept_bytes = bytes_in(self._state)

    def take_counted(self) -> KeptCalls:
        """What was counted since this was asked last."""
        counted = KeptCalls(calls=self._calls, found=self._found, rows=self._rows, kept_bytes=self._kept_bytes)
        self._calls = self._found = self._rows = self._kept_bytes = 0
        return counted

    def _decided(
        self,
        decide: Callable[..., tuple[Any, bool]],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Any, bool]:
        """The class's decision, where all ranks make the same one; else none is kept, and the run goes on without."""
        with host_memory_for(self._ranks):
            decided = decide(*args, **kwargs)
        if not is_pair(decided):
            return self._for_this_call(decided)
        state, found = decided
        decision = NONE_USED if state is None else FOUND if found else FILLED
        if self._alike is not None and not self._alike(decision):
            self._free(keep=False)
            return None, False
        self._state = state
        self._found += decision == FOUND
        return state, found

    def _for_this_call(self, decided: Any) -> Any:  # noqa: ANN401
        """What the class decided in a form of its own, for this call alone. Raises RuntimeError where ranks differ."""
        self._unlike = True
        _log_unlike(self._name, f"what it decides is {type(decided).__name__}, not what is kept and whether it is all")
        first = decided[0] if isinstance(decided, tuple) and decided else decided
        if self._alike is not None and not self._alike(int(first is None)):
            raise RuntimeError(f"{self._name} keeps something on some ranks and not on others")
        return decided

    def _count_rows(self, _: nn.Module, __: object, out: Any) -> None:  # noqa: ANN401
        if self._alike is not None and isinstance(out, torch.Tensor):
            self._rows += out.shape[1]


def kept_state(model: nn.Module, spec: ShardingSpec | None = None) -> KeptState | None:
    """What a model keeps between calls, as `keeps_of`; without a spec, by its own."""
    spec = spec or find_spec(model)
    keeps = keeps_of(model, spec)
    return None if spec is None or keeps is None else KeptState(model, spec, keeps)


def keeps_of(model: nn.Module, spec: ShardingSpec | None) -> Keeps | None:
    """What the spec says that a model keeps between calls; None where it says nothing, or what this class has not.

    Frees what it keeps.
    """
    if spec is None or spec.keeps is None:
        return None
    try:
        _try(model, spec, spec.keeps)
    except Exception as error:  # noqa: BLE001  any code of ComfyUI's
        _log_unlike(type(model).__name__, f"{type(error).__name__}: {error}")
        return None
    return spec.keeps


def is_pair(decided: object) -> bool:
    """Whether a class decided as specs have it: what is kept, and whether it is all that the call needs."""
    return isinstance(decided, tuple) and len(decided) == 2


def _try(model: nn.Module, spec: ShardingSpec, keeps: Keeps) -> None:
    """Use all that `KeptState` does, and leave no trace. Raises what any of it raises."""
    _first_block(model, spec)
    if not callable(getattr(model, keeps.decide)):
        raise TypeError(f"{keeps.decide!r} is no method")
    getattr(model, keeps.reset)(False)
    before = {name: value for name, value in vars(model).items() if name == keeps.patcher}
    setattr(model, keeps.patcher, FreeMemory())
    delattr(model, keeps.patcher)
    vars(model).update(before)


def _first_block(model: nn.Module, spec: ShardingSpec) -> nn.Module:
    return next(iter(model.get_submodule(spec.staged[0]).children()))


@functools.cache
def _log_unlike(name: str, why: str) -> None:
    """Once."""
    log.warning("%s of this ComfyUI keeps nothing between the calls of a run, as its plan is of another: %s", name, why)


def alike_over(group: SequenceParallelAttention, device: torch.device) -> Alike:
    """What asks all ranks of a group, which have tensors on `device`, whether they say the same number."""

    return lambda number: set(numbers_over(group, device, number)) == {number}


def numbers_over(group: SequenceParallelAttention, device: torch.device, number: int) -> list[int]:
    """The number that each rank of a group says, which have tensors on `device`."""
    if group.parts == 1:
        return [number]
    found: list[int] = group.gather(torch.tensor([number], device=device), dim=0, lengths=[1] * group.parts).tolist()
    return found
