"""What passes between ComfyUI's relay and the ranks of another machine, frame by frame, in this process.

Channels and segments are real; the link to the other side is a list of frames. Real machines: test_remote_ranks.py.
"""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.machines import ranks_here, relay
from parallel_runtime.machines.link import (
    BEAT,
    BLOCK_BYTES,
    CLOCK,
    CONTROL,
    HEAD,
    PULSE,
    WAITS,
    Frame,
    FrameKind,
    RelayLink,
    as_bytes,
)
from parallel_runtime.machines.messages import RelayedMachine
from parallel_runtime.machines.ranks_here import RankHere, RanksHere, end_text, exit_code
from parallel_runtime.machines.relay import Towards
from parallel_runtime.process.signs import PASSED_ON_S
from parallel_runtime.wire.channel import CONTROL_BYTES, Channel, Segment
from parallel_runtime.wire.protocol import Message, Op, ProtocolError, TensorSpec, decode, encode

SIZE = 1 << 16
ROOM = CONTROL_BYTES
INPUT, KNOWN = (TensorSpec(f"0.t{number}", "float32", (2,), 0, ROOM + 64 * number) for number in range(2))
RESULT = TensorSpec("0.out", "float32", (4,), 0, ROOM + 128)


class Group:
    """As a group of two processes: what is begun is done once it is waited for."""

    def __init__(self) -> None:
        self.under_way: deque[torch.Tensor] = deque()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: self.under_way.append(tensors[0].clone()))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: tensors[0].copy_(self.under_way.popleft()))


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES - HEAD.size, BLOCK_BYTES - HEAD.size + 1, 3 * BLOCK_BYTES])
def test_a_frame_of_any_length_comes_as_it_was_sent_a_short_one_in_one_message(length: int) -> None:
    group = Group()
    link = RelayLink(group, 1)
    sent = torch.arange(length, dtype=torch.int64).to(torch.uint8)
    for data in (sent, as_bytes(sent)):
        link.send(FrameKind.DATA, data, index=3, offset=1 << 33)
        assert len(group.under_way) == (1 if HEAD.size + length <= BLOCK_BYTES else 2)
        frame = link.receive()
        assert (frame.kind, frame.index, frame.offset, as_bytes(frame.data)) == (
            FrameKind.DATA,
            3,
            1 << 33,
            as_bytes(sent),
        )


def test_what_is_no_frame_is_refused() -> None:
    group = Group()
    link = RelayLink(group, 1)
    link.send(5, b"")  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="a frame of kind 5 and 0 bytes"):
        link.receive()


class Link:
    """The frames that were sent, as bytes, and those to receive, after which the other side is gone."""

    def __init__(self) -> None:
        self.sent = list[tuple[FrameKind, bytes, int, int]]()
        self.to_come = deque[Frame]()

    def send(self, kind: FrameKind, data: Any, *, index: int = 0, offset: int = 0) -> None:
        self.sent.append((kind, data if isinstance(data, bytes) else as_bytes(data), index, offset))

    def receive(self) -> Frame:
        if not self.to_come:
            raise RuntimeError("the other side is gone")
        return self.to_come.popleft()

    def taken(self) -> list[tuple[FrameKind, bytes, int, int]]:
        """What was sent since this was asked last."""
        found, self.sent = self.sent, []
        return found

    def come(self, kind: FrameKind, data: bytes, *, index: int = 0, offset: int = 0) -> None:
        self.to_come.append(Frame(kind, index, offset, torch.frombuffer(bytearray(data), dtype=torch.uint8)))


def message(op: Op, body: Any = None, *, rank: int = 2, request: int = 1, tensors: Any = ()) -> Message:
    return Message(op, rank, 4, request, body or {}, tensors)


def attach(segment: int, *drop: int) -> Message:
    return message(Op.ATTACH, {"segment": segment, "num_bytes": SIZE, "drop": list(drop)}, request=0)


def packet(message: Message) -> tuple[FrameKind, bytes, int, int]:
    return FrameKind.PACKET, encode(message), message.rank - 2, 0


