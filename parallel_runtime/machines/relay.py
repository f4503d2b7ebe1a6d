"""The process on ComfyUI's machine that stands for the ranks of further machines: the pool's messages pass through.

`python -m parallel_runtime.machines.relay ...`, started by the pool (pool/remote_ranks.py). For each of those ranks it
has the far end of a channel like any other, and it maps the shared segments. Towards each machine it has a link
(link.py) to the launcher there, which gives its ranks the same channels and segments of its own::

    pool -- channel, segments -- relay ==== gloo ==== launcher -- channel, segments -- rank

Owns the store at which all ranks meet, and passing on: each message to its rank; before the first of a request, the
data of its inputs, once a machine, without what lies there since the last one; the cancel and credit words; back, the
messages, the parts of results that the machine's ranks wrote, and their signs of life. Decides nothing, and ends with
the pool (process/lifeline.py) or when every machine's launcher has ended.
"""

import argparse
import json
import math
import os
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist

from ..wire.channel import Attach, Channel, Segment, SegmentTable
from ..wire.protocol import Message, Op, ProtocolError, TensorSpec, decode, encode
from ..wire.records import from_body, to_body
from ..wire.replies import ChunkSpan, RankError
from .connection import split_address
from .fatal import run_process, thread
from .link import (
    BEAT,
    CLOCK,
    CONTROL,
    PART_BYTES,
    PATIENCE,
    PULSE,
    RUN,
    WAITS,
    Frame,
    FrameKind,
    RelayLink,
    as_bytes,
    join_relays,
)
from .messages import RelayedMachine
from .results import is_input

CONTROL_S = 0.003  # how often the control page is looked at while a request runs
ANSWERED = frozenset((Op.READY, Op.DONE, Op.CANCELLED, Op.ERROR))
OP_BYTE = 5  # of a message's header
SPAN_MOMENTS = ChunkSpan._fields.index("asked_s")  # and what follows
TEXT_CHARS = 300


class Towards:
    """One machine as the relay sees it: a link, and the channels of its ranks. Two threads, one each way."""

    def __init__(self, machine: RelayedMachine, link: RelayLink, *, generation: int) -> None:
        self.machine, self.link, self.generation = machine, link, generation
        self._channels = [Channel.of_descriptor(fd) for fd in machine.sockets]
        self._segments: SegmentTable | None = None
        self._request = 0
        self._owing: set[int] = set()  # ranks that have been asked and have not answered
        self._words = (0, 0)
        self._behind_s = math.inf
        self._stopped = False  # the pool has asked its ranks to end

    def down(self) -> None:
        """Pass on what the pool says, until it closes the channels or the machine's launcher ends."""
        try:
            self._pass_down()
        except RuntimeError as error:
            self._tell_lost(error)

    def _pass_down(self) -> None:
        waiting = {channel.fileno(): index for index, channel in enumerate(self._channels)}
        with select.epoll() as epoll:
            for fd in waiting:
                epoll.register(fd, select.EPOLLIN)
            while waiting:
                ready = sorted(waiting[fd] for fd, _ in epoll.poll(CONTROL_S if self._owing else None))
                self._pass_words()
                for index in ready:
                    received = self._channels[index].recv()
                    if received is None:
                        epoll.unregister(self._channels[index])
                        del waiting[self._channels[index].fileno()]
                    else:
                        self._pass_on(index, *received)

    def _pass_words(self) -> None:
        """The control page's words. A rank that sees the cancel word must see the last credit: it is read after it."""
        if self._segments is None:
            return
        cancelled = self._segments.cancelled_request
        words = (cancelled, self._segments.credit)
        if words != self._words:
            self._words = words
            self.link.send(FrameKind.CONTROL, CONTROL.pack(*words))

    def _pass_on(self, index: int, message: Message, fds: tuple[int, ...]) -> None:
        if message.op is Op.ATTACH:
            self._attach(index, message, fds)
        elif message.op is Op.STOP:
            self._stopped = True
        else:
            if message.request != self._request:
                self._request = message.request
                self._pass_words()  # of a run, the credit that it starts with
                for spec in message.tensors:
                    if is_input(spec) and spec.name not in message.body.get("repeated", {}):
                        self._send_tensor(index, spec)
            self._owing.add(index)
        self.link.send(FrameKind.PACKET, encode(message), index=index)

    def _attach(self, index: int, message: Message, fds: tuple[int, ...]) -> None:
        said = from_body(Attach, message.body, message.op.name)
        if index:
            os.close(fds[0])  # the first rank's channel brought it
        elif self._segments is None:
            self._segments = SegmentTable(Segment.attach(fds[0], said.num_bytes))
        else:
            for each in said.drop:
                self._segments.drop(each)
            self._segments.add(said.segment, Segment.attach(fds[0], said.num_bytes))

    def _send_tensor(self, index: int, spec: TensorSpec) -> None:
        """Send an input. Its rank waits for it and has nothing to show meanwhile, so each part is a sign of life."""
        if self._segments is None:
            return
        for at in range(spec.offset, end := spec.offset + spec.num_bytes, PART_BYTES):
            data = self._segments.span(spec.segment, at, min(PART_BYTES, end - at))
            self.link.send(FrameKind.DATA, data, index=spec.segment, offset=at)
            self._segments.beat(self.machine.first_rank + index)

    def up(self) -> None:
        """Pass on what the machine's ranks say, until its launcher ends."""
        while True:
            try:
                frame = self.link.receive()
            except RuntimeError as error:
                self._tell_lost(error)
                return
            if frame.kind is FrameKind.PACKET:
                packet = self._in_our_time(as_bytes(frame.data))
                if packet[OP_BYTE] in ANSWERED:  # said before it is passed on: the pool may ask again at once
                    self._owing.discard(frame.index)
                self._channels[frame.index].send_packet(packet)
            elif self._segments is not None:
                first, ranks = self.machine.first_rank, len(self._channels)
                behind_s = take(frame, self._segments, first_rank=first, num_ranks=ranks)
                self._behind_s = min(self._behind_s, behind_s)

    def _in_our_time(self, packet: bytes) -> bytes:
        """A reply whose moments are on our monotonic clock: theirs is behind ours by what the quickest signs showed."""
        if packet[OP_BYTE] != Op.DONE or math.isinf(self._behind_s):
            return packet
        message = decode(packet)
        ran = message.body.get("ran")
        return packet if not ran else encode(replace(message, body={**message.body, "ran": later(ran, self._behind_s)}))

    def _tell_lost(self, error: RuntimeError) -> None:
        """Say to the pool that this machine's ranks answer no more, unless it has asked them to end.

        Of each rank: one of which nothing was said would be blamed for the end of this process, which follows.
        """
        if self._stopped:
            return
        said = RankError(
            kind=f"machine {self.machine.name} does not answer", text=str(error)[:TEXT_CHARS], traceback=""
        )
        for rank, channel in enumerate(self._channels, start=self.machine.first_rank):
            with suppress(OSError):
                channel.send(Message(Op.ERROR, rank, self.generation, 0, to_body(said)))


