"""When a stage of a pipeline waited for which chunk and computed it, on the clock that all ranks of a machine share.

A timeline that is on makes each chunk's end wait for the device, so a run that is timed so is a little slower.
"""

import time
from typing import Any

import torch

from ..timing import wait_for

MOST_SPANS = 500  # beside the times of all steps, a message has room for no more


class Timeline:
    """Spans of one rank, in order; nothing at no cost when it is off."""

    def __init__(self, device: torch.device, *, on: bool) -> None:
        self._device, self._on = device, on
        self._spans: list[list[float]] = []
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
        moments = (round(moment, 6) for moment in (asked_s, began_s, ended_s))
        self._spans.append([call, chunk.start, chunk.stop, cond, *moments])

    def report(self, stage: int) -> dict[str, Any]:
        """Spans [call, first patch, patch after the last, conditioning, asked_s, began_s, ended_s]; {} when off."""
        if not self._on:
            return {}
        return {"timeline": {"stage": stage, "spans": self._spans, "left_out": self._left_out}}