@pytest.fixture
def ends() -> Iterator[list[tuple[Channel, Channel]]]:
    """The channels of ranks 2 and 3: this side's end of each, and the other's."""
    pairs = [Channel.pair() for _ in range(2)]
    yield pairs
    for end in (each for pair in pairs for each in pair):
        end.close()


@pytest.fixture
def here(ends: list[tuple[Channel, Channel]]) -> Any:
    """Both on a machine with a ComfyUI, and each rank's end."""
    output: Any = SimpleNamespace(drain=lambda: False, text=lambda: "printed")
    made: Any = RanksHere(
        [RankHere(rank, ends[rank - 2][0], output) for rank in (2, 3)], Link(), generation=4, comfyui="/c"
    )
    made.ends = [far for _, far in ends]
    return made


def give(here: RanksHere, *messages: Message) -> None:
    """Have them come for the ranks that they name, and pass them on."""
    for each in messages:
        here._link.come(FrameKind.PACKET, encode(each), index=each.rank - 2)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the other side is gone"):
        here.down()


def to_rank_3(each: Message) -> Message:
    return Message(each.op, 3, each.generation, each.request, each.body, each.tensors)


def attached(here: Any, each: Message) -> list[Segment]:
    """Every rank attaches it."""
    give(here, each, to_rank_3(each))
    found = []
    for end in here.ends:
        said, (fd,) = end.recv()
        assert said.body == each.body
        found.append(Segment.attach(fd, SIZE))
    return found


def test_ranks_of_a_machine_share_segments_of_its_own_and_get_what_comes_for_them(here: Any) -> None:
    here._link.come(FrameKind.DATA, b"early", offset=ROOM)  # before there is a segment
    first, second = attached(here, attach(0))
    here._link.come(FrameKind.DATA, b"part", offset=ROOM + 3)
    here._link.come(FrameKind.CONTROL, CONTROL.pack(7, 5))
    give(here, message(Op.TRIM, {"ranks": []}))
    assert bytes(second.span(ROOM, 8).tolist()) == b"\0\0\0part\0" == bytes(first.span(ROOM, 8).tolist())
    assert (here._segments.cancelled_request, here._segments.credit) == (7, 5)
    assert here.ends[0].recv() == (message(Op.TRIM, {"ranks": []}), ())
    attached(here, attach(1))
    attached(here, attach(2, 1))
    assert (here._segments.indices, here._fds) == ([0, 2], {})


def test_a_model_and_a_vae_are_computed_by_the_machines_own_comfyui(here: Any) -> None:
    theirs, ours = {"comfyui": {"path": "/theirs", "x": 1}}, {"comfyui": {"path": "/c", "x": 1}}
    assert here._here(Op.VAE, theirs) == ours
    assert here._here(Op.LOAD, {"spec": theirs, "model": 1}) == {"spec": ours, "model": 1}
    for op, body in ((Op.STEP, theirs), (Op.VAE, {"comfyui": None})):
        assert here._here(op, body) is body
    here._comfyui = ""
    with pytest.raises(ProtocolError, match="ComfyUI's modules are asked for, and this machine has no ComfyUI"):
        here._here(Op.VAE, theirs)


def test_what_ranks_wrote_of_a_result_goes_before_their_answer_and_only_of_the_request_that_runs(here: Any) -> None:
    _, segment = attached(here, attach(0))
    step = message(Op.STEP, {"x": 1}, tensors=(INPUT, RESULT))
    give(here, step, to_rank_3(step))
    assert [end.recv()[0].op for end in here.ends] == [Op.STEP, Op.STEP]
    segment.tensor(RESULT)[1:3] = torch.tensor([1.0, 2.0])
    answers = [message(Op.PROGRESS, {"done": 1}), message(Op.DONE, rank=3, request=9), message(Op.DONE, rank=3)]
    here._link.taken()
    for number, each in enumerate(answers):
        here.ends[each.rank - 2].send(each)
        assert here._hear(each.rank - 2)
        sent = [frame for frame in here._link.taken() if frame[0] is not FrameKind.SIGNS]
        part = (FrameKind.DATA, torch.tensor([1.0, 2.0]).numpy().tobytes(), 0, RESULT.offset + 4)
        assert sent == ([part] if number == 2 else []) + [packet(each)]
    here.ends[1].close()
    assert not here._hear(1)


