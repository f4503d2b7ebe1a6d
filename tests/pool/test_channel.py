"""Sockets and shared memory between parent and ranks: bounds, seals, descriptors, lifetimes."""

import fcntl
import gc
import os
import re
import socket
import stat
import subprocess
from pathlib import Path

import pytest
import torch
from descriptors import open_descriptors

from parallel_runtime import kernel_calls
from parallel_runtime.kernel_calls import pidfd_open
from parallel_runtime.plan import MAX_RANKS
from parallel_runtime.wire.channel import CONTROL_BYTES, Channel, Segment, SegmentTable
from parallel_runtime.wire.protocol import (
    DTYPE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    Message,
    Op,
    ProtocolError,
    TensorSpec,
)

ROOT = Path(__file__).resolve().parents[2]
HELLO = Message(Op.HELLO, 1, 2, 3, {"pid": 4})


@pytest.fixture
def pair():
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def segment():
    made, fd = Segment.create(1 << 16)
    os.close(fd)
    return made


def test_a_message_and_its_descriptors_arrive_and_are_not_inherited(pair):
    ours, theirs = pair
    made, fd = Segment.create(1 << 16)
    ours.send(HELLO, (fd,))
    os.close(fd)
    message, fds = theirs.recv()
    assert message == HELLO
    assert not os.get_inheritable(fds[0]), "programs that the rank starts have it not"
    shared = Segment.attach(fds[0], 1 << 16)
    spec = TensorSpec("x", "float32", (4,), 0, CONTROL_BYTES)
    made.tensor(spec).copy_(torch.arange(4.0))
    assert shared.tensor(spec).tolist() == [0, 1, 2, 3]


def test_the_largest_message_fits_a_packet(pair):
    ours, theirs = pair
    specs = tuple(TensorSpec(f"t{index}", "int8", (1,), 0, 0) for index in range(MAX_TENSORS))
    message = Message(Op.STEP, 0, 0, 0, {"a": "x" * (MAX_TEXT_BYTES - len('{"a":""}'))}, specs)
    ours.send(message)
    assert theirs.recv() == (message, ())


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("last", [None, Message(Op.ERROR, 1, 2, 3, {"text": "why"})], ids=["silent", "said why"])
def test_what_an_end_said_last_is_heard_and_then_none_though_it_left_messages_unread(pair, unread, last):
    """A rank that fails at once: it has not looked at what it was sent, and its own words must not be lost."""
    ours, theirs = pair
    if unread:
        ours.send(HELLO)
    if last:
        theirs.send(last)
    theirs.close()
    assert ours.recv() == ((last, ()) if last else None)
    assert ours.recv() is None
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(HELLO)


@pytest.mark.parametrize(
    ("packet", "sent", "said"),
    [
        (b"x", 3, "1 bytes"),
        (b"x" * 200, 3, "magic"),
        (bytes(MAX_MESSAGE_BYTES + 1), 3, "packet over"),
        (b"x", 64, "over .* desc"),
        (b"x", 5, "over .* 4 desc"),
    ],
    ids=["short", "no header", "too long", "many more descriptors than a message may carry", "one more"],
)
def test_a_packet_that_is_no_message_is_refused_without_leaking_its_descriptors(packet, sent, said):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(theirs)
    gc.collect()  # of tests before this one
    before = open_descriptors()
    socket.send_fds(ours, [packet], [0] * sent)
    with pytest.raises(ProtocolError, match=said):
        channel.recv()
    assert not open_descriptors() - before
    ours.close()
    channel.close()


def test_a_segment_is_private_and_cannot_shrink_grow_or_be_unsealed():
    _, fd = Segment.create(1 << 16)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    assert not os.get_inheritable(fd)
    for size in (0, 1 << 17):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


LATER = {  # which a Python that was built for an older C library than the system's has not, such as those of uv
    os: ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open", "P_PIDFD"),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW"),
}


def test_a_python_that_was_built_for_an_older_c_library_has_memfds_and_pidfds(monkeypatch):
    for module, names in LATER.items():
        for name in names:
            monkeypatch.delattr(module, name, raising=False)
    made, fd = Segment.create(1 << 16)
    Segment.attach(os.dup(fd), 1 << 16).words()[1] = 7
    assert made.words()[1] == 7
    for each in (fd, pidfd_open(os.getpid())):
        assert not os.get_inheritable(each)
        os.close(each)
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        pidfd_open(child.pid)


def test_where_standard_input_is_closed_the_first_descriptor_is_0() -> None:
    for returned in (0, 1):
        assert kernel_calls._descriptor(returned) == returned
    with pytest.raises(OSError):
        kernel_calls._descriptor(-1)


