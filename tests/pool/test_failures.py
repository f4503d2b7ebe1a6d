"""A rank breaks the protocol or leaves: the caller learns at once which rank and why, and no process is left."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.errors import OutOfMemoryInRankError, PoolError, RaisedInRankError
from parallel_runtime.pool.failures import Failure, choose, failure_of_error, pool_error
from parallel_runtime.pool.ranks import find_silence
from parallel_runtime.wire.channel import Segment, SegmentTable
from parallel_runtime.wire.replies import RankError
from parallel_runtime.worker.entry import rank_error
from pool.echo_pool import FRESH, failure, first_line


def test_an_exit_names_the_code_and_shows_what_was_printed_last(lone_rank):
    """More output than a pipe holds neither blocks the rank nor floods the error."""
    error = failure(lone_rank, faults={0: [["say", "lots", 1 << 18], ["say", "the end"], ["leave", 3]]})
    assert first_line(error) == f"rank 0: exited with code 3; {FRESH}"
    assert error.detail.endswith("lots\nthe end")
    assert len(error.detail) < 10_000


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        (["send_garbage", 5], "broke the protocol: 5 bytes, a header alone has 28"),
        (["speak_out_of_turn", -1], "broke the protocol: it answered DONE to request"),
        (["answer_for_generation", -1], "broke the protocol: it answered DONE to request"),
        (["close_channel"], "closed its channel"),
        (["give_up_unasked"], "broke the protocol: it answered CANCELLED to request"),
        (
            ["answer_other_fields", {}],
            "broke the protocol: DONE of STEP: missing memory, ran; the parent and this rank",
        ),
        (
            ["answer_other_fields", {"memory": {"resident_bytes": "1"}, "ran": None}],
            "broke the protocol: DONE of STEP.memory.resident_bytes is '1', not of type int",
        ),
    ],
)
def test_a_rank_that_breaks_the_protocol_is_ended(lone_rank, action, cause):
    error = failure(lone_rank, faults={0: [action]})
    assert first_line(error).startswith(f"rank 0: {cause}")


def test_the_cause_is_blamed_and_not_what_followed_from_it():
    followed, cause, later = Failure(0, "its peer is gone", weak=True), Failure(1, "killed"), Failure(2, "raised")
    assert choose([followed, cause, later]) is cause
    assert choose([followed, replace(followed, rank=3)]) is followed


def said(kind, text):
    """An error as a rank says it."""
    return RankError(kind=kind, text=text, traceback="")


@pytest.mark.parametrize(
    ("kind", "text", "remedy"),
    [
        ("OutOfMemoryError", "CUDA out of memory", "memory"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes", "memory"),
        ("MemoryError", "", "memory"),
        ("RuntimeError", "Resource temporarily unavailable", "ulimit -u"),
    ],
)
def test_a_failure_has_the_remedy_of_its_cause(kind, text, remedy):
    found, unknown = (
        pool_error(failure_of_error(1, error), printed="", device="cpu:1", starting=False).remedy
        for error in (said(kind, text), said("KeyError", "x"))
    )
    assert remedy in found
    assert found != unknown


class NoCapableBackendError(RuntimeError):
    """A package's own type."""


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (Exception("sizes do not fit"), RaisedInRankError),
        (NoCapableBackendError("no backend takes these shapes"), RaisedInRankError),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "no"), RaisedInRankError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OutOfMemoryInRankError),
        (RuntimeError("CUDA driver error: out of memory"), OutOfMemoryInRankError),
        (torch.OutOfMemoryError("Allocation on device"), OutOfMemoryInRankError),
        (FileNotFoundError(2, "No such file"), PoolError),
        (torch.distributed.DistNetworkError("something that no store has said yet"), PoolError),
        (RuntimeError("device-side assert triggered"), PoolError),
        (KeyboardInterrupt(), PoolError),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else type(each).__name__,
)
def test_whatever_code_raises_is_told_from_faults_of_the_machine(raised, kind):
    """By all that a type derives from, as packages have types of their own."""
    failure_ = failure_of_error(1, rank_error(raised))
    assert type(pool_error(failure_, printed="", device="cpu:1", starting=False)) is kind


@pytest.mark.parametrize(("pulse_lags_s", "named"), [((0.0, 0.0), 0), ((0.0, 4.0), 1), ((4.0, 0.0), 0)])
def test_of_ranks_that_all_wait_the_one_without_a_pulse_is_named_else_the_longest_silent(pulse_lags_s, named):
    """A rank of a further machine may be held where nobody here can see it."""
    segment, fd = Segment.create(1 << 16)
    os.close(fd)
    table, now_s, ranks = SegmentTable(segment), time.monotonic(), []
    for rank, (silent_s, lag_s) in enumerate(zip((9.0, 8.0), pulse_lags_s, strict=True)):
        table.show_waiting(rank, True)
        table.show_pulse(rank)
        known = {"last_beats": 0, "last_heard_s": now_s - silent_s, "last_pulses": 1, "last_pulse_s": now_s - lag_s}
        ranks.append(SimpleNamespace(rank=rank, is_stopped=lambda: False, **known))
    found = find_silence(ranks, {}, table, "STEP", since_s=now_s - 20, deadline_s=6.0, pulse_deadline_s=6.0)
    assert found.rank == named
