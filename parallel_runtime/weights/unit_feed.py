"""Whole units out of the ranks' shards of them, one after another, the next under way while the present one computes.

    two buffers          A: unit k, being computed with      B: unit k + 1, arriving          then the other way round

Owns the buffers, the order of units in a step and what is in flight. Knows no weight. On a GPU everything arrives on a
stream of its own, which first waits for all that was queued for computing: by then that is the block before the present
one, the last to read the buffer that is filled next. Computing waits for what arrives before it reads it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..parallel.collectives import AllGather, Axis


class UnitFeed:
    """Hands out whole units in the order that `begin` was told."""

    def __init__(
        self, group: Axis, lengths: Callable[[str], Sequence[int]], *, device: torch.device, offloaded: bool
    ) -> None:
        """`lengths`: the bytes of a unit that each rank holds. `offloaded`: the shards lie on the host and are copied
        to the device first, just as much ahead."""
        self.group, self.device, self.offloaded = group, device, offloaded
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lengths, self._fitted = lengths, (0, 0)
        self._buffers: list[torch.Tensor] = []
        self._staging: torch.Tensor | None = None
        self._order: Sequence[str] = ()
        self._shards: Mapping[str, torch.Tensor] = {}
        self._at = -1
        self._gather: AllGather | None = None
        self._arriving: int | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device besides the shards."""
        staging = 0 if self._staging is None else self._staging.nbytes
        return staging + sum(buffer.nbytes for buffer in self._buffers)

    def fit(self, units: Iterable[str]) -> None:
        """Have buffers for the largest of these units, no larger and no smaller."""
        known = [self._lengths(unit) for unit in units]
        fitted = max(map(sum, known)), max(lengths[self.group.index] for lengths in known)
        if fitted == self._fitted:
            return
        self._check_ended()
        self._buffers, self._staging = [], None  # the old go before the new come
        whole_bytes, shard_bytes = self._fitted = fitted
        self._buffers = [torch.empty(whole_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        if self.offloaded and self.group.size > 1:
            self._staging = torch.empty(shard_bytes, dtype=torch.uint8, device=self.device)

    def begin(self, order: Sequence[str], shards: Mapping[str, torch.Tensor]) -> None:
        """Say which units will be taken, in which order, and start the first on its way. `shards` are this rank's."""
        self._check_ended()
        self._order, self._shards, self._at = order, shards, -1
        if order:
            self._start(0)

    def take(self, prefix: str) -> torch.Tensor:
        """The whole unit as bytes, good until the next unit is taken. The unit taken last may be taken again.

        Raises `RuntimeError` when it is not that unit's turn: the other ranks would send another one.
        """
        if 0 <= self._at < len(self._order) and self._order[self._at] == prefix:
            return self._whole(self._at)
        if self._arriving is None or self._order[self._arriving] != prefix:
            due = "none is" if self._arriving is None else f"{self._order[self._arriving]!r} is"
            raise RuntimeError(
                f"the weights of {prefix!r} are asked for, but {due} due; say `begin` and keep its order"
            )
        self._at = self._finish(self._arriving)
        if self._at + 1 < len(self._order):
            self._start(self._at + 1)
        return self._whole(self._at)

    def end(self) -> None:
        """Take in what is in flight and forget the rest of the order."""
        if self._arriving is not None:
            self._finish(self._arriving)
        self._order, self._at = (), -1

    def _start(self, position: int) -> None:
        """Begin to send this rank's part of a unit, and to receive the other ranks' parts."""
        shard, whole = self._shards[self._order[position]], self._whole(position)
        with self._on_side_stream():
            if self.offloaded:
                arrived = whole if self._staging is None else self._staging[: shard.numel()]
                arrived.copy_(shard, non_blocking=True)
                shard = arrived
            lengths = self._lengths(self._order[position])
            self._gather = self.group.start_all_gather(shard, whole, lengths) if self.group.size > 1 else None
        self._arriving = position

    def _finish(self, position: int) -> int:
        """Wait for what is in flight, the unit at that position in the order, which is returned."""
        gather = self._gather
        self._arriving = self._gather = None
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        if gather is not None:
            gather.wait()
        return position

    def _whole(self, position: int) -> torch.Tensor:
        return self._buffers[position % 2][: sum(self._lengths(self._order[position]))]

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def _check_ended(self) -> None:
        if self._arriving is not None:
            raise RuntimeError(f"the weights of {self._order[self._arriving]!r} are still in flight; end the passes")
