"""A request's tensors in shared memory, and their way to the rank's device.

Inputs that a step has in common with the next one are copied once, where the parent says that they are the same. Owns
those copies. Does not own what is the same: the parent compares bytes and gives every content a number that it
never uses again (pool/arena.py).
"""

from collections.abc import Hashable, Mapping

import torch


class RepeatedInputs:
    """A request's inputs on their way to the device; this rank's parts of those that requests repeat stay there.

    What is sent for the first time is not kept: a ControlNet's residuals come new with each step and are large.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, dict[Hashable, torch.Tensor]] = {}  # by the content's number, then by the part
        self._kept: dict[int, dict[Hashable, torch.Tensor]] = {}  # the same by the address of this request's input

    def begin(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> None:
        """A request with these views of shared memory, and the numbers of those that are repeated, begins.

        What it does not repeat is let go.
        """
        self._copies = {number: self._copies.get(number, {}) for number in numbers.values()}
        self._kept = {tensors[name].data_ptr(): self._copies[number] for name, number in numbers.items()}

    def clear(self) -> None:
        """Let everything go."""
        self._copies, self._kept = {}, {}

    def on_device(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """`part`, rows of the input `whole`, on the device, not to be written to. On the CPU it may be that part.

        Only of a view is it known by its address which part it is; rows that were gathered are not kept.
        """
        kept = self._kept.get(whole.data_ptr()) if part.numel() else None
        if kept is None or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return to_device(part, self._device)
        key = (part.data_ptr() - whole.data_ptr(), part.shape, part.stride(), part.dtype)
        if key not in kept:
            kept[key] = to_device(part, self._device, copy=True)
        return kept[key]


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
