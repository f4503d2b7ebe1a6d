"""What ranks of a machine wrote of a result is told by what lies there, and nothing else is sent."""

import os

import pytest
import torch

from parallel_runtime.machines.results import WrittenResults, is_input
from parallel_runtime.wire.channel import CONTROL_BYTES, Segment, SegmentTable
from parallel_runtime.wire.protocol import Message, Op, ProtocolError, TensorSpec


def table() -> SegmentTable:
    segment, fd = Segment.create(1 << 16)
    os.close(fd)
    return SegmentTable(segment)


def out(name: str = "0.out", dtype: str = "float32", shape: tuple[int, ...] = (2, 8, 4)) -> TensorSpec:
    return TensorSpec(name, dtype, shape, 0, CONTROL_BYTES)


def reply(**body: object) -> Message:
    return Message(Op.DONE, 1, 1, 1, body)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_rows_that_were_written_are_sent_once_whatever_is_in_them(dtype: str) -> None:
    segments, spec = table(), out(dtype=dtype)
    written, size = WrittenResults([spec], segments), getattr(torch, dtype).itemsize
    assert list(written.new_parts(reply())) == []
    room = segments.tensor(spec)
    room[:, 2:5] = torch.tensor([float("nan"), float("inf"), 0.0, -0.0], dtype=room.dtype)
    first, second = (2 * 4, 5 * 4), (32 + 2 * 4, 32 + 5 * 4)
    expected = [(spec, start * size, stop * size) for start, stop in (first, second)]
    assert list(written.new_parts(reply())) == expected
    assert list(written.new_parts(reply())) == []
    room[0, 5] = 1.0  # another rank's, later: what is known already stays here
    assert list(written.new_parts(reply())) == [(spec, 5 * 4 * size, 6 * 4 * size)]


def test_a_preview_that_is_written_again_is_sent_again_from_its_first_to_its_last_change() -> None:
    segments, spec = table(), out("preview.0", shape=(1, 8))
    written, room = WrittenResults([spec], segments), segments.tensor(spec)
    room[0, :6] = 1.0
    assert list(written.new_parts(reply())) == [(spec, 0, 24)]
    room[0, 1], room[0, 3] = 2.0, 3.0
    assert list(written.new_parts(reply())) == [(spec, 4, 16)]


def test_while_a_run_goes_on_only_previews_are_looked_at() -> None:
    segments, preview = table(), out("preview.0", shape=(1, 8))
    result = TensorSpec("out", "float32", (1, 8), 0, CONTROL_BYTES + 64)
    written = WrittenResults([preview, result], segments)
    segments.tensor(preview).fill_(1.0)
    segments.tensor(result).fill_(1.0)
    assert list(written.new_parts(Message(Op.PROGRESS, 1, 1, 1))) == [(preview, 0, 32)]
    assert list(written.new_parts(reply())) == [(result, 0, 32)]


def test_written_elements_are_compared_in_bytes_not_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    found, diff = [], torch.diff

    def noted(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        found.append(diff(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(torch, "diff", noted)
    segments, spec = table(), out()
    written = WrittenResults([spec], segments)
    segments.tensor(spec).fill_(1.0)
    assert list(written.new_parts(reply())) == [(spec, 0, 256)]
    assert [each.dtype for each in found] == [torch.int8]


def test_a_trace_is_sent_as_far_as_its_rank_says() -> None:
    segments, spec = table(), TensorSpec("trace.1", "uint8", (256,), 0, CONTROL_BYTES)
    written = WrittenResults([spec], segments)
    assert list(written.new_parts(reply(ran={"trace_bytes": 100}))) == [(spec, 0, 100)]
    assert list(written.new_parts(reply(ran=None))) == []


def test_a_result_of_integers_is_refused_since_nothing_in_it_is_unwritten() -> None:
    with pytest.raises(ProtocolError, match=r"result 0.out is int32; use one of float64, float32, bfloat16, float16"):
        WrittenResults([out(dtype="int32")], table())


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *(("0.img", True), ("12.t3", True), ("given.0", True), ("w7", True), ("in0", True), ("patch.4", True)),
        *(("0.out", False), ("out", False), ("out3", False), ("preview.1", False), ("trace.7", False)),
        *(("0.outer", True), ("0.previewed", True)),
    ],
)
def test_which_tensors_of_a_request_are_read(name: str, read: bool) -> None:
    assert is_input(TensorSpec(name, "float32", (1,), 0, CONTROL_BYTES)) is read
