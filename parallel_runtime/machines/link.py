"""Frames between the process on ComfyUI's machine that passes messages on and the launcher of one further machine.

Owns what a frame is and how it travels in a gloo group of these processes alone: tensors of bytes, never pickled. Does
not own what is passed on (relay.py, ranks_here.py). The group has no ranks of the pool in it, so nothing here waits for
one that computes.

A frame is a block of fixed size, whose receiver waits for it already, and bytes that do not fit into it behind::

    byte 0      4       8        16       24                              4096
         +------+-------+--------+--------+-------------------------------+
         | kind | index | offset | length | the first `length` bytes      |  more: a tensor of `length` bytes
         | u32  |  u32  |  u64   |  u64   | where they fit                |
         +------+-------+--------+--------+-------------------------------+
"""

import struct
import threading
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from ..wire.protocol import MAX_SEGMENT_BYTES, ProtocolError

HEAD = struct.Struct("<IIQQ")
BLOCK_BYTES = 4096
PART_BYTES = 4 << 20  # of a tensor, after which its rank counts as getting on: a slow link may take minutes for it all
PATIENCE = timedelta(days=7)  # the pool watches, and ends ranks that are silent
TAG = 1
RUN = "parallel-dit"  # torchrun's name of the run; a store serves one generation
CONTROL = struct.Struct("<QQ")  # the request to give up, and the credit, which was read after it
CLOCK = struct.Struct("<d")  # before the signs of life: when they were sent, on that machine's monotonic clock
# Bits of a rank's byte among the signs of life: since the last ones its heart beat; it waits; its process runs.
BEAT, WAITS, PULSE = 1, 2, 4


class FrameKind(IntEnum):
    """What a frame brings. `index` and `offset` are 0 where they are not named."""

    PACKET = 1  # a message as wire/protocol.py has it, for or from rank `index` of the machine, from 0
    DATA = 2  # bytes of segment `index` from `offset` on
    CONTROL = 3  # down: the cancel and credit words
    SIGNS = 4  # up: the time there; of each rank whether its heart beat, whether it waits, and whether it runs


@dataclass(frozen=True)
class Frame:
    """One frame; `data` is of bytes."""

    kind: FrameKind
    index: int
    offset: int
    data: torch.Tensor


class RelayLink:
    """One end of a connection between two processes of the group. Sending is safe from any thread; one receives.

    `send` and `receive` raise RuntimeError when the other end is gone.
    """

    def __init__(self, group: Any, peer: int) -> None:  # noqa: ANN401  torch's stubs know no send of a gloo group
        self._group, self._peer = group, peer
        self._lock = threading.Lock()
        self._head, self._come = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
        self._sent, self._received = (torch.frombuffer(each, dtype=torch.uint8) for each in (self._head, self._come))

    def send(self, kind: FrameKind, data: bytes | torch.Tensor, *, index: int = 0, offset: int = 0) -> None:
        """Send a frame; returns when its memory may be written again."""
        if isinstance(data, bytes):
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        length = data.numel()
        with self._lock:
            HEAD.pack_into(self._head, 0, kind, index, offset, length)
            fits = HEAD.size + length <= BLOCK_BYTES
            if fits:
                self._sent[HEAD.size : HEAD.size + length] = data
            self._group.send([self._sent], self._peer, TAG).wait()
            if not fits:
                self._group.send([data], self._peer, TAG).wait()

    def receive(self) -> Frame:
        """The next frame. Raises ProtocolError for what is none."""
        self._group.recv([self._received], self._peer, TAG).wait()
        kind, index, offset, length = HEAD.unpack_from(self._come)
        if kind not in set(FrameKind) or length > MAX_SEGMENT_BYTES:
            raise ProtocolError(f"a frame of kind {kind} and {length} bytes")
        if HEAD.size + length <= BLOCK_BYTES:
            return Frame(FrameKind(kind), index, offset, self._received[HEAD.size : HEAD.size + length].clone())
        data = torch.empty(length, dtype=torch.uint8)
        self._group.recv([data], self._peer, TAG).wait()
        return Frame(FrameKind(kind), index, offset, data)


def join_relays(store: dist.Store, *, place: int, machines: int) -> dist.ProcessGroupGloo:
    """The group of all processes that pass on: the one on ComfyUI's machine has place 0, the launchers follow."""
    return dist.ProcessGroupGloo(dist.PrefixStore("relays", store), place, machines, PATIENCE)


def as_bytes(data: torch.Tensor) -> bytes:
    """The bytes of a frame's data."""
    return bytes(data.numpy())
