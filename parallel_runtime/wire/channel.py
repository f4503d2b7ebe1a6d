"""How messages travel and where tensors lie: a socket a rank, and memory that all of them map.

Owns the sockets' framing (one message a packet, descriptors beside it) and the shared segments with their control page.
Does not own the bytes of a message (protocol.py) nor which side says what when (pool/ and worker/).

Segments are memfds: nameless, 0600, sealed so that no process can shrink one under a mapping (which would kill the
reader with SIGBUS). A mapping is never closed by hand: a tensor that still views it would take the process down. It
goes with its last view.

Segment 0 of a generation starts with the control page, which ranks and parent read and write without a message::

    byte 0       64           128          64 * (1 + rank)            64 * 9         4096
         +--------+------------+------------+----+--------------------+--------+----+---
         | cancel | signs of 0 | signs of 1 | .. | signs of `rank`    | credit | .. | tensors
         |  u64   |   3 u64    |   3 u64    |    |       3 u64        |  u64   |    |
         +--------+------------+------------+----+--------------------+--------+----+---

`cancel` is the id of the request that the parent wants given up (0: none); `credit` is how many steps of a run ranks
may start. A rank's signs are how often its heart beat, whether it waits for others (1) or not (0), and how often its
pulse was shown (processes.py). Each cache line has one writer.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernel_calls import (
    F_ADD_SEALS,
    F_GET_SEALS,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
    MFD_ALLOW_SEALING,
    MFD_CLOEXEC,
    memfd_create,
)
from ..plan import MAX_RANKS
from .protocol import MAX_MESSAGE_BYTES, MAX_SEGMENT_BYTES, Message, ProtocolError, TensorSpec, decode, encode

if TYPE_CHECKING:
    import torch

CONTROL_BYTES = 4096
MAX_DESCRIPTORS = 4  # in one message
_WORD_STRIDE = 64 // 8
_CREDIT_WORD = (1 + MAX_RANKS) * _WORD_STRIDE


class Segment:
    """Shared memory of a fixed size that tensors lie in. Make one with `create` or `attach`."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> tuple[Segment, int]:
        """A new segment of `num_bytes` zeros, and the descriptor to hand to others (the caller closes it).

        Pages cost memory once touched. Raises OSError when the system refuses, ValueError for a size out of range.
        """
        import fcntl  # here, because this module must import on systems that have none

        if not CONTROL_BYTES <= num_bytes <= MAX_SEGMENT_BYTES:
            raise ValueError(f"a segment of {num_bytes} bytes; use {CONTROL_BYTES} to {MAX_SEGMENT_BYTES}")
        fd = memfd_create("parallel-dit", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
            return cls(fd, num_bytes), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, num_bytes: int) -> Segment:
        """Map the segment behind `fd`, which is closed. Raises ProtocolError unless it is sealed and of that size."""
        import fcntl

        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
            size = os.fstat(fd).st_size
            if not seals & F_SEAL_SHRINK or size != num_bytes:
                raise ProtocolError(f"a segment of {num_bytes} sealed bytes was announced, got {size}, seals {seals}")
            return cls(fd, num_bytes)
        except OSError as error:
            raise ProtocolError(f"descriptor {fd} is no shared segment: {error}") from error
        finally:
            os.close(fd)

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor that `spec` names, of its shape and dtype: a view of the segment, not a copy.

        Raises ProtocolError when it passes the segment's end.
        """
        import torch  # here, because a rank says HELLO before it pays for this import

        end = spec.offset + spec.num_bytes
        if end > self.num_bytes:
            raise ProtocolError(f"tensor {spec.name}: bytes {spec.offset} to {end} of a segment of {self.num_bytes}")
        dtype = getattr(torch, spec.dtype)
        if spec.num_bytes == 0:
            return torch.empty(spec.shape, dtype=dtype)
        count = spec.num_bytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)

    def span(self, offset: int, num_bytes: int) -> torch.Tensor:
        """So many bytes from `offset` on, as a view. Raises ProtocolError when they pass the segment's end."""
        import torch

        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise ProtocolError(f"bytes {offset} to {offset + num_bytes} of a segment of {self.num_bytes}")
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)

    def give_back(self, start: int) -> None:
        """Return the memory from byte `start` on, a multiple of a page, to the system.

        It is zeros then in every process, and costs memory again once touched. Does nothing where the system cannot. No
        page of it may be pinned for a GPU.
        """
        if start < self.num_bytes:
            with suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, start, self.num_bytes - start)

    def words(self) -> memoryview:
        """The control page as u64 words, writable."""
        return memoryview(self._map).cast("Q")[: CONTROL_BYTES // 8]


@dataclass(frozen=True, kw_only=True)
class Attach:
    """What the parent says of a segment whose descriptor comes beside it, and which ones have served. Not answered."""

    segment: int
    num_bytes: int
    drop: tuple[int, ...]


class SegmentTable:
    """The segments of one generation by index. Index 0 holds the control page and stays to the end."""

    def __init__(self, control: Segment) -> None:
        self._segments = {0: control}
        self._words = control.words()

    def __getitem__(self, index: int) -> Segment:
        try:
            return self._segments[index]
        except KeyError:
            raise ProtocolError(f"segment {index} is not attached, only {self.indices}") from None

    @property
    def indices(self) -> list[int]:
        """The segments that are attached."""
        return sorted(self._segments)

    def add(self, index: int, segment: Segment) -> None:
        """Raises ProtocolError when `index` is taken: a segment is dropped before another takes its place."""
        if index in self._segments:
            raise ProtocolError(f"segment {index} is attached already")
        self._segments[index] = segment

    def drop(self, index: int) -> None:
        """Forget a segment; its memory goes with its last view. Raises ProtocolError for 0 and for one not attached."""
        if index == 0 or index not in self._segments:
            raise ProtocolError(f"segment {index} cannot be dropped, attached are {self.indices}")
        del self._segments[index]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """The tensor that `spec` names, as a view. Raises ProtocolError for one outside or on the control page."""
        if spec.segment == 0 and spec.offset < CONTROL_BYTES:
            raise ProtocolError(f"tensor {spec.name}: offset {spec.offset} lies on the control page")
        return self[spec.segment].tensor(spec)

    def span(self, index: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of a segment, as a view. Raises ProtocolError for those outside or on the control page."""
        if index == 0 and offset < CONTROL_BYTES:
            raise ProtocolError(f"{num_bytes} bytes at offset {offset} lie on the control page")
        return self[index].span(offset, num_bytes)

    @property
    def cancelled_request(self) -> int:
        """The request that the parent wants given up, 0 for none. Only the parent sets it."""
        return self._words[0]

    @cancelled_request.setter
    def cancelled_request(self, request: int) -> None:
        self._words[0] = request

    @property
    def credit(self) -> int:
        """How many steps of the present run may start. Only the parent sets it, and within a run only higher."""
        return self._words[_CREDIT_WORD]

    @credit.setter
    def credit(self, steps: int) -> None:
        self._words[_CREDIT_WORD] = steps

    def beat(self, rank: int) -> None:
        """Show that `rank` is getting on. Only that rank calls this."""
        word = (1 + rank) * _WORD_STRIDE
        self._words[word] = (self._words[word] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    def beats(self, rank: int) -> int:
        """How often `rank` has called `beat`."""
        return self._words[(1 + rank) * _WORD_STRIDE]

    def show_waiting(self, rank: int, waits: bool) -> None:
        """Say that `rank` goes on only once others have done their part, or that it is getting on again by itself.

        Only that rank calls this.
        """
        self._words[(1 + rank) * _WORD_STRIDE + 1] = waits

    def waits(self, rank: int) -> bool:
        """Whether `rank` said last that it waits for others."""
        return bool(self._words[(1 + rank) * _WORD_STRIDE + 1])

    def show_pulse(self, rank: int) -> None:
        """Show that the process of `rank` runs, whatever it does. Only that rank calls this."""
        word = (1 + rank) * _WORD_STRIDE + 2
        self._words[word] = (self._words[word] + 1) & 0xFFFF_FFFF_FFFF_FFFF

    def pulses(self, rank: int) -> int:
        """How often `rank` has called `show_pulse`; 0 until it has joined the segments."""
        return self._words[(1 + rank) * _WORD_STRIDE + 2]


class Channel:
    """One end of a SOCK_SEQPACKET pair: whole messages, in order, with descriptors beside them.

    A timeout set on the socket holds for `send` and `recv`. Use each end from one thread at a time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(MAX_MESSAGE_BYTES)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, neither inherited by a process started later."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ends[0]), cls(ends[1])

    @classmethod
    def of_descriptor(cls, fd: int) -> Channel:
        """The end of a pair that this process inherited as `fd`."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Raises ProtocolError when the message breaks a limit, and what `send_packet` raises."""
        self.send_packet(encode(message), fds)

    def send_packet(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send an encoded message. Raises OSError when the other end is gone, or does not read within the timeout."""
        if fds:
            sent = socket.send_fds(self._socket, [data], fds, socket.MSG_NOSIGNAL)
        else:
            sent = self._socket.send(data, socket.MSG_NOSIGNAL)
        if sent != len(data):
            raise OSError(f"{sent} of {len(data)} bytes of a packet were sent")

    def recv(self) -> tuple[Message, tuple[int, ...]] | None:
        """The next message and the descriptors beside it, which the caller then owns; None when the other end is gone.

        Raises ProtocolError for anything that is no message (descriptors beside it are closed), TimeoutError.
        """
        try:
            num_bytes, ancillary, flags = self._packet()
        except ConnectionResetError:
            # The other end went before it read all messages of this end. The kernel says so once, before the rest.
            num_bytes, ancillary, flags = self._packet()
        fds = _descriptors(ancillary)
        try:
            if num_bytes == 0:
                _close_all(fds)
                return None
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError(f"a packet over {MAX_MESSAGE_BYTES} bytes or {MAX_DESCRIPTORS} descriptors")
            return decode(bytes(memoryview(self._buffer)[:num_bytes])), fds
        except ProtocolError:
            _close_all(fds)
            raise

    def _packet(self) -> tuple[int, list[tuple[int, int, bytes]], int]:
        """The next packet into the buffer: its length, what came beside it, and the kernel's flags."""
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        num_bytes, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], space, socket.MSG_CMSG_CLOEXEC)
        return num_bytes, ancillary, flags

    def has_message(self) -> bool:
        """Whether `recv` has something to return, a message or the other end's going."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.extend(memoryview(data[: len(data) - len(data) % 4]).cast("i"))
    return tuple(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
