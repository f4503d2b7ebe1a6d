"""Where the tensors of a request lie: one after another in the segment of the generation, or in a further one.

Inputs on a CUDA device are compared there with what was sent last, and brought to the host.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..pinned import SideStream
from ..weights.host_memory import give_back_pinned
from ..wire.channel import CONTROL_BYTES, Attach, Segment, SegmentTable
from ..wire.protocol import ALIGNMENT, TensorSpec, dtype_name
from .failures import system_error

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits compare, where NaNs would not


@dataclass(frozen=True)
class _Content:
    """What lies in a place: its number, and for a source that is not plain CPU memory a copy of it on its device.

    `changed`: another content lay there before, so that the next one will be another, too.
    """

    number: int
    last_sent: torch.Tensor | None
    changed: bool = False


def arrived_of(side: SideStream, inputs: Sequence[tuple[torch.Tensor, _Content | None]]) -> list[torch.Tensor | None]:
    """Inputs of one device, each with what was sent last in its place, in memory of the host; None where it is that."""
    others = [_differs(source, known) for source, known in inputs]
    asked = [other for other in others if other is not None]
    copies = _Copies(side)
    answers = copies.start(torch.stack(asked)) if asked else torch.empty(0, dtype=torch.bool)
    early = {
        number: copies.start(source)
        for number, (source, known) in enumerate(inputs)
        if others[number] is None or known is None or known.changed
    }
    copies.wait()
    answered = iter(answers.tolist())
    sent = [other is None or next(answered) for other in others]
    late = {
        number: copies.start(source)
        for number, (source, _) in enumerate(inputs)
        if sent[number] and number not in early
    }
    copies.wait()
    found = early | late
    return [found[number] if sent[number] else None for number in range(len(inputs))]


class _Copies:
    """Copies on one side stream, which end in the order in which they began."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        self._last: torch.cuda.Event | None = None
        self._under_way: list[torch.Tensor] = []  # their memory must not serve others before it has been read

    def start(self, source: torch.Tensor) -> torch.Tensor:
        """Begin a copy; it may be read after `wait`."""
        pinned = self._side.pinned(source.shape, source.dtype)
        self._last = self._side.start(pinned, source)
        self._under_way.append(source)
        return pinned

    def wait(self) -> None:
        """Return when all have arrived."""
        if self._last is not None:
            self._last.synchronize()
        self._last = None
        self._under_way.clear()


def _differs(source: torch.Tensor, known: _Content | None) -> torch.Tensor | None:
    """One bool on the device, whether a bit is another than was sent; None where what was sent is not kept."""
    before, bits = None if known is None else known.last_sent, INTEGERS[source.element_size()]
    if before is None or before.device != source.device:
        return None
    return (before.view(bits) != source.resolve_neg().view(bits)).any()


# A further segment is a multiple of this, so that sizes that creep up do not each need a new one.
GROWTH_BYTES = 1 << 24
# Of inputs that do not lie in plain CPU memory, a request's first ones up to this are kept to compare the next with.
TWIN_BYTES = 64 << 20


