"""How long the parts of a step take on one rank, by a clock that waits for the device.

On a GPU a region is two device events, read after the step's own synchronisation; nothing is synchronised for the
measurement. On the CPU it is the clock. What was not measured is absent.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class RegionTimer:
    """Times named regions of one step on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: dict[str, list[tuple[Mark, Mark]]] = {}

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Time what runs inside. A name may be entered several times; its times add up."""
        began = self._mark()
        yield
        self._marks.setdefault(name, []).append((began, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds by region. Call it once the device has finished the step."""
        return {f"{name}_s": sum(_between(*pair) for pair in pairs) for name, pairs in self._marks.items()}

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(began: Mark, ended: Mark) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        return float(ended) - float(began)  # type: ignore[arg-type]  # both are clock readings
    return began.elapsed_time(ended) / 1000
