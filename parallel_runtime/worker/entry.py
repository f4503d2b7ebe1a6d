"""The entry of a rank's process: set up, answer one request after another, and report whatever goes wrong.

Owns the order of starting, the request loop and the one broad `except` of the runtime. Does not own what is done at
the start (start.py), what a request does (engine.py) nor what becomes of an error (the parent ends all ranks).

Order of starting: lifeline, HELLO, `import torch`, segment, process group, engine, READY. So a rank never outlives its
parent, not even while it imports, and the parent knows which ranks are there before the slow part.
"""

import argparse
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .. import VERSION
from ..errors import RequestCancelledError, module_of
from ..process import lifeline, nccl_segments
from ..process.signs import start_pulse
from ..wire.channel import Attach, Channel, Segment, SegmentTable
from ..wire.protocol import Message, Op, ProtocolError, TensorSpec
from ..wire.records import from_body, to_body
from ..wire.replies import OPS, Cancelled, Compiling, Hello, Progress, RankError, Ready
from .start import join_ranks, parse, prepare_torch

if TYPE_CHECKING:
    import torch

    from ..wire.requests import AnyRequest

TEXT_CHARS = 1_000
TRACEBACK_CHARS = 7_000  # with TEXT_CHARS, at 12 bytes of JSON for the worst character, inside a message's text limit


class AnyEngine(Protocol):
    """What `--engine` names: made once as `Engine(rank=, device=, segments=)`, then asked one thing at a time.

    A protocol of `Engine` and of the tests' engines, which compute nothing; none is imported before it is named.
    """

    def handle(
        self,
        request: "AnyRequest",
        specs: tuple[TensorSpec, ...],
        *,
        progress: Callable[[Progress | Compiling], None],
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> object:
        """Do what `request` asks, whose tensors lie at `specs`; return the reply that its class names.

        Any exception but RequestCancelledError ends the rank.
        """
        ...


class Worker:
    """One rank: its channel to the parent, its segments and its engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank: int = options.rank
        self.generation: int = options.generation
        self.options = options
        self.channel = Channel.of_descriptor(options.socket)

    def run(self) -> None:
        """Start, then answer until STOP or the parent's end of the channel closes. Raises whatever goes wrong."""
        self.say(0, Hello(pid=os.getpid(), version=VERSION))
        device = prepare_torch(self.options.device, threads=self.options.threads, uuid=self.options.uuid)
        if (first := self.hear()) is None:
            return
        _, segment = attached(*first)
        segments = SegmentTable(segment)
        start_pulse(segments, self.rank)
        join_ranks(self.options, device)
        engine = make_engine(self.options.engine, rank=self.rank, device=device, segments=segments)
        self.say(0, Ready())
        while (received := self.hear()) is not None:
            message, fds = received
            if message.op is Op.ATTACH:
                attach(segments, message, fds)
            else:
                self.say(message.request, self.result_of(engine, segments, message))

    def hear(self) -> tuple[Message, tuple[int, ...]] | None:
        """The next message that is for this rank, None when there is nothing more to do."""
        received = self.channel.recv()
        if received is None or received[0].op is Op.STOP:
            return None
        message, _ = received
        if (message.rank, message.generation) != (self.rank, self.generation):
            raise ProtocolError(f"a message for rank {message.rank} of generation {message.generation} came here")
        return received

    def result_of(self, engine: AnyEngine, segments: SegmentTable, message: Message) -> object:
        """What the engine says to one request. Raises ProtocolError for a body that the request cannot have."""
        try:
            return engine.handle(
                request_of(message.op, message.body),
                message.tensors,
                progress=lambda said: self.say(message.request, said),
                cancelled=lambda: segments.cancelled_request == message.request,
                beat=lambda: segments.beat(self.rank),
            )
        except RequestCancelledError:
            return Cancelled()

    def say(self, request: int, said: object) -> None:
        """Send one message to the parent: what wire/replies.py has."""
        op = OPS.get(type(said), Op.DONE)
        self.channel.send(Message(op, self.rank, self.generation, request, to_body(said)))

    def report(self, error: BaseException) -> None:
        """Tell the parent what went wrong, if it is still there."""
        try:
            self.say(0, rank_error(error))
        except OSError:
            traceback.print_exception(error)


def request_of(op: Op, body: Mapping[str, Any]) -> "AnyRequest":
    """The request that came as `op`. Raises ProtocolError for a field that is unknown, missing or of another type."""
    from ..wire.requests import KINDS  # here: HELLO comes before what these import

    if op not in KINDS:
        raise ProtocolError(f"{op.name} is no request; a rank answers {', '.join(sorted(each.name for each in KINDS))}")
    return from_body(KINDS[op], body, op.name)


def attach(segments: SegmentTable, message: Message, fds: tuple[int, ...]) -> None:
    """Take in a further segment, and drop those that the message says have served."""
    said, segment = attached(message, fds)
    for index in said.drop:
        segments.drop(index)
    segments.add(said.segment, segment)


def attached(message: Message, fds: tuple[int, ...]) -> tuple[Attach, Segment]:
    """What an ATTACH says, and the segment that came with it."""
    if message.op is not Op.ATTACH:
        raise ProtocolError(f"{message.op.name} came before the first segment")
    if len(fds) != 1:
        raise ProtocolError(f"ATTACH came with {len(fds)} descriptors, not 1")
    said = from_body(Attach, message.body, message.op.name)
    return said, Segment.attach(fds[0], said.num_bytes)


def make_engine(name: str, *, rank: int, device: "torch.device", segments: SegmentTable) -> AnyEngine:
    """The engine that `module:Class` names."""
    module, _, attribute = name.partition(":")
    engine: AnyEngine = getattr(importlib.import_module(module), attribute)(rank=rank, device=device, segments=segments)
    return engine


def rank_error(error: BaseException) -> RankError:
    """What the parent is told about `error`."""
    return RankError(
        kind=type(error).__name__,
        text=str(error)[:TEXT_CHARS],
        traceback="".join(traceback.format_exception(error))[-TRACEBACK_CHARS:],
        bases=tuple(each.__name__ for each in type(error).__mro__),
        module=module_of(error)[:TEXT_CHARS],
    )


def main() -> NoReturn:
    """Run one rank and leave the process without unwinding: a collective in flight may never end."""
    options = parse(sys.argv[1:])
    lifeline.arm(options.lifeline, options.parent)
    faulthandler.enable()  # a crash shows where, in what the parent reports
    for fd in (options.lifeline, options.socket, *(() if options.store is None else (options.store,))):
        os.set_inheritable(fd, False)
    with suppress(OSError):  # when memory runs out, the kernel should take a rank, which can be replaced
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    worker = Worker(options)
    status = 0
    try:
        worker.run()
    except BaseException as error:  # noqa: BLE001  the one place: reported, and the process ends
        status = 1
        worker.report(error)
        nccl_segments.remove(nccl_segments.segments_of([os.getpid()]))  # all ranks end now; NCCL would leave them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