def take(frame: Frame, segments: SegmentTable, *, first_rank: int, num_ranks: int) -> float:
    """Put what a machine sends into the shared segments: parts of results, or signs of life of its `num_ranks` ranks.

    Returns how many seconds its clock is behind ours, with the way here; infinity where the frame has no time.
    """
    if frame.kind is FrameKind.DATA:
        segments.span(frame.index, frame.offset, frame.data.numel()).copy_(frame.data)
    elif frame.kind is FrameKind.SIGNS:
        data = as_bytes(frame.data)
        (there_s,) = CLOCK.unpack_from(data)
        for rank, sign in enumerate(data[CLOCK.size : CLOCK.size + num_ranks], start=first_rank):
            if sign & BEAT:
                segments.beat(rank)
            if sign & PULSE:
                segments.show_pulse(rank)
            segments.show_waiting(rank, bool(sign & WAITS))
        return time.perf_counter() - there_s
    else:
        raise ProtocolError(f"a machine sent {frame.kind.name}, which is not its to send")
    return math.inf


def later(ran: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What a rank ran, in JSON's values, so much later: fields of `RankStep` and `RankRun` that are moments."""
    moved, began = dict(ran), ran.get("began_s")
    if began is not None:
        moved["began_s"] = [each + seconds for each in began] if isinstance(began, list) else began + seconds
    if ran.get("timeline"):
        spans = [
            [*span[:SPAN_MOMENTS], *(each + seconds for each in span[SPAN_MOMENTS:])]
            for span in ran["timeline"]["spans"]
        ]
        moved["timeline"] = {**ran["timeline"], "spans": spans}
    return moved


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line that pool/remote_ranks.py writes."""
    parser = argparse.ArgumentParser(prog="parallel_runtime.machines.relay", description="Started by the pool.")
    for name in ("generation", "ranks", "parent", "lifeline", "listen"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--meet", required=True, help="HOST:PORT of the socket --listen")
    parser.add_argument("--machines", required=True, help="RelayedMachines as JSON")
    return parser.parse_args(arguments)


def serve(options: argparse.Namespace) -> None:
    """Have the store, wait for all launchers, and pass on until the last of them has ended."""
    machines = [from_body(RelayedMachine, each, "machine") for each in json.loads(options.machines)]
    host, port = split_address(options.meet)
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=PATIENCE,
        master_listen_fd=options.listen,
    )
    for place, machine in enumerate(machines, start=1):
        assign_ranks(store, place, machine.first_rank, world_size=options.ranks)
    group = join_relays(store, place=0, machines=1 + len(machines))
    towards = [
        Towards(machine, RelayLink(group, place), generation=options.generation)
        for place, machine in enumerate(machines, start=1)
    ]
    for each in towards:
        thread(each.down)
    for up in [thread(each.up) for each in towards]:
        up.join()


def assign_ranks(store: dist.Store, place: int, first_rank: int, *, world_size: int) -> None:
    """Answer in the store what torchrun's agent of a machine asks the agent of the first one: which ranks are its."""
    key = f"torchelastic/assigned_ranks/{place}"
    dist.PrefixStore(RUN, store).set(key, json.dumps([first_rank, world_size, first_rank, world_size]))


def main() -> NoReturn:
    """Pass on until there is no machine left to pass on to."""
    options = parse(sys.argv[1:])
    run_process(lambda: serve(options), lifeline_fd=options.lifeline, parent_pid=options.parent)


if __name__ == "__main__":
    main()
