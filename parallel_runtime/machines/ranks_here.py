"""The ranks of this machine in one generation, as its launcher has them: channels, segments, and the link to ComfyUI.

Owns what relay.py owns on the other side: each message to its rank, segments of the same sizes here, the words of the
control page; back, what ranks say, the parts of results that they wrote, their signs of life and how they ended. Does
not own how their processes start (launch.py).
"""

import math
import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..kernel_calls import P_PIDFD, pidfd_open
from ..process.signs import PASSED_ON_S, Output, ProcessWork, killed_by, memory_kills
from ..wire.channel import Attach, Channel, Segment, SegmentTable
from ..wire.protocol import Message, Op, ProtocolError, decode, encode
from ..wire.records import from_body, to_body
from ..wire.replies import Hello, RankError
from .link import BEAT, CLOCK, CONTROL, PART_BYTES, PULSE, WAITS, FrameKind, RelayLink, as_bytes
from .results import WrittenResults

SIGNS_S = 0.05  # how often signs of life are sent while a request runs
END_S = 2.0  # how long a process may take to end once its channel is closed


@dataclass
class RankHere:
    """One rank: its number, its channel's near end, what it prints. `pid`, `pidfd`, `work` once it has said HELLO.

    `stopped`: it was asked to end, has said why it ends, or how it ended was said.
    """

    rank: int
    channel: Channel
    output: Output
    pid: int = 0
    pidfd: int = -1
    work: ProcessWork | None = None
    stopped: bool = False
    kills_before: int = field(default_factory=memory_kills)