def test_no_other_code_names_what_such_a_python_has_not():
    names = re.compile("|".join(rf"{module.__name__}\.{name}\b" for module in LATER for name in LATER[module]))
    sources = [each for folder in ("parallel_runtime", "nodes") for each in (ROOT / folder).rglob("*.py")]
    assert [each for each in sources if names.search(each.read_text("utf-8"))] == []


def test_a_descriptor_that_is_no_sealed_segment_of_the_announced_size_is_refused(tmp_path):
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 16)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    _, smaller = Segment.create(1 << 15)
    for fd in (unsealed, plain, smaller):
        with pytest.raises(ProtocolError):
            Segment.attach(fd, 1 << 16)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("num_bytes", [0, CONTROL_BYTES - 1, 1 << 41])
def test_a_segment_of_no_sensible_size_is_refused(num_bytes):
    with pytest.raises(ValueError, match="a segment of"):
        Segment.create(num_bytes)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_has_the_size_that_the_layout_says(dtype, segment):
    view = segment.tensor(TensorSpec("x", dtype, (3, 5), 0, CONTROL_BYTES))
    assert view.dtype == getattr(torch, dtype)
    assert view.shape == (3, 5)
    assert view.element_size() == DTYPE_BYTES[dtype]


def test_a_tensor_ends_inside_its_segment(segment):
    room = segment.num_bytes - CONTROL_BYTES
    assert segment.tensor(TensorSpec("x", "uint8", (room,), 0, CONTROL_BYTES)).numel() == room
    with pytest.raises(ProtocolError, match="of a segment of 65536"):
        segment.tensor(TensorSpec("x", "uint8", (room + 1,), 0, CONTROL_BYTES))


def test_the_control_page_holds_no_tensor(segment):
    table = SegmentTable(segment)
    with pytest.raises(ProtocolError, match="control page"):
        table.tensor(TensorSpec("x", "uint8", (1,), 0, CONTROL_BYTES - 64))
    with pytest.raises(ProtocolError, match="1 bytes at offset 0 lie on the control page"):
        table.span(0, 0, 1)
    other, fd = Segment.create(1 << 16)
    os.close(fd)
    table.add(1, other)
    for index, start in ((0, CONTROL_BYTES), (1, 0)):
        table.span(index, start, 4)[1:3] = 7
        assert table[index].tensor(TensorSpec("x", "uint8", (4,), index, start)).tolist() == [0, 7, 7, 0]
        assert table.span(index, 1 << 16, 0).shape == (0,)
        with pytest.raises(ProtocolError, match="bytes 65536 to 65537 of a segment of 65536"):
            table.span(index, 1 << 16, 1)


def test_cancel_word_and_heartbeats_do_not_touch_each_other_or_the_tensors(segment):
    table = SegmentTable(segment)
    table.cancelled_request = 2**64 - 1
    for rank in range(MAX_RANKS):
        for _ in range(rank + 1):
            table.beat(rank)
        table.show_waiting(rank, True)
        table.show_pulse(rank)
    assert [table.beats(rank) for rank in range(MAX_RANKS)] == list(range(1, MAX_RANKS + 1))
    assert [table.pulses(rank) for rank in range(MAX_RANKS)] == [1] * MAX_RANKS
    assert table.cancelled_request == 2**64 - 1
    rest = segment.num_bytes - CONTROL_BYTES
    assert not table.tensor(TensorSpec("x", "uint8", (rest,), 0, CONTROL_BYTES)).any()


def test_a_view_outlives_its_segment_and_the_memory_goes_with_the_last_view():
    gc.collect()  # of tests before this one
    before = open_descriptors()
    made, fd = Segment.create(1 << 16)
    os.close(fd)
    table = SegmentTable(made)
    further, fd = Segment.create(1 << 16)
    os.close(fd)
    table.add(1, further)
    view = table.tensor(TensorSpec("x", "float32", (4,), 1, 0))
    view.fill_(7)
    table.drop(1)
    del made, further, table
    gc.collect()
    assert view.tolist() == [7, 7, 7, 7]
    del view
    assert not open_descriptors() - before


def test_a_table_knows_only_what_was_attached(segment):
    table = SegmentTable(segment)
    with pytest.raises(ProtocolError, match="segment 1 is not attached"):
        table.tensor(TensorSpec("x", "uint8", (1,), 1, 0))
    with pytest.raises(ProtocolError, match="cannot be dropped"):
        table.drop(0)
    with pytest.raises(ProtocolError, match="attached already"):
        table.add(0, segment)
