"""A known pattern sent over an axis or a link and compared on arrival: it tells corrupting peer copies from sound ones.

Copies between some consumer GPUs return without an error and with other bytes. Only a comparison finds that.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .collectives import Axis
from .links import P2PChannel

RUN_BYTES = 1 << 20  # to each peer; a prime more a peer, so that runs differ in length and never align


def count_wrong_bytes(axis: Axis, device: torch.device, beat: Callable[[], None] = lambda: None) -> int:
    """Send every peer a run that only this pair of ranks has, both by all-to-all and around the ring.

    `beat` is called where kernels were launched for the first time, connections made, or bytes seen to arrive.
    """
    lengths = tuple(RUN_BYTES + 8191 * peer for peer in range(axis.size))
    send = torch.cat([_run(axis.index, peer, lengths[peer], device) for peer in range(axis.size)])
    beat()
    mine = lengths[axis.index]
    received = axis.all_to_all(send, send_lengths=lengths, receive_lengths=(mine,) * axis.size)
    beat()
    expected = torch.cat([_run(peer, axis.index, mine, device) for peer in range(axis.size)])
    wrong = int((received != expected).sum())
    beat()
    before = (axis.index - 1) % axis.size
    shift = axis.start_shift(_run(axis.index, axis.index, mine, device), (lengths[before],))
    beat()
    arriving = shift.wait()
    return wrong + int((arriving != _run(before, before, lengths[before], device)).sum())


def count_wrong_bytes_of_links(previous: P2PChannel, following: P2PChannel, device: torch.device) -> int:
    """Send the stage after a run that only the two ranks of that link have, and compare that of the stage before."""
    rank = dist.get_rank()
    run = _run(rank, following.peer, RUN_BYTES, device)
    # NCCL connects two ranks with their first message, and the hosts of both wait for it: if all stages of the circle
    # sent first, none would ever receive.
    if following.peer < rank:  # the last stage
        arrived = previous.receive((RUN_BYTES,), torch.uint8, device=device)
        following.send(run)
    else:
        following.send(run)
        arrived = previous.receive((RUN_BYTES,), torch.uint8, device=device)
    following.drain()
    return int((arrived != _run(previous.peer, rank, RUN_BYTES, device)).sum())


def _run(sender: int, receiver: int, length: int, device: torch.device) -> torch.Tensor:
    """Bytes that depend on the sender, the receiver and their place."""
    position = torch.arange(length, dtype=torch.int64, device=device)
    return ((position * 31 + position // 251 + sender * 67 + receiver * 129) % 256).to(torch.uint8)
