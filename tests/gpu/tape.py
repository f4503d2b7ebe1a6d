"""What stands for CUDA graphs where there is no GPU: operators are recorded with their memory, and replayed on it.

As a CUDA graph, a recording has addresses and the numbers that Python had, and no Python runs in a replay:

- Memory that was made while it was recorded is its own. It is poisoned (0xFF, NaN in each floating type) as soon as the
  recording, or a replay, has ended.
- Of other memory it knows the address. What nothing but recordings holds when they are replayed was freed meanwhile,
  and is poisoned too.
- Recording leaves no result and exchanges nothing.
- An operator that tells the host a number is refused.
- Where Python reads a tensor, or has one made of its numbers on the device, which no operator shows, the host waits.

Exchanges are those of `collectives.py`, which are begun anew in each replay. `marked` is told while one is begun, for
who knows rules of graphs (nccl_rules.py), and `made` is told of each recording.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_runtime.parallel import collectives
from parallel_runtime.parallel.collectives import AllGather, AllToAll, Axis

HOST_READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item")

READS, MAKES = (torch.Tensor.tolist, torch.Tensor.numpy), (torch.tensor, torch.as_tensor)
CPU = torch.device("cpu")

UNKNOWN_LENGTHS = ("aten::nonzero", "aten::masked_select", "aten::repeat_interleave.Tensor")


class Outside:
    """Memory that is not of a recording. `view` holds it, so its address is nobody else's while recordings live."""

    known: "weakref.WeakValueDictionary[int, Outside]" = weakref.WeakValueDictionary()

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.view = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        self.alone = 0
        self.known[storage._cdata] = self

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Outside":
        """That of a tensor."""
        return cls.known.get(tensor.untyped_storage()._cdata) or cls(tensor)

    def poison_if_freed(self) -> None:
        """Poison it where nothing but recordings holds it."""
        storage = self.view.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) <= HELD_ALONE:
            poison(self.view)


