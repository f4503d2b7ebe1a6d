"""Graphs of what a function queues on a device: CUDA's own. Tests have a tape in their place (tests/gpu/tape.py).

Owns how one is made, and its memory. Does not own what is recorded, nor when it is replayed (block_graphs.py).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
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
        self._device, self._stream = device, _stream_of(device)
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
                    self._end(graph)
                raise
            self._end(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a recording, also one that CUDA calls invalid, as after a wait for the device.

        There torch before pull request 180395 takes it for under way for ever: no memory could be given back any more.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(AttributeError, RuntimeError):  # another torch, or one that has ended it
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                torch._C._cuda_releasePool(self._device.index, self._pool)
            raise


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs of a device are recorded on, one for the process's life: torch keeps memory for matrix
    products by stream, and does not give it back with a graph (pytorch issue 99196)."""
    return torch.cuda.Stream(device)