class Arena:
    """Places tensors in the segments of one generation.

    `announce(segment, fd)` tells the ranks about a further segment and the one that it replaces.
    """

    def __init__(self, table: SegmentTable, *, announce: Callable[[Attach, int], None]) -> None:
        self._table = table
        self._announce = announce
        self._further = 0  # index of the further segment; 0: none yet. Indices are never used again
        self._numbers = itertools.count(1)
        self._contents: dict[TensorSpec, _Content] = {}  # the last request's inputs
        self._sides = functools.cache(SideStream)  # by device
        self._pinned_for: set[torch.device] = set()  # devices whose inputs took pinned memory of this process
        self._pins = False  # whether the last request's inputs lay on a CUDA device, where its results will go

    def place(
        self, tensors: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor] = {}
    ) -> tuple[tuple[TensorSpec, ...], dict[str, int]]:
        """Have `tensors` in shared memory and leave room for `results`, tensors on the meta device.

        Returns where they lie, the results last, and by name the content's number of each input that was there before.
        Raises ProtocolError (a ValueError) for what cannot travel, PoolError when there is no memory to be had.
        """
        everything = {**tensors, **results}
        specs, end = lay_out(everything, segment=0, start=CONTROL_BYTES)
        if end > self._table[0].num_bytes:
            specs, end = lay_out(everything, segment=self._further, start=0)
            if not self._further or end > self._table[self._further].num_bytes:
                self._replace_further(end)
                specs, _ = lay_out(everything, segment=self._further, start=0)
        return specs, self._fill(specs[: len(tensors)], tensors)

    def forget(self) -> None:
        """Count nothing as known: what was placed last was not asked for, and no other machine has it."""
        self._contents = {}

    def close(self) -> None:
        """Place nothing more. What is announced to holds this; without it, both go with their last user."""
        self.forget()
        self._announce = _nothing

    def give_back(self) -> None:
        """Return the segments' memory to the system, and what is pinned in this process. Only where no request is under
        way and its results are taken: what lies in the segments turns to zeros."""
        self.forget()
        self._table[0].give_back(CONTROL_BYTES)
        if self._further:
            self._table[self._further].give_back(0)
        self.give_back_pinned()

    def give_back_pinned(self) -> None:
        """Return the pinned memory of this process to the system that copies of inputs and results have left behind:
        torch would keep it. A GPU that has failed has its error told by what ComfyUI computes there next."""
        while self._pinned_for:
            with suppress(RuntimeError):
                give_back_pinned(self._pinned_for.pop())

    def _fill(self, specs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Copy what is not there yet; the numbers of what is."""
        # Inputs and results of one request do not overlap, so what the last one's inputs left is whole wherever this
        # one's are laid out alike. A copy that is interrupted leaves nothing behind that counts as known.
        before, self._contents = self._contents, {}
        repeated: dict[str, int] = {}
        last_sent_bytes = TWIN_BYTES
        arrived = self._from_devices({spec: tensors[spec.name].detach() for spec in specs}, before)
        for spec in specs:
            source, place, content = tensors[spec.name].detach(), self._table.tensor(spec), before.get(spec)
            if spec in arrived:
                here = arrived[spec]
                holds = here is None
            else:
                here, holds = source, content is not None and _holds(place, content.last_sent, source)
            if content is None or not holds:
                _copy(place, source if here is None else here)
                kept = _last_sent_copy(source, at_most=last_sent_bytes)
                content = _Content(next(self._numbers), kept, changed=content is not None)
            else:
                repeated[spec.name] = content.number
                content = replace(content, changed=False) if content.changed else content
            last_sent_bytes -= 0 if content.last_sent is None else content.last_sent.nbytes
            self._contents[spec] = content
        return repeated

    def _from_devices(
        self, sources: Mapping[TensorSpec, torch.Tensor], before: Mapping[TensorSpec, _Content]
    ) -> dict[TensorSpec, torch.Tensor | None]:
        """Inputs that lie on a CUDA device, on the host; None of those that are what was sent last."""
        found: dict[TensorSpec, torch.Tensor | None] = {}
        devices = {source.device for source in sources.values() if on_device(source)}
        self._pins = bool(devices)
        self._pinned_for |= devices
        for device in devices:
            inputs = {
                spec: (source, before.get(spec))
                for spec, source in sources.items()
                if source.device == device and on_device(source)
            }
            found |= zip(inputs, arrived_of(self._sides(device), list(inputs.values())), strict=True)
        return found

    def _own_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Room for a result; pinned, where it will go on to a CUDA device."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pins)

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """A copy of a tensor, in memory of its own: the next request overwrites the segment."""
        view = self._table.tensor(spec)
        return _copy(self._own_memory(view), view)

    def _replace_further(self, num_bytes: int) -> None:
        index, dropped = self._further + 1, (self._further,) if self._further else ()
        num_bytes = -(-num_bytes // GROWTH_BYTES) * GROWTH_BYTES
        try:
            segment, fd = Segment.create(num_bytes)
        except OSError as error:
            raise system_error(f"no shared memory of {num_bytes} bytes", error) from error
        try:
            for old in dropped:
                self._table.drop(old)
            self._table.add(index, segment)
            self._further = index
            self._announce(Attach(segment=index, num_bytes=num_bytes, drop=dropped), fd)
        finally:
            os.close(fd)


def _nothing(segment: Attach, fd: int) -> None:
    """What a further segment means to ranks that have ended."""


def on_device(source: torch.Tensor) -> bool:
    """Whether an input lies on a CUDA device."""
    return source.device.type == "cuda"


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy into a contiguous CPU tensor of the same dtype and shape.

    By memmove where the source allows it: `copy_` wakes a team of threads for more than 32,768 elements, which takes
    milliseconds while the ranks keep the processors busy, where one thread moves 2 MiB in 0.2 ms.
    """
    if _is_plain(source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        return target
    return target.copy_(source)


def _holds(place: torch.Tensor, last_sent: torch.Tensor | None, source: torch.Tensor) -> bool:
    """Whether the bytes of `place` are those of `source`, of the same dtype and shape.

    Ends at the first difference, so that an input that changes with each step costs next to nothing. In plain memory
    not by `torch.equal`, which wakes a team of threads as `copy_` does.
    """
    if _is_plain(source):
        return not _memcmp()(place.data_ptr(), source.data_ptr(), place.nbytes)
    if last_sent is None or last_sent.device != source.device:
        return False
    bits = INTEGERS[source.element_size()]
    return torch.equal(last_sent.view(bits), source.resolve_neg().view(bits))


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    """The C library's, which is 0 for equal bytes; loaded late, since this module must import on systems without it."""
    function = ctypes.CDLL(None).memcmp
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    compare: Callable[[int, int, int], int] = function
    return compare


def _last_sent_copy(source: torch.Tensor, *, at_most: int) -> torch.Tensor | None:
    """A copy on its device, to compare the next input with; None where the shared bytes do, or for lack of room."""
    return None if _is_plain(source) or source.nbytes > at_most else source.clone()


def _is_plain(source: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie on the CPU one after another as they are meant."""
    return source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg()


def lay_out(tensors: Mapping[str, torch.Tensor], *, segment: int, start: int) -> tuple[tuple[TensorSpec, ...], int]:
    """Entries for `tensors` from byte `start` on, each aligned, and the byte after the last."""
    specs = []
    for name, tensor in tensors.items():
        spec = TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), segment, start)
        specs.append(spec)
        start += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(specs), start
