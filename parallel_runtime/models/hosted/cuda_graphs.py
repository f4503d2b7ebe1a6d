"""Graphs of what a function queues on a device: CUDA's own. Tests have a tape in their place (tests/gpu/tape.py).

Owns how one is made, and its memory. Does not own what is recorded, nor when it is replayed (block_graphs.py).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeAlias

import torch

Replay: TypeAlias = Callable[[], object]


class GraphRecorder(Protocol):
    """What makes a graph of what a function queues on the device."""

    def record(self, function: Callable[[], None]) -> Replay:
        """What queues the same again, on the same memory. Whether `function` computes now as well is not known.

        Raises `RuntimeError` where it does what no graph can hold.
        """
        ...


class CudaRecorder:
    """Graphs of CUDA that share one pool of memory: none leaves anything in it that another one reads."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Replay:
        """As `GraphRecorder.record`; nothing is computed now."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            # other threads of the rank, torch's watchdog among them, may call CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay
