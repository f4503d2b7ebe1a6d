"""Inputs of a request that lie on a CUDA device: compared there with what was sent last, and brought to the host.

One wait for all of them: what differs is found on the device, and its answers arrive with the inputs that have to come
anyway. An input that was another one last time too is on its way before its answer is known; one that changes now and
then costs a second wait. Owns the comparison and these waits. Does not own what was sent last (arena.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..pinned import ArrivedCopy, SideStream

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits compare, where NaNs would not


@dataclass(frozen=True)
class DeviceInput:
    """An input, what was sent last in its place if that is kept, and whether it is expected to be another one."""

    source: torch.Tensor
    last_sent: torch.Tensor | None
    changes: bool


def arrived_of(side: SideStream, inputs: Sequence[DeviceInput]) -> list[torch.Tensor | None]:
    """The inputs of one device in memory of the host, None for those whose bytes were sent last."""
    others = [_differs(each) for each in inputs]
    asked = [other for other in others if other is not None]
    copies = _Copies(side)
    answers = copies.start(torch.stack(asked)) if asked else torch.empty(0, dtype=torch.bool)
    early = {
        number: copies.start(each.source)
        for number, each in enumerate(inputs)
        if others[number] is None or each.changes
    }
    copies.wait()
    answered = iter(answers.tolist())
    sent = [other is None or next(answered) for other in others]
    late = {
        number: copies.start(each.source) for number, each in enumerate(inputs) if sent[number] and number not in early
    }
    copies.wait()
    found = early | late
    return [found[number] if sent[number] else None for number in range(len(inputs))]


class _Copies:
    """Copies on one side stream, which end in the order in which they began."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        self._last: ArrivedCopy | None = None
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


def _differs(given: DeviceInput) -> torch.Tensor | None:
    """One bool on the device, whether a bit is another than was sent; None where what was sent is not kept."""
    before, bits = given.last_sent, INTEGERS[given.source.element_size()]
    if before is None or before.device != given.source.device:
        return None
    return (before.view(bits) != given.source.resolve_neg().view(bits)).any()