class RanksHere:
    """All ranks of this machine. `down` and `up` run in a thread each. `dismissed`: ranks were asked to end."""

    dismissed = False

    def __init__(self, ranks: Sequence[RankHere], link: RelayLink, *, generation: int, comfyui: str) -> None:
        self._ranks, self._link, self._generation, self._comfyui = list(ranks), link, generation, comfyui
        self._segments: SegmentTable | None = None
        self._fds: dict[int, int] = {}  # of the segments, for ranks that have not got them yet
        self._request = 0
        self._results: WrittenResults | None = None
        self._results_lock = threading.Lock()
        self._beats, self._pulses, self._signs = [0] * len(ranks), [0] * len(ranks), b""
        self._pulse_s = -math.inf  # when a pulse was passed on last

    def down(self) -> None:
        """Give ranks what comes for them. Raises RuntimeError when ComfyUI's side is gone."""
        while True:
            frame = self._link.receive()
            if frame.kind is FrameKind.PACKET:
                self._give(self._ranks[frame.index], frame.index, decode(as_bytes(frame.data)))
            elif self._segments is None:
                continue
            elif frame.kind is FrameKind.DATA:
                self._segments.span(frame.index, frame.offset, frame.data.numel()).copy_(frame.data)
            elif frame.kind is FrameKind.CONTROL:
                cancelled, credit = CONTROL.unpack(as_bytes(frame.data))
                self._segments.credit = credit  # first, as the pool does
                self._segments.cancelled_request = cancelled

    def _give(self, rank: RankHere, index: int, message: Message) -> None:
        if message.op is Op.ATTACH:
            self._attach(rank, index, message)
            return
        if message.op is Op.STOP:
            rank.stopped = self.dismissed = True
        elif message.request != self._request and self._segments is not None:
            with self._results_lock:
                self._request = message.request
                self._results = WrittenResults(message.tensors, self._segments)
        here = replace(message, body=self._here(message.op, message.body))
        with suppress(ConnectionError):  # it is gone: `up` says how it ended, once it has
            rank.channel.send(here)

    def _here(self, op: Op, body: dict[str, Any]) -> dict[str, Any]:
        """What is asked, of a model or a VAE with the ComfyUI of this machine."""
        if op is Op.LOAD:
            return {**body, "spec": self._here(Op.VAE, body["spec"])}
        if op is Op.VAE and body.get("comfyui"):
            if not self._comfyui:  # a folder that ComfyUI's side names is never imported from here
                raise ProtocolError("ComfyUI's modules are asked for, and this machine has no ComfyUI")
            return {**body, "comfyui": {**body["comfyui"], "path": self._comfyui}}
        return body

    def _attach(self, rank: RankHere, index: int, message: Message) -> None:
        said = from_body(Attach, message.body, message.op.name)
        if index == 0:  # the machine's first rank; the others get what is made here
            segment, self._fds[said.segment] = Segment.create(said.num_bytes)
            if self._segments is None:
                self._segments = SegmentTable(segment)
            else:
                for each in said.drop:
                    self._segments.drop(each)
                self._segments.add(said.segment, segment)
        with suppress(ConnectionError):  # it is gone
            rank.channel.send(message, (self._fds[said.segment],))
        if index == len(self._ranks) - 1:
            os.close(self._fds.pop(said.segment))

    def up(self) -> None:
        """Pass on what ranks say, until all have ended."""
        by_fd = {rank.channel.fileno(): index for index, rank in enumerate(self._ranks)}
        outputs = {rank.output.fileno(): rank.output for rank in self._ranks}
        with select.epoll() as epoll:
            for fd in (*by_fd, *outputs):
                epoll.register(fd, select.EPOLLIN)
            while by_fd:
                ready = [fd for fd, _ in epoll.poll(SIGNS_S)]
                self._send_signs()
                for fd in ready:
                    if fd in outputs:
                        if not outputs[fd].drain():
                            epoll.unregister(outputs.pop(fd).fileno())
                    elif not self._hear(by_fd[fd]):
                        epoll.unregister(fd)
                        self._end(by_fd.pop(fd))

    def _hear(self, index: int) -> bool:
        """Pass on one message of a rank; False when there is nothing more to come."""
        rank = self._ranks[index]
        received = rank.channel.recv()
        if received is None:
            return False
        message, _ = received
        if message.op is Op.HELLO:
            rank.pid = from_body(Hello, message.body, message.op.name).pid
            with suppress(ProcessLookupError):  # it has ended; what it said of that follows
                rank.pidfd = pidfd_open(rank.pid)
            rank.work = ProcessWork(rank.pid)
        if message.op is Op.ERROR:
            rank.stopped = True  # it has said why it ends
        with self._results_lock:
            self._send_results(index, message)
        self._send_signs()
        self._link.send(FrameKind.PACKET, encode(message), index=index)
        return True

    def _send_results(self, index: int, message: Message) -> None:
        """Pass on what was written of the results of the request that runs. A rank gets on while its answer waits."""
        if self._results is None or self._segments is None or message.request != self._request:
            return
        for spec, start, stop in self._results.new_parts(message):
            for at in range(start, stop, PART_BYTES):
                part = self._segments.span(spec.segment, spec.offset + at, min(PART_BYTES, stop - at))
                self._link.send(FrameKind.DATA, part, index=spec.segment, offset=spec.offset + at)
                self._beats[index] = -1  # which is none that it ever shows
                self._send_signs()

    def _send_signs(self) -> None:
        """Which ranks beat since the last signs, which wait, and at times which run. Nothing where nothing is new."""
        if self._segments is None:
            return
        signs, now_s = [], time.monotonic()
        with_pulse = now_s >= self._pulse_s + PASSED_ON_S
        for index, rank in enumerate(self._ranks):
            beats = self._segments.beats(rank.rank)
            signs.append(BEAT * (beats != self._beats[index]) + WAITS * self._segments.waits(rank.rank))
            self._beats[index] = beats
        lasting = bytes(sign & WAITS for sign in signs)
        if with_pulse:
            signs = [sign | PULSE * self._runs(index) for index, sign in enumerate(signs)]
        if lasting != self._signs or any(sign & (BEAT | PULSE) for sign in signs):
            self._signs = lasting
            self._pulse_s = now_s if with_pulse else self._pulse_s
            self._link.send(FrameKind.SIGNS, CLOCK.pack(time.perf_counter()) + bytes(signs))

    def _runs(self, index: int) -> bool:
        """Whether a rank has shown its pulse since this was asked last. Before its first one, its work tells."""
        rank, before = self._ranks[index], self._pulses[index]
        self._pulses[index] = pulses = self._segments.pulses(rank.rank) if self._segments is not None else 0
        return pulses != before or (pulses == 0 and rank.work is not None and rank.work.gets_on())

    def _end(self, index: int) -> None:
        """A rank has closed its channel: say how it ended, unless it was asked to or has said why.

        Of several the first alone: torchrun's agent ends the others then, and the pool may look at all of them at once.
        """
        rank = self._ranks[index]
        code = exit_code(rank.pidfd)
        rank.output.drain()
        if not any(each.stopped for each in self._ranks):
            rank.stopped = True
            said = RankError(kind=end_text(code, rank.kills_before), text="", traceback=rank.output.text())
            message = Message(Op.ERROR, rank.rank, self._generation, 0, to_body(said))
            self._link.send(FrameKind.PACKET, encode(message), index=index)


def exit_code(pidfd: int) -> int:
    """The exit code of a child that ends now, negative for a signal; 0 where another part of the process reaped it.

    It is looked at and not taken: torchrun's agent waits for its children.
    """
    if pidfd < 0:
        return 0
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll(1000 * END_S)
    try:
        found = os.waitid(P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return 0
    if found is None:
        return 0
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def end_text(code: int, kills_before: int) -> str:
    """ "killed by SIGKILL", "exited with code 1"; "ended" where the cause is not known. `kills_before` as `killed_by`
    takes it."""
    if code < 0:
        return killed_by(-code, kills_before=kills_before)
    return f"exited with code {code}" if code else "ended"