def test_a_result_goes_in_parts_between_which_its_rank_shows_life(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow link may take longer for it than a rank may be silent."""
    monkeypatch.setattr(ranks_here, "PART_BYTES", 8)
    _, segment = attached(here, attach(0))
    give(here, message(Op.STEP, {"x": 1}, tensors=(RESULT,)))
    here._send_signs()
    segment.tensor(RESULT)[1:] = torch.tensor([1.0, 2.0, 3.0])
    here._link.taken()
    here.ends[0].send(message(Op.DONE))
    assert here._hear(0)
    sent = here._link.taken()
    part, sign, rest, again, answer = sent
    assert (part[1] + rest[1], answer) == (torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes(), packet(message(Op.DONE)))
    assert [(frame[0], frame[3]) for frame in (part, rest)] == [
        (FrameKind.DATA, RESULT.offset + 4),
        (FrameKind.DATA, RESULT.offset + 12),
    ]
    assert [frame[1][CLOCK.size] & BEAT for frame in (sign, again)] == [BEAT, BEAT]


def test_signs_of_life_are_sent_where_something_is_new_and_pulses_now_and_then(
    here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(ranks_here, "time", SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: 9.0))

    def signs() -> bytes | None:
        here._send_signs()
        frames = here._link.taken()
        assert all(kind is FrameKind.SIGNS and data[: CLOCK.size] == CLOCK.pack(9.0) for kind, data, _, _ in frames)
        return frames[0][1][CLOCK.size :] if frames else None

    assert signs() is None, "no rank has segments"
    attached(here, attach(0))
    here._link.taken()
    assert signs() == bytes((0, 0)), "who waits, for the first time"
    assert signs() is None, "none of them has done anything"
    here._segments.beat(3)
    assert signs() == bytes((0, BEAT))
    here._segments.show_pulse(2)
    now_s[0] += PASSED_ON_S - 0.1
    assert signs() is None, "a pulse was passed on a moment ago"
    here._segments.show_waiting(3, True)
    assert signs() == bytes((0, WAITS))
    assert signs() is None
    now_s[0] += 0.1
    assert signs() == bytes((PULSE, WAITS))
    here._segments.show_waiting(3, False)
    assert signs() == bytes((0, 0))
    here._ranks[1].work = SimpleNamespace(gets_on=lambda: True)  # it imports
    now_s[0] += PASSED_ON_S
    assert signs() == bytes((0, PULSE))


def test_a_rank_that_ends_is_told_of_unless_it_was_asked_to_or_has_said_why(here: Any) -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "exit 3"])
    here.ends[0].send(message(Op.HELLO, {"pid": process.pid, "version": "1"}, request=0))
    assert here._hear(0)
    assert (here._ranks[0].pid, here._ranks[0].stopped) == (process.pid, False)
    assert here._link.taken()[-1][0] is FrameKind.PACKET
    here._end(0)
    ((kind, data, index, _),) = here._link.taken()
    said = decode(data)
    assert (kind, index) == (FrameKind.PACKET, 0)
    assert (said.op, said.rank, said.generation, said.request) == (Op.ERROR, 2, 4, 0)
    assert (said.body["kind"], said.body["traceback"]) == ("exited with code 3", "printed")
    assert exit_code(here._ranks[0].pidfd) == 3, "it is looked at and not taken"
    process.wait()
    assert exit_code(here._ranks[0].pidfd) == 0
    here.ends[1].send(message(Op.ERROR, {"kind": "x"}, rank=3, request=0))
    here._hear(1)
    give(here, message(Op.STOP, request=0))
    here._link.taken()
    for index in range(2):
        here._end(index)
    assert here._link.taken() == []
    os.close(here._ranks[0].pidfd)
    here.ends[0].send(message(Op.HELLO, {"pid": process.pid, "version": "1"}, request=0))
    here.ends[0].send(message(Op.ERROR, {"kind": "y"}, rank=2, request=0))
    assert here._hear(0) and here._hear(0), "it ended before it was heard, and has said why"
    assert [decode(data).op for _, data, *_ in here._link.taken()] == [Op.HELLO, Op.ERROR]


def test_what_comes_for_a_rank_that_is_gone_keeps_nobody_from_saying_how_it_ended(
    here: Any,
) -> None:
    here.ends[0].close()
    give(here, attach(0), to_rank_3(attach(0)), message(Op.TRIM, {"ranks": []}), to_rank_3(message(Op.TRIM)))
    assert [here.ends[1].recv()[0].op for _ in range(2)] == [Op.ATTACH, Op.TRIM]
    assert here._fds == {}
    assert not here._hear(0)
    here._end(0)
    ((_, data, _, _),) = (each for each in here._link.taken() if each[0] is FrameKind.PACKET)
    assert decode(data).op is Op.ERROR


def test_of_ranks_that_end_one_after_the_other_the_first_is_told_of_and_none_behind_one_that_has_said_why(
    here: Any,
) -> None:
    for index in (1, 0):  # torchrun's agent ends those that are left
        here._end(index)
    assert [index for _, _, index, _ in here._link.taken()] == [1]
    here._ranks[1].stopped = False
    here.ends[0].send(message(Op.ERROR, {"kind": "x"}, request=0))
    here._hear(0)
    here._link.taken()
    here._end(1)
    assert here._link.taken() == []


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "ended"), (1, "exited with code 1"), (-9, "killed by SIGKILL"), (-63, "killed by signal 63")],
)
def test_how_a_rank_of_a_machine_ended(code: int, text: str) -> None:
    assert end_text(code, 10**9) == text


def test_a_killed_process_has_its_signal_and_one_that_is_not_known_nothing() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "kill -KILL $$"])
    pidfd = os.pidfd_open(process.pid)
    assert (exit_code(pidfd), exit_code(-1)) == (-signal.SIGKILL, 0)
    process.wait()
    os.close(pidfd)


@pytest.fixture
def towards(ends: list[tuple[Channel, Channel]]) -> Any:
    """The machine of ranks 2 and 3 as the relay sees it, with the pool's ends."""
    sockets = tuple(os.dup(near.fileno()) for near, _ in ends)
    made: Any = Towards(RelayedMachine(name="shelf", first_rank=2, sockets=sockets), Link(), generation=4)  # type: ignore[arg-type]
    made.ends = [far for _, far in ends]
    yield made
    for channel in made._channels:
        channel.close()


def share(towards: Any, segment: int, *drop: int) -> Segment:
    """The pool attaches a segment on both ranks, which come through the relay."""
    made, fd = Segment.create(SIZE)
    towards._pass_on(0, attach(segment, *drop), (os.dup(fd),))
    towards._pass_on(1, to_rank_3(attach(segment, *drop)), (fd,))
    assert towards.link.taken() == [packet(attach(segment, *drop)), packet(to_rank_3(attach(segment, *drop)))]
    return made


def test_a_requests_inputs_go_once_before_it_but_those_that_lie_there(towards: Any) -> None:
    segment = share(towards, 0)
    segment.tensor(INPUT).copy_(torch.tensor([1.0, 2.0]))
    segment.words()[0], towards._segments.credit = 3, 5
    step = message(Op.STEP, {"repeated": {KNOWN.name: 1}}, tensors=(INPUT, KNOWN, RESULT))
    towards._pass_on(0, step, ())
    words = (FrameKind.CONTROL, CONTROL.pack(3, 5), 0, 0)
    given = (FrameKind.DATA, torch.tensor([1.0, 2.0]).numpy().tobytes(), 0, INPUT.offset)
    assert towards.link.taken() == [words, given, packet(step)]
    towards._pass_on(1, to_rank_3(step), ())
    assert (towards.link.taken(), towards._owing) == ([packet(to_rank_3(step))], {0, 1})
    towards._pass_words()
    assert towards.link.taken() == []
    share(towards, 1)
    share(towards, 2, 1)
    assert towards._segments.indices == [0, 2]


def test_an_input_goes_in_parts_each_of_which_shows_life_of_the_rank_that_waits(
    towards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "PART_BYTES", 5)
    segment = share(towards, 0)
    segment.tensor(INPUT).copy_(torch.tensor([1.0, 2.0]))
    towards._pass_on(1, message(Op.STEP, rank=3, tensors=(INPUT,)), ())
    parts = [frame for frame in towards.link.taken() if frame[0] is FrameKind.DATA]
    assert [(len(data), at - INPUT.offset) for _, data, _, at in parts] == [(5, 0), (3, 5)]
    assert b"".join(data for _, data, _, _ in parts) == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert [towards._segments.beats(rank) for rank in (2, 3)] == [0, 2]


def test_a_rank_that_is_asked_as_soon_as_it_has_answered_owes_the_next_answer(towards: Any) -> None:
    """Or the words of the control page go no further in that request, and a run waits for credit."""
    (channel, *_), asked = towards._channels, message(Op.TRIM, {"ranks": []}, request=2)
    towards._channels[0] = SimpleNamespace(send_packet=lambda _: towards._pass_on(0, asked, ()), close=channel.close)
    towards._owing.add(0)
    towards.link.come(FrameKind.PACKET, encode(message(Op.DONE, {"x": 1})), index=0)
    towards._stopped = True
    towards.up()
    assert towards._owing == {0}


def test_what_the_pool_says_is_passed_on_until_it_closes_its_channels(towards: Any) -> None:
    towards._pass_words()  # without a segment there are none
    towards.ends[1].send(message(Op.TRIM, {"ranks": []}, rank=3))
    towards.ends[0].send(message(Op.STOP, request=0))
    for end in towards.ends:
        end.close()
    towards._owing.add(0)  # or nothing is looked at until somebody speaks
    towards.down()
    assert sorted(towards.link.taken()) == sorted(
        [packet(message(Op.STOP, request=0)), packet(message(Op.TRIM, {"ranks": []}, rank=3))]
    )
    assert (towards._stopped, towards._owing) == (True, {0, 1})


def test_answers_go_to_the_pool_in_its_time_and_a_machine_that_is_gone_is_told_of(
    towards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "time", SimpleNamespace(perf_counter=lambda: 1005.0))
    share(towards, 0)
    towards._owing = {0, 1}
    ran = message(Op.DONE, {"ran": {"began_s": 2.0}}, rank=3)
    towards.link.come(FrameKind.PACKET, encode(ran), index=1)
    for there_s in (5.0, 10.0, 0.0):  # the quickest says most of their clock
        towards.link.come(FrameKind.SIGNS, CLOCK.pack(there_s) + bytes((BEAT, WAITS)))
    towards.link.come(FrameKind.PACKET, encode(message(Op.PROGRESS, {"ran": 1})), index=0)
    towards.link.come(FrameKind.PACKET, encode(ran), index=1)
    towards.link.come(FrameKind.PACKET, encode(message(Op.DONE, {"x": 1})), index=0)
    towards.up()
    assert [towards.ends[1].recv()[0] for _ in range(2)] == [ran, message(Op.DONE, {"ran": {"began_s": 997.0}}, rank=3)]
    said = [towards.ends[0].recv()[0] for _ in range(3)]
    assert said[:2] == [message(Op.PROGRESS, {"ran": 1}), message(Op.DONE, {"x": 1})]
    assert (said[2].op, said[2].rank, said[2].generation, said[2].request) == (Op.ERROR, 2, 4, 0)
    assert said[2].body["kind"] == "machine shelf does not answer" and said[2].body["text"] == "the other side is gone"
    assert towards.ends[1].has_message(), "it is told of each of its ranks"
    assert towards.ends[1].recv()[0] == message(Op.ERROR, said[2].body, rank=3, request=0)
    assert towards._owing == set()
    assert [towards._segments.beats(2), towards._segments.waits(3)] == [3, True]
    towards._stopped = True
    towards.up()
    assert not towards.ends[0].has_message()
