"""A request's tensors in shared memory, and their way to the rank's device and back.

Does not own which of them stay on the device for later requests (held_state.py).
"""

from collections.abc import Mapping

import torch


def to_device(part: torch.Tensor, device: torch.device, *, copy: bool = False) -> torch.Tensor:
    """A tensor of the host on the device; on the CPU it is itself, or with `copy` a copy of it.

    A GPU gets it through pinned memory, which torch keeps for the next one, without a wait: from pageable memory the
    driver would stage it. `part` may be written again as soon as this returns.
    """
    if device.type != "cuda" or part.device.type != "cpu":
        return part.to(device, copy=copy)
    pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return pinned.copy_(part).to(device, non_blocking=True)


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


def call_tensors(tensors: Mapping[str, torch.Tensor], call: int) -> dict[str, torch.Tensor]:
    """Of a request's tensors those of one call, by the names that they have there."""
    start = f"{call}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
