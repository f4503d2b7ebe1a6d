"""Copies between a CUDA device and the host that go through pinned memory, on a stream beside the one that computes.

A plain copy between a GPU and pageable memory is staged by the driver and stops the host until it is done, and with it
all that was queued before. Owns the stream, its events and the way through pinned memory; torch's allocator keeps that
memory for the next copy of its size. Does not own what is copied, nor when it is waited for.
"""

import ctypes
from typing import Protocol

import torch


class ArrivedCopy(Protocol):
    """Whether a copy has arrived, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has, without waiting."""
        ...

    def synchronize(self) -> None:
        """Return when it has."""
        ...


class SideStream:
    """A stream of a CUDA device beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory of the host that the device writes to by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def start(self, pinned: torch.Tensor, rows: torch.Tensor) -> ArrivedCopy:
        """Begin to copy, once the current stream has made `rows`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(rows, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(self._stream)
        return arrival


def to_device(part: torch.Tensor, device: torch.device, *, copy: bool = False) -> torch.Tensor:
    """A tensor of the host on the device, without a wait; on the CPU itself, or with `copy` a copy of it.

    What is copied to a GPU may be written again as soon as this returns.
    """
    if device.type != "cuda" or part.device.type != "cpu":
        return part.to(device, copy=copy)
    pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return copy_on_host(pinned, part).to(device, non_blocking=True)


def to_host(target: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy `rows` to a tensor of the host, of any dtype; waits for the device, and for no driver that stages them."""
    if rows.device.type != "cuda":
        target.copy_(rows)
        return
    pinned = torch.empty(rows.shape, dtype=target.dtype, pin_memory=True)
    pinned.copy_(rows, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(rows.device))
    arrival.synchronize()
    target.copy_(pinned)


def copy_on_host(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy into a contiguous CPU tensor of the same dtype and shape.

    By memmove where the source allows it: `copy_` wakes a team of threads for more than 32,768 elements, which takes
    milliseconds while the ranks keep the processors busy, where one thread moves 2 MiB in 0.2 ms.
    """
    if is_plain(source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        return target
    return target.copy_(source)


def is_plain(source: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie on the CPU one after another as they are meant."""
    return source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg()
