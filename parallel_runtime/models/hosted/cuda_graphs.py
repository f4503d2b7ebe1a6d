"""Graphs of what a function queues on a device: CUDA's own. Tests have a tape in their place (tests/gpu/tape.py).

Owns how one is made, and its memory. Does not own what is recorded, nor when it is replayed (block_graphs.py).
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import torch

Replay: TypeAlias = Callable[[], object]
WAITED = "called a synchronizing (CUDA|HIP) operation"  # torch's words
_SAID: set[tuple[str, type[Warning], str, int]] = set()  # warnings of blocks; Python's note of them ends with a filter


class GraphRecorder(Protocol):
    """What makes a graph of what a function queues on `device`.

    A protocol of `CudaRecorder` and of the tests' recorder for CPUs, which have no CUDA graphs.
    """

    device: torch.device

    def noting_waits(self) -> AbstractContextManager[list[Any]]:
        """Around what may be recorded later: has an entry for each time that the host waited for the device there."""
        ...

    def record(self, function: Callable[[], None]) -> Replay:
        """What queues the same again, on the same memory. Whether `function` computes now as well is not known.

        Raises `RuntimeError` where it does what no graph can hold.
        """
        ...


class CudaRecorder:
    """Graphs of CUDA that share one pool of memory: none leaves anything in it that another one reads."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, _stream_of(device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # that live, with memory of the pool

    @contextmanager
    def noting_waits(self) -> Iterator[list[Any]]:
        """As `GraphRecorder.noting_waits`, of what torch itself has wait. Other warnings come once, as it is left."""
        waits, before = list[Any](), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.filterwarnings("always", WAITED)
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it does not find all, said once
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(before)
                waits += [each for each in said if re.match(WAITED, str(each.message))]
        for each in said:
            key = (str(each.message), each.category, each.filename, each.lineno)
            if each not in waits and key not in _SAID:
                _SAID.add(key)
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def record(self, function: Callable[[], None]) -> Replay:
        """As `GraphRecorder.record`; nothing is computed now."""
        if not self._graphs:  # torch records nothing more in a pool that all graphs have left
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.stream(self._stream):
                self._capture(graph, function)
        except BaseException:
            self._graphs = WeakSet()  # nor in one that some of torch takes for under recording
            raise
        self._graphs.add(graph)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        began = False
        try:
            # other threads of the rank, torch's watchdog among them, may call CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            began = True
            function()
        except BaseException:
            with suppress(RuntimeError):  # the first error says more
                self._end(graph, began=began)
            raise
        self._end(graph, began=began)

    def _end(self, graph: torch.cuda.CUDAGraph, *, began: bool) -> None:
        """End a recording, also one that CUDA calls invalid, as after a wait for the device.

        Such a one torch before pull request 180395 takes for under way for ever: no memory could be given back any
        more. Its part of the pool is given back by us; that of one that has ended, and so knows its pool, by torch.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            where, renamed = (self.device.index, self._pool), hasattr(torch._C, "_cuda_endAllocateToPool")  # by 2.8
            end = f"_cuda_endAllocate{'' if renamed else 'CurrentStream'}ToPool"
            if _done(torch._C, end, *where) or (began and renamed and not _done(graph, "pool")):
                _done(torch._C, "_cuda_releasePool", *where)
            raise


def _done(of: object, name: str, *given: object) -> bool:
    """Whether torch does it, rather than to raise as there is nothing to do, or to have it no more by that name."""
    try:
        getattr(of, name)(*given)
    except (AttributeError, RuntimeError):
        return False
    return True


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs of a device are recorded on, one for the process's life: torch keeps memory for matrix
    products by stream, and does not give it back with a graph (pytorch issue 99196)."""
    return torch.cuda.Stream(device)
