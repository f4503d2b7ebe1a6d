"""What comes to a rank's process, from its parent or the agent of torchrun, and what it says of errors."""

import argparse
import json
import os
import socket
import sys
from typing import Any

import pytest

from parallel_runtime.plan import MAX_RANKS
from parallel_runtime.wire.channel import Attach, Channel, Segment
from parallel_runtime.wire.protocol import Message, Op, ProtocolError
from parallel_runtime.wire.records import to_body
from parallel_runtime.wire.replies import RankError
from parallel_runtime.worker import by_torchrun, entry, start

from .test_a_ranks_calls import table


@pytest.mark.parametrize(
    ("number", "printed"), [("8", b"--rank=8 2 True b''"), ("2", b"torchrun's agent numbers this process 2, its comm")]
)
def test_a_rank_that_torchrun_starts_has_its_own_descriptors_alone(
    number: str, printed: bytes, request: pytest.FixtureRequest
) -> None:
    """The seventh of eight ranks here, number 8 of all; in a process of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = [os.pipe() for _ in range(3 * MAX_RANKS)]
    lines = [[f"--rank={number}"] for number in range(2, 2 + MAX_RANKS)]
    socket.send_fds(ours, [json.dumps(lines).encode()], [write for _, write in pipes])

    def main() -> None:
        said = dict(each.split("=") for each in sys.argv[1:])
        more = len(os.listdir("/proc/self/fd")) - before
        os.write(int(said["--socket"]), b"channel")
        os.write(int(said["--lifeline"]), b"lifeline")
        os.write(1, f"--rank={said['--rank']} {more} {os.getpgid(0) == os.getpid()} {os.read(0, 1)!r}".encode())

    if (child := os.fork()) == 0:
        if (measuring := sys.modules.get("measured_process")) is not None:
            measuring.switch(request.node.nodeid)  # of `make coverage`
        try:
            os.dup2(theirs.fileno(), 0)
            before = len(os.listdir("/proc/self/fd"))
            entry.main = main  # type: ignore[assignment]
            os.environ |= {"LOCAL_RANK": "6", "RANK": number}
            by_torchrun.main()
        except ValueError as error:
            os.write(2, str(error).encode())
        finally:
            os._exit(0)
    for each in (theirs.fileno(), *(write for _, write in pipes)):
        os.close(each)
    theirs.detach()
    os.waitpid(child, 0)
    said = [os.read(read, 99) for read, _ in pipes]
    channel, lifeline, output = said[18:21]
    for read, _ in pipes:
        os.close(read)
    ours.close()
    assert not any(said[:18] + said[21:]) and output.startswith(printed)
    assert (channel, lifeline) == ((b"channel", b"lifeline") if number == "8" else (b"", b""))


def test_ranks_wait_for_each_other_as_long_as_the_parent_lets_them() -> None:
    with open(os.memfd_create("store"), "rb") as file:
        found = start._store(argparse.Namespace(meet=None, store=file.fileno(), ranks=2))
        assert found.timeout == start.BACKEND_TIMEOUT


@pytest.fixture
def worker() -> Any:
    """Rank 1 of generation 4, and its parent's end of the channel."""
    made: Any = entry.Worker.__new__(entry.Worker)
    made.rank, made.generation = 1, 4
    made.parent, made.channel = Channel.pair()
    yield made
    made.parent.close()
    made.channel.close()


def test_a_rank_hears_what_is_for_it_until_it_is_told_to_stop_or_its_parent_has_gone(worker: Any) -> None:
    for rank, generation in ((1, 4), (2, 4), (1, 5)):
        worker.parent.send(Message(Op.TRIM, rank, generation, 9, {}))
    assert worker.hear()[0].request == 9
    for rank, generation in ((2, 4), (1, 5)):
        with pytest.raises(ProtocolError, match=f"a message for rank {rank} of generation {generation} came here"):
            worker.hear()
    worker.parent.send(Message(Op.STOP, 1, 4, 0, {}))
    assert worker.hear() is None
    worker.parent.close()
    assert worker.hear() is None


def test_a_rank_tells_its_parent_what_went_wrong_and_prints_it_once_that_has_gone(worker: Any, capsys: Any) -> None:
    worker.report(ValueError("x" * 9000))
    message, _ = worker.parent.recv()
    assert (message.op, message.rank, message.generation, message.request) == (Op.ERROR, 1, 4, 0)
    said = RankError(**message.body)
    assert (said.kind, said.text, said.bases[:2]) == ("ValueError", "x" * entry.TEXT_CHARS, ["ValueError", "Exception"])
    assert said.traceback == f"ValueError: {'x' * 9000}\n"[-entry.TRACEBACK_CHARS :]
    worker.parent.close()
    worker.report(ValueError("nobody hears"))
    assert "ValueError: nobody hears" in capsys.readouterr().err


def test_a_segment_comes_with_one_descriptor_and_takes_the_place_of_those_that_served() -> None:
    segments = table()

    def attach(number: int, *, drop: tuple[int, ...] = (), descriptors: int = 1, op: Op = Op.ATTACH) -> None:
        made = [Segment.create(8192)[1] for _ in range(descriptors)]
        body = {**to_body(Attach(segment=number, num_bytes=8192, drop=())), "drop": list(drop)}
        entry.attach(segments, Message(op, 0, 1, 0, body), tuple(made))

    attach(1)
    attach(2, drop=(1,))
    assert segments.indices == [0, 2]
    with pytest.raises(ProtocolError, match="TRIM came before the first segment"):
        attach(3, op=Op.TRIM)
    for descriptors in (0, 2):
        with pytest.raises(ProtocolError, match=f"ATTACH came with {descriptors} descriptors, not 1"):
            attach(3, descriptors=descriptors)
