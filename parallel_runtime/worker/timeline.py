"""When a stage of a pipeline waited for which chunk and computed it, on the clock that all ranks of a machine share.

A timeline that is on makes each chunk's end wait for the device, so a run that is timed so is a little slower.
"""

import time

import torch

from ..timing import wait_for
from ..wire.replies import ChunkSpan, StageTimeline

MOST_SPANS = 500  # with the times of all steps, a message has room for no more


class Timeline:
    """Spans of one rank, in order; nothing at no cost when it is off."""

    def __init__(self, device: torch.device, *, on: bool) -> None:
        self._device, self._on = device, on
        self._spans: list[ChunkSpan] = []
        self._left_out = 0

    def now(self) -> float:
        """Seconds on the machine's monotonic clock, once the device has finished what was asked of it."""
        if not self._on:
            return 0.0
        wait_for(self._device)
        return time.monotonic()

    def add(self, call: int, chunk: range, cond: int, *, asked_s: float, began_s: float, ended_s: float) -> None:
        """A chunk of a conditioning: when the stage was ready for it, when it was there, and when it was done."""
        if not self._on:
            return
        if len(self._spans) == MOST_SPANS:
            self._left_out += 1
            return
        asked_s, began_s, ended_s = (round(moment, 6) for moment in (asked_s, began_s, ended_s))
        span = ChunkSpan(call, chunk.start, chunk.stop, cond, asked_s=asked_s, began_s=began_s, ended_s=ended_s)
        self._spans.append(span)

    def report(self, stage: int) -> StageTimeline | None:
        """What was noted, None when off."""
        if not self._on:
            return None
        return StageTimeline(stage=stage, spans=tuple(self._spans), left_out=self._left_out)
