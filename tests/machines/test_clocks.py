"""Moments that a rank tells are on its machine's clock; the pool gets them on ours."""

import json
import math
import os
import time
from typing import Any

import pytest
import torch

from parallel_runtime.machines.link import BEAT, CLOCK, PULSE, WAITS, Frame, FrameKind
from parallel_runtime.machines.relay import later, take
from parallel_runtime.wire.channel import CONTROL_BYTES, Segment, SegmentTable
from parallel_runtime.wire.protocol import ProtocolError
from parallel_runtime.wire.records import from_body, to_body
from parallel_runtime.wire.replies import ChunkSpan, RankRun, RankStep, StageTimeline

WORK = {"batch_group": 0, "pieces": (), "collectives": 1, "sent_bytes": 2, "weight_collectives": 0, "weight_bytes": 0}


def as_json(record: object) -> dict[str, Any]:
    """As it comes out of a message."""
    body: dict[str, Any] = json.loads(json.dumps(to_body(record)))
    return body


@pytest.fixture
def segments() -> SegmentTable:
    segment, fd = Segment.create(1 << 14)
    os.close(fd)
    return SegmentTable(segment)


def frame(kind: FrameKind, data: bytes, *, index: int = 0, offset: int = 0) -> Frame:
    return Frame(kind, index, offset, torch.frombuffer(bytearray(data), dtype=torch.uint8))


def test_signs_say_how_far_the_other_clock_is_behind_and_who_is_well(segments: SegmentTable) -> None:
    began_s = time.perf_counter()
    signs = CLOCK.pack(began_s - 1000.0) + bytes((BEAT, WAITS | PULSE))
    behind_s = take(frame(FrameKind.SIGNS, signs), segments, first_rank=2, num_ranks=2)
    assert 1000.0 - 1e-6 <= behind_s <= 1000.0 + (time.perf_counter() - began_s) + 1e-6
    assert [segments.beats(rank) for rank in range(4)] == [0, 0, 1, 0]
    assert [segments.waits(rank) for rank in range(4)] == [False, False, False, True]
    assert [segments.pulses(rank) for rank in range(4)] == [0, 0, 0, 1]


def test_a_machine_signs_for_no_rank_but_its_own(segments: SegmentTable) -> None:
    segments.credit = 7
    signs = CLOCK.pack(0.0) + bytes([BEAT | WAITS | PULSE]) * 64
    take(frame(FrameKind.SIGNS, signs), segments, first_rank=1, num_ranks=2)
    assert [segments.beats(rank) for rank in range(4)] == [0, 1, 1, 0]
    assert [segments.waits(rank) for rank in range(4)] == [False, True, True, False]
    assert [segments.pulses(rank) for rank in range(4)] == [0, 1, 1, 0]
    assert segments.credit == 7


def test_parts_of_results_go_where_they_belong_and_never_to_the_control_page(segments: SegmentTable) -> None:
    part = frame(FrameKind.DATA, b"part", offset=CONTROL_BYTES + 3)
    assert math.isinf(take(part, segments, first_rank=1, num_ranks=1))
    assert bytes(segments.span(0, CONTROL_BYTES, 8).tolist()) == b"\0\0\0part\0"
    for offset in (0, CONTROL_BYTES - 1, (1 << 14) - 3):
        with pytest.raises(ProtocolError):
            take(frame(FrameKind.DATA, b"part", offset=offset), segments, first_rank=1, num_ranks=1)
    with pytest.raises(ProtocolError, match="a machine sent CONTROL, which is not its to send"):
        take(frame(FrameKind.CONTROL, b"words"), segments, first_rank=1, num_ranks=1)


def test_every_moment_of_a_reply_is_moved_and_no_duration() -> None:
    step = RankStep(**WORK, began_s=5.0, step_s=2.0)
    assert from_body(RankStep, later(as_json(step), 1000.0), "step") == RankStep(**WORK, began_s=1005.0, step_s=2.0)
    span = ChunkSpan(call=0, first_patch=0, patch_stop=1, cond=0, asked_s=1.0, began_s=2.0, ended_s=3.0)
    times = {"step_s": (1.0,), "prepare_s": 0.5, "finish_s": 0.5}
    run = RankRun(**WORK, **times, began_s=(5.0,), timeline=StageTimeline(stage=0, spans=(span,), left_out=0))
    moved = from_body(RankRun, later(as_json(run), 1000.0), "run")
    assert (moved.began_s, moved.step_s) == ((1005.0,), (1.0,))
    assert moved.timeline is not None
    assert moved.timeline.spans == (span._replace(asked_s=1001.0, began_s=1002.0, ended_s=1003.0),)