def poison(tensor: torch.Tensor) -> None:
    """Fill all of the memory behind a tensor with 0xFF."""
    num_bytes = tensor.untyped_storage().nbytes()
    if num_bytes:
        flat = tensor.as_strided((num_bytes // tensor.element_size(),), (1,), 0)
        flat.view(torch.uint8).fill_(0xFF)


@torch.inference_mode()  # as ranks are: otherwise a view holds its base
def _held_alone() -> int:
    view = torch.empty(1).as_strided((1,), (1,), 0)
    return torch._C._storage_Use_Count(view.untyped_storage()._cdata)


HELD_ALONE = _held_alone()


@dataclass(frozen=True)
class Operand:
    """A tensor in memory that is not of the recording."""

    outside: Outside
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """What is there now."""
        return self.outside.view.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(eq=False)
class Recording:
    """What was recorded. `steps` in order; `own` a tensor of each storage that was made meanwhile."""

    steps: list[Callable[[], None]] = field(default_factory=list)
    own: dict[int, torch.Tensor] = field(default_factory=dict)
    outside: dict[int, Outside] = field(default_factory=dict)
    axes: list[Axis] = field(default_factory=list)

    @property
    def groups(self) -> list[object]:
        """The process groups that it exchanges over."""
        return [axis.group for axis in self.axes]

    def replay(self) -> None:
        """Do it again."""
        for each in self.outside.values():
            each.poison_if_freed()
        with self.uncounted():
            for step in self.steps:
                step()
        self.poison()

    def poison(self) -> None:
        """Leave nothing in its own memory."""
        for tensor in self.own.values():
            poison(tensor)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Around exchanges that a device makes, which no Python counts."""
        before = [(axis.traffic, axis.traffic.calls, axis.traffic.num_bytes) for axis in self.axes]
        yield
        for traffic, calls, num_bytes in before:
            traffic.calls, traffic.num_bytes = calls, num_bytes


class Tape:
    """A `GraphRecorder` (cuda_graphs.py). `refuses`: it records nothing, as a device without memory for a graph."""

    marked: Callable[[], Any] = nullcontext
    made: Callable[[Recording], None] = staticmethod(lambda _: None)
    now: "Strip | None" = None

    def __init__(self, device: torch.device = CPU, *, refuses: bool = False) -> None:
        self.device, self._refuses = device, refuses

    @contextmanager
    def noting_waits(self) -> Iterator[list[Any]]:
        """As `GraphRecorder.noting_waits`."""
        with Reads() as reads:
            yield reads.noted

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """As `GraphRecorder.record`."""
        if self._refuses:
            raise torch.OutOfMemoryError("this rank records nothing")
        recording = Recording()
        Tape.now = Strip(recording)
        try:
            with Tape.now:
                function()
        finally:
            Tape.now = None
        recording.poison()
        self.made(recording)
        return recording.replay


class Reads(TorchFunctionMode):
    """Notes what of a GPU waits for it, and is no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS or (func in MAKES and kwargs.get("device") is not None):
            self.noted.append(func)
        return func(*args, **kwargs)


class Strip(TorchDispatchMode):
    """Records while it is on."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, 2 s a rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in HOST_READS:
            raise RuntimeError(f"{name} tells the host a number, which no graph can")
        flags = [each for each in tensors_in((args[1:], kwargs)) if each.dtype is torch.bool]
        if name in UNKNOWN_LENGTHS or (name.startswith("aten::index") and flags):
            raise RuntimeError(f"{name} makes as many rows as its values say, which no graph can")
        given = pytree.tree_map_only(torch.Tensor, self.operand, (args, kwargs))
        out = func(*args, **kwargs)
        before = {id_of(each) for each in tensors_in((args, kwargs))}
        made = [each if id_of(each) not in before | self.recording.own.keys() else None for each in tensors_in(out)]
        for each in made:
            if each is not None:
                self.recording.own.setdefault(id_of(each), each)
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        if writes or (any(each is not None for each in made) and "empty" not in name):
            self.recording.steps.append(lambda: again(func, given, made))
        return out

    def operand(self, tensor: torch.Tensor) -> Any:
        """A tensor as steps hold it: of the recording's own memory, or its address."""
        if not tensor.numel() or id_of(tensor) in self.recording.own:
            return tensor.detach()
        outside = self.recording.outside.setdefault(id_of(tensor), Outside.of(tensor))
        return Operand(outside, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def exchanging(self, axis: Axis) -> Recording:
        """What an exchange over this axis is recorded in."""
        if axis.staged:
            raise RuntimeError("an exchange goes by the host, as none in a graph can")
        self.recording.axes.append(axis)
        return self.recording


def again(func: Any, given: Any, made: list[torch.Tensor | None]) -> None:
    """An operator, its results where they were."""
    args, kwargs = pytree.tree_map_only(Operand, Operand.tensor, given)
    for place, result in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
        if place is not None and place.numel():
            place.copy_(result)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def id_of(tensor: torch.Tensor) -> int:
    """What tells storages apart while they live."""
    return tensor.untyped_storage()._cdata


class TapedAllToAll(AllToAll):
    """An exchange that is recorded where recording is under way: then nothing travels yet."""

    def __init__(self, axis: Axis, send: torch.Tensor, sending: Any, receiving: Any, **how: Any) -> None:
        self._strip, self._begun = Tape.now, list[AllToAll]()
        if self._strip is None:
            super().__init__(axis, send, sending, receiving, **how)
            return
        recording, begun = self._strip.exchanging(axis), self._begun
        row = how.get("row")
        self.axis, self.received = axis, send.new_empty((sum(receiving), *(send.shape[1:] if row is None else row)))
        row_bytes = send.element_size() * math.prod(send.shape[1:])
        axis.traffic.add((send.shape[0] - sending[axis.index]) * row_bytes)

        def step() -> None:
            with Tape.marked():
                begun.append(AllToAll(axis, send, sending, receiving, **how))

        recording.steps.append(step)

    def wait(self) -> torch.Tensor:
        """As `AllToAll.wait`."""
        if self._strip is None:
            return super().wait()
        begun, received = self._begun, self.received
        self._strip.recording.steps.append(lambda: received.copy_(begun.pop().wait()))
        return received


class TapedAllGather(AllGather):
    """The same for a gather."""

    def __init__(self, axis: Axis, mine: torch.Tensor, whole: torch.Tensor, *lengths: Any, **how: Any) -> None:
        self._strip = Tape.now
        if self._strip is None:
            super().__init__(axis, mine, whole, *lengths, **how)
            return
        axis.traffic.add((axis.size - 1) * mine.nbytes)

        def step() -> None:
            with Tape.marked():
                AllGather(axis, mine, whole, *lengths, **how).wait()

        self._strip.exchanging(axis).steps.append(step)

    def wait(self) -> None:
        """As `AllGather.wait`."""
        if self._strip is None:
            super().wait()


def install() -> None:
    """Have exchanges be recorded. Once a process."""
    collectives.AllToAll, collectives.AllGather = TapedAllToAll, TapedAllGather
