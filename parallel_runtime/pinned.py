"""Copies from a CUDA device to pinned memory of the host, on a stream other than the one that computes.

A plain copy from a GPU to pageable memory is staged by the driver and stops the host until it is done, and with it all
that was queued before. Owns the stream and its events. Does not own what is copied, nor when it is waited for.
"""

import torch


class SideStream:
    """A stream of a CUDA device for copies while another one computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory of the host that the device writes to by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def start(self, pinned: torch.Tensor, rows: torch.Tensor) -> torch.cuda.Event:
        """Begin to copy, once the current stream has made `rows`; the event is when the copy is there."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(rows, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(self._stream)
        return arrival
