"""A rank breaks the protocol or leaves: the caller learns at once which rank and why, and no process is left."""

import errno
import gc
import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from descriptors import open_descriptors

from parallel_runtime import VERSION
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import (
    BrokenCopiesError,
    OutOfMemoryInRankError,
    PoolError,
    RaisedInRankError,
    SilentWorkersError,
)
from parallel_runtime.machines import ranks_here
from parallel_runtime.pool import failures, generation
from parallel_runtime.pool import pool as pool_module
from parallel_runtime.pool.failures import REACH_EACH_OTHER, Failure, choose, failure_of_error, hint, pool_error
from parallel_runtime.pool.generation import CLOSED, Generation, InFlight
from parallel_runtime.pool.known_errors import TRY_COPIES
from parallel_runtime.pool.pool import Pool
from parallel_runtime.pool.ranks import Watcher, find_silence
from parallel_runtime.pool.worker_group import WorkerGroup
from parallel_runtime.process import control_groups, rank_process, signs
from parallel_runtime.process.rank_process import spawn
from parallel_runtime.process.signs import Output
from parallel_runtime.wire.channel import Segment, SegmentTable
from parallel_runtime.wire.protocol import Message, Op, ProtocolError
from parallel_runtime.wire.records import to_body
from parallel_runtime.wire.replies import EmptyReply, Hello, Progress, RankError
from parallel_runtime.worker.entry import rank_error
from pool.echo_pool import FRESH, failure, first_line


def test_an_exit_names_the_code_and_shows_what_was_printed_last(lone_rank):
    """More output than a pipe holds neither blocks the rank nor floods the error."""
    error = failure(lone_rank, faults={0: [["say", "lots", 1 << 18], ["say", "the end"], ["leave", 3]]})
    assert first_line(error) == f"rank 0: exited with code 3; {FRESH}"
    assert error.detail.endswith("lots\nthe end")
    assert len(error.detail) < 10_000


@pytest.mark.parametrize("told", [True, False])
def test_a_process_gets_on_as_it_computes_also_where_the_system_does_not_tell_what_it_reads(monkeypatch, told):
    if not told:
        monkeypatch.setattr(signs, "Path", lambda _: SimpleNamespace(read_text=lambda **_: os.stat("/nowhere")))
    ticks = ["S", *map(str, range(20))]
    monkeypatch.setattr(signs, "_stat", lambda _: ticks)
    work = signs.ProcessWork(os.getpid())
    assert work.gets_on()
    ticks[11] = "computed"
    assert work.gets_on()
    ticks[0] = "R"
    assert told or not work.gets_on(), "to be ready is not to compute; the system counts what this test reads"


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        (["send_garbage", 5], "broke the protocol: 5 bytes, a header alone has 28"),
        (["speak_out_of_turn"], "broke the protocol: it answered DONE to request"),
        (["close_channel"], "closed its channel"),
        (["answer_other_fields"], "broke the protocol: DONE of STEP: missing memory, ran; the parent and this rank"),
    ],
)
def test_a_rank_that_breaks_the_protocol_is_ended(lone_rank, action, cause):
    """Other answers that nobody asked for: test_only_the_answer_of_the_rank_to_what_it_was_asked_is_taken."""
    error = failure(lone_rank, faults={0: [action]})
    assert first_line(error).startswith(f"rank 0: {cause}")


@pytest.mark.parametrize(("without", "blamed"), [(False, [2]), (True, [])])
def test_ranks_whose_machine_has_ended_have_failed_unless_they_are_done_without(without, blamed):
    generation_there = Generation.__new__(Generation)
    remote = SimpleNamespace(ended_early=lambda _: {2: "machine a is lost"}, does_without=lambda *_: without)
    given = {"_epoll": SimpleNamespace(poll=lambda _: []), "ranks": [], "_asked": [], "_signs": [], "remote": remote}
    vars(generation_there).update(given)
    generation_there._look(0.0)
    assert [sign.rank for sign in generation_there._signs] == blamed
    assert all((sign.cause, sign.weak) == ("machine a is lost", False) for sign in generation_there._signs)
    assert all(sign.remedy.endswith(f"; {FRESH}") for sign in generation_there._signs)


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


HANG = Failure(1, "no answer to STEP and no heartbeat for 120.0 s", remedy=f"wait; {FRESH}", silent=True)
WARNED = (
    "a:1:2 [1] transport/p2p.cc:275 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'"
)


@pytest.mark.parametrize(
    ("failure_", "printed", "hangs_by", "said"),
    [
        (HANG, "", "", f"{HANG.cause}; wait"),
        (HANG, "", TRY_COPIES, f"{HANG.cause}; {TRY_COPIES}; wait"),
        (
            HANG,
            WARNED,
            TRY_COPIES,
            f"{HANG.cause}: these GPUs cannot read each other's memory, and a copy tried to (\"Cuda",
        ),
        (HANG, "Connection reset by peer", "", f"{HANG.cause}; wait"),
        (replace(HANG, held=True), WARNED, TRY_COPIES, f"{HANG.cause}; wait"),
        (
            HANG,
            "rank0:9:9 [0] NCCL WARN Cuda failure 2 'out of memory'",
            TRY_COPIES,
            f"{HANG.cause}: NCCL found no memory",
        ),
        (HANG, "cuDNN failed: CUDNN_STATUS_INTERNAL_ERROR_HOST", TRY_COPIES, f"{HANG.cause}; {TRY_COPIES}; wait"),
        (HANG, "torch.OutOfMemoryError: CUDA out of memory", TRY_COPIES, f"{HANG.cause}; {TRY_COPIES}; wait"),
    ],
    ids=[
        *("over gloo", "over NCCL", "a warning of NCCL", "another line", "a signal holds it", "memory of NCCL"),
        *("of long ago, it was got over", "memory of long ago"),
    ],
)
def test_a_hang_is_told_with_what_the_rank_printed_or_how_to_try_the_copies(failure_, printed, hangs_by, said):
    error = pool_error(failure_, printed=printed, device="cuda:1", starting=False, hangs_by=hangs_by)
    assert first_line(error).startswith(f"rank 1 (cuda:1): {said}") and first_line(error).endswith(FRESH)
    assert type(error) is SilentWorkersError


def test_where_machines_hang_their_ports_are_looked_at_first_and_no_copy_is_to_blame_before_there_was_one():
    def said(over_nccl, machines, starting=False):
        return hint(over_nccl=over_nccl, machines=machines, starting=starting)

    assert (said(False, False), said(True, False), said(True, False, True)) == ("", TRY_COPIES, TRY_COPIES)
    assert said(False, True) == said(False, True, True) == said(True, True, True) == REACH_EACH_OTHER
    assert said(True, True) == f"{REACH_EACH_OTHER}; {TRY_COPIES}"


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
        (RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"), PoolError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), BrokenCopiesError),
        (RuntimeError("CUDA error: something that no CUDA has said yet"), BrokenCopiesError),
        (torch.distributed.DistBackendError("something that no NCCL has said yet"), BrokenCopiesError),
        (torch.distributed.DistBackendError("NCCL error: Cuda failure 1 'invalid argument'"), BrokenCopiesError),
        (KeyboardInterrupt(), PoolError),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else type(each).__name__,
)
def test_whatever_code_raises_is_told_from_faults_of_the_machine(raised, kind):
    """By all that a type derives from, as packages have types of their own."""
    failure_ = failure_of_error(1, rank_error(raised))
    assert type(pool_error(failure_, printed="", device="cpu:1", starting=False)) is kind


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        ("killed by SIGSEGV", BrokenCopiesError),
        ("killed by SIGABRT", BrokenCopiesError),
        ("killed by SIGKILL", PoolError),
        ("exited with code 3", PoolError),
    ],
)
def test_a_crash_in_a_library_of_cuda_is_told_from_other_ends(ended, kind):
    assert type(pool_error(Failure(1, ended), printed="", device="cuda:1", starting=False)) is kind


@pytest.mark.parametrize(
    ("pulse_lags_s", "named"), [((0.0, 0.0), 0), ((0.0, 2.5), 1), ((2.5, 0.0), 0), ((0.0, 1.5), 0)]
)
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


@pytest.mark.parametrize(
    ("op", "rank", "generation", "request_", "taken"),
    [
        (Op.DONE, 0, 4, 7, True),
        (Op.PROGRESS, 0, 4, 7, True),
        (Op.DONE, 1, 4, 7, False),
        (Op.DONE, 0, 3, 7, False),
        (Op.DONE, 0, 4, 6, False),
        (Op.CANCELLED, 0, 4, 7, False),
        (Op.READY, 0, 4, 7, False),
    ],
)
def test_only_the_answer_of_the_rank_to_what_it_was_asked_is_taken(op, rank, generation, request_, taken):
    asked = Generation.__new__(Generation)
    asked.number, asked.segments = 4, SimpleNamespace(cancelled_request=6)
    asked.in_flight = flight = InFlight(Op.MESH, 7, 1.0, EmptyReply)
    said_ = Message(op, rank, generation, request_, to_body(Progress(done=1, total=2)) if op is Op.PROGRESS else {})
    sender = SimpleNamespace(rank=0, pid=5, is_process=lambda pid: pid == 5)
    if not taken:
        with pytest.raises(
            ProtocolError, match=f"it answered {op.name} to request {request_} of generation {generation}"
        ):
            asked._take(sender, said_)
        return
    assert asked._take(sender, said_) is None
    assert (flight.has_news, len(flight.progress), len(flight.replies)) == (
        op is Op.PROGRESS,
        *((1, 0), (0, 1))[op is Op.DONE],
    )
    for more, replies in ((said_, {0: EmptyReply()}), (said_, None)):
        flight.replies = replies or {}
        asked.in_flight = None if replies is None else flight
        with pytest.raises(ProtocolError, match="which was not asked for"):
            asked._take(sender, more)
    with pytest.raises(ProtocolError, match="process 6 says HELLO for 5"):
        asked._take(sender, Message(Op.HELLO, 0, 4, 0, to_body(Hello(pid=6, version=VERSION))))
    hello = Message(Op.HELLO, 0, 4, 0, to_body(Hello(pid=5, version="0.0")))
    cause = f"the pack was updated: ComfyUI runs its version {VERSION}, 0.0 is installed"
    assert asked._take(sender, hello) == Failure(0, cause, remedy="restart ComfyUI")


def test_a_request_that_is_interrupted_while_it_is_sent_ends_the_generation():
    def interrupted(*_):
        raise KeyboardInterrupt

    asked = Generation.__new__(Generation)
    asked.ranks = [SimpleNamespace(channel=SimpleNamespace(send_packet=interrupted))]
    asked._whole, asked.fail = True, lambda error: error
    with pytest.raises(KeyboardInterrupt):
        asked._send([b"to the first"])
    with pytest.raises(PoolError, match="a request was interrupted while it was being sent"):
        asked.wait(print)


def test_descriptors_that_a_rank_sends_unasked_are_closed_and_a_channel_that_ends_is_its_end():
    asked, (descriptor, other) = Generation.__new__(Generation), os.pipe()
    received = iter([(Message(Op.HELLO, 0, 4, 7, to_body(Hello(pid=5, version=VERSION))), [descriptor, other]), None])
    rank = SimpleNamespace(rank=3, channel=SimpleNamespace(recv=lambda: next(received)), is_process=lambda pid: True)
    assert asked._receive(rank) is None
    for each in (descriptor, other):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)
    assert asked._receive(rank) == Failure(3, CLOSED, weak=True)


@pytest.fixture
def spawned(monkeypatch):
    """The ranks that were started."""
    made = []
    monkeypatch.setattr(generation, "spawn", lambda *given, **named: made.append(spawn(*given, **named)) or made[-1])
    return made


def test_a_system_that_lets_us_have_no_thread_is_one_clear_error_and_no_rank_stays(pool_of, spawned, monkeypatch):
    def refused(_):
        raise RuntimeError("can't start new thread")

    gc.collect()  # of tests before this one
    before = open_descriptors()
    pool = pool_of(2)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(PoolError, match=r"^a rank cannot be started: can't start new thread; raise .* \(ulimit -u\)"):
        pool.start()
    assert [rank._process.returncode for rank in spawned] == [-signal.SIGKILL] * 2
    gc.collect()  # the segment, which the error's traceback has held
    assert not open_descriptors() - before


def test_a_rank_that_dies_before_it_is_told_anything_is_one_failure(pool_of, monkeypatch):
    def killed(*given, **named):
        rank = spawn(*given, **named)
        rank._process.kill()
        os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        return rank

    monkeypatch.setattr(generation, "spawn", killed)
    pool = pool_of(1)
    with pytest.raises(PoolError, match="^rank 0: killed by SIGKILL; the next prompt tries again"):
        pool.start()
    assert len(pool._failures._times) == 1


def test_a_bus_error_names_the_file_cut_short_else_a_changed_one_else_each_mapped_one_once(tmp_path):
    bus = Failure(1, failures.BUS_ERROR)

    def file(name, *, before, now):
        (path := tmp_path / name).write_bytes(bytes(now))

        def refuse_changed():
            if before != now:
                raise ValueError(f"{name} was changed")

        return SimpleNamespace(path=path, size_bytes=before, refuse_changed=refuse_changed)

    def cause(*files):
        return failures.explain(bus, files=files, starting=False).cause

    whole = [file(name, before=3, now=3) for name in ("b", "a", "a")]
    longer, other, cut = file("l", before=3, now=4), file("o", before=2, now=5), file("c", before=3, now=2)
    assert failures.explain(bus, files=(), starting=False) is bus
    assert cause(*whole).startswith("killed by SIGBUS: a or b could not be read where it is mapped; see that its disk")
    assert cause(*whole, longer, other) == "killed by SIGBUS: l was changed"
    assert cause(*whole, longer, cut) == "killed by SIGBUS: c was changed"
    longer.path.unlink()
    assert cause(longer, cut) == cause(cut, longer) == "killed by SIGBUS: c was changed"


@pytest.mark.parametrize(("number", "says"), [(errno.EMFILE, "ulimit -n"), (errno.EBADF, failures.AGAIN)])
def test_what_the_system_refuses_has_its_remedy_and_else_the_next_prompt_tries_again(number, says):
    error = failures.system_error("no ranks", OSError(number, "refused"))
    assert (error.cause, says in error.remedy) == ("no ranks: refused", True)
    assert failures.system_error("no ranks", OSError("odd")).cause == "no ranks: odd"


@pytest.mark.parametrize(("times_s", "storm"), [((0, 30, 60), True), ((0, 30, 61), False), ((0, 60), False)])
def test_three_failures_in_a_minute_stop_a_pool_and_one_that_was_dealt_with_is_none(monkeypatch, times_s, storm):
    now_s, known = iter(times_s), failures.Failures()
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    for _ in times_s:
        known.note(PoolError("killed", rank=1, device="cpu:1", remedy="again", detail="words"))
    if not storm:
        known.refuse_storm()
        return
    with pytest.raises(PoolError) as caught:
        known.refuse_storm()
    error = caught.value
    assert error.cause == "the workers failed 3 times in 60 s, last with: killed"
    assert (error.rank, error.device, error.remedy, error.detail) == (1, "cpu:1", failures.RELEASE, "words")
    known.retract()
    known.refuse_storm()
    assert (known.last, len(known._times)) == (None, 2)
    known.forget()
    known.retract()
    assert len(known._times) == 0


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (None, "still running"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "killed by SIGKILL"),
        (-63, "killed by signal 63"),
    ],
)
def test_how_a_process_ended_is_said_before_it_is_reaped_and_after(monkeypatch, state, text):
    def looked(kind, pidfd, options):
        code = os.CLD_EXITED if state is not None and state >= 0 else os.CLD_KILLED
        return None if state is None else SimpleNamespace(si_status=abs(state), si_code=code)

    monkeypatch.setattr(rank_process.os, "waitid", looked)
    process_ = rank_process.OwnedProcess(SimpleNamespace(pid=1, returncode=None), None, fds=(0, 0))
    assert process_.end_text() == text
    process_._process.returncode = state
    assert process_.end_text() == text


@pytest.mark.parametrize(
    ("said", "told"),
    [("oom_kill 3\n", 3), ("pgfault 9\nx_oom_kill 4\noom_kill 3\nlast 1\n", 3), ("pgfault 9\n", 0), (None, 0)],
)
def test_processes_that_the_system_killed_for_memory_are_counted_where_it_says(monkeypatch, tmp_path, said, told):
    vmstat = tmp_path / "vmstat"
    if said is not None:
        vmstat.write_text(said)
    monkeypatch.setattr(signs, "VMSTAT", vmstat)
    monkeypatch.setattr(control_groups, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", own := tmp_path / "own")
    assert signs.memory_kills() == told
    (tmp_path / "memory.events").write_text("low 4\noom 9\noom_kill 5\noom_group_kill 1\n")
    assert signs.memory_kills() == 5, "another container's are not told"
    own.write_text("0::/system.slice/comfyui.service\n")
    assert signs.memory_kills() == 5, "a group that is not seen here says nothing"
    (unit := tmp_path / "system.slice" / "comfyui.service").mkdir(parents=True)
    (unit / "memory.events").write_text("oom 2\noom_kill 1\n")
    assert signs.memory_kills() == 1, "another unit's are not told"


def test_a_rank_that_ends_as_host_memory_ran_out_is_told_so_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(control_groups, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(signs, "VMSTAT", tmp_path / "vmstat")
    signs.VMSTAT.write_text("oom_kill 3\n")
    ended = [
        rank_process.OwnedProcess(SimpleNamespace(pid=1, returncode=code), None, fds=(0, 0)) for code in (-9, -7, 1)
    ]
    usual = ["killed by SIGKILL", "killed by SIGBUS", "exited with code 1"]
    assert [each.end_text() for each in ended] == usual
    here = ranks_here.RankHere(1, None, None)
    signs.VMSTAT.write_text("oom_kill 4\n")
    words = "killed by SIGKILL as host memory ran out"
    assert [each.end_text() for each in ended] == [words, *usual[1:]]
    assert ranks_here.end_text(-9, here.kills_before) == words
    said = [Failure(1, words), failures.failure_of_error(1, RankError(kind=words, text="", traceback=""))]
    for each in said:  # of a rank here, and of one of a further machine
        error = failures.pool_error(each, printed="NCCL WARN of long ago", device="cuda:1", starting=False)
        assert str(error).splitlines()[0] == (
            f"rank 1 (cuda:1): {words}; close other programs, use a smaller file such as fp8, or add memory or swap; "
            "in a container, raise its limit; the next prompt starts fresh workers"
        )
        assert type(error) is PoolError


def test_an_exit_that_other_code_took_is_said(monkeypatch):
    def looked(*_):
        raise ChildProcessError

    monkeypatch.setattr(rank_process.os, "waitid", looked)
    gone = rank_process.OwnedProcess(SimpleNamespace(pid=1, returncode=None), None, fds=(0, 0))
    assert gone.end_text() == "ended, and its exit was taken by other code of this process"


def test_the_last_of_what_a_rank_prints_is_kept_and_one_that_prints_without_end_holds_nobody():
    read, write = os.pipe()
    output = Output(read)
    assert (output.fileno(), output.drain(), output.text()) == (read, True, "")
    for text in (b"x" * 9000, b"the end\n"):
        os.write(write, text)
        assert output.drain()
    assert output.text() == "x" * (8 * 1024 - 8) + "the end"
    os.close(write)
    assert not output.drain()
    output.close()
    output.close()
    assert not output.drain()


def test_a_watcher_tells_of_each_rank_that_dies_and_takes_in_what_others_print_meanwhile():
    children = [subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [Output(os.dup(child.stdout.fileno())) for child in children]
    pidfds = [os.pidfd_open(child.pid) for child in children]
    ranks = [SimpleNamespace(output=output, pidfd=pidfd) for output, pidfd in zip(outputs, pidfds, strict=True)]
    deaths, died, goes_on = [], threading.Semaphore(0), threading.Event()

    def on_death():
        deaths.append(1)
        died.release()
        goes_on.wait()

    watcher = Watcher(ranks, on_death=on_death)
    children[0].communicate(b"")
    assert died.acquire(timeout=300) and deaths == [1]
    children[1].stdin.write(b"more than a pipe takes\n" * 10_000)
    children[1].stdin.close()
    children[1].wait()
    assert died.acquire(timeout=300) and deaths == [1, 1], "while the first is told of"
    watcher.stop()
    threading.Timer(0.05, goes_on.set).start()
    watcher.join()
    assert not watcher._thread.is_alive() and not any(each.is_alive() for each in watcher._telling)
    assert deaths == [1, 1] and "more than a pipe takes" in outputs[1].text()
    children[1].stdout.close()
    for fd in pidfds:
        os.close(fd)
    for output in outputs:
        output.close()


def test_a_pool_that_is_closed_waits_for_its_watcher(monkeypatch):
    waited = []
    pool = Pool(parse_devices("cpu:1").devices)
    watcher = SimpleNamespace(join=lambda: waited.append(1))
    monkeypatch.setattr(pool, "_stop", lambda: SimpleNamespace(generation=SimpleNamespace(watcher=watcher)))
    pool.close()
    monkeypatch.setattr(pool, "_stop", lambda: None)
    pool.close()
    assert waited == [1]


def test_idle_ranks_that_end_when_they_are_asked_to_are_not_waited_for_any_longer(monkeypatch):
    ended, told, now_s = [os.eventfd(0) for _ in range(2)], [], iter((0.0, 0.0))  # it looks once

    def ends(message, fd):
        told.append((message.op, message.rank))
        os.eventfd_write(fd, 1)

    made = Generation.__new__(Generation)
    made.number = 3
    made.ranks = [
        SimpleNamespace(rank=rank, pidfd=fd, channel=SimpleNamespace(send=partial(ends, fd=fd)))
        for rank, fd in enumerate(ended)
    ]
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    made._dismiss()
    assert told == [(Op.STOP, 0), (Op.STOP, 1)]
    for fd in ended:
        os.close(fd)


def test_idle_ranks_that_do_not_end_when_they_are_asked_to_are_waited_for_a_moment(monkeypatch):
    looked, now_s = [], iter((10.0, 10.5, 10.0 + generation.STOP_S))
    poll = SimpleNamespace(register=lambda *_: None, poll=lambda ms: looked.append(ms) or [])
    made = Generation.__new__(Generation)
    made.number, made.ranks = 3, [SimpleNamespace(rank=0, pidfd=1, channel=SimpleNamespace(send=print))]
    monkeypatch.setattr(generation, "select", SimpleNamespace(poll=lambda: poll, POLLIN=select.POLLIN))
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    made._dismiss()
    assert looked == [(generation.STOP_S - 0.5) * 1000]


def test_a_look_at_what_a_cancelled_request_left_ends_after_its_moment():
    pool_module._until(time.monotonic() + 600)()
    with pytest.raises(pool_module._NotYetError):
        pool_module._until(time.monotonic() - 1)()


@pytest.mark.parametrize(("ranks", "check", "sound"), [(2, True, False), (1, True, True), (2, False, True)])
def test_copies_of_several_ranks_are_not_believed_until_they_were_looked_at(ranks, check, sound):
    told = {"load_deadline_s": 1.0, "budget_bytes": None, "overlap": lambda plan: None}
    group = WorkerGroup(SimpleNamespace(ranks=[None] * ranks), check_copies=check, **told)
    assert group.copies_are_sound == sound


def test_weights_are_asked_for_again_once_what_came_in_part_was_freed(monkeypatch):
    told = {"load_deadline_s": 1.0, "budget_bytes": None, "overlap": lambda plan: None}
    generation_there = SimpleNamespace(ranks=[None], wait=lambda _: None)
    group, loads, freed = WorkerGroup(generation_there, check_copies=False, **told), [], []
    monkeypatch.setattr(group, "load", lambda *_: loads.append(1) or SimpleNamespace(handle=len(loads)))
    monkeypatch.setattr(group, "apply_deltas", lambda *_: None)
    monkeypatch.setattr(group, "make_mesh", lambda *_: None)
    monkeypatch.setattr(group.models, "free_partly_held", lambda _: freed.append(group.models.partly_held.clear()))
    asked = "a file", "a plan", SimpleNamespace(name="", side_branch=False), lambda: None
    for partly_held, handle in (({}, 1), ({}, 1), ({1: 2}, 2)):
        group.models.partly_held.update(partly_held)
        group.settle(lambda: None)
        assert (group.ensure(*asked), len(freed)) == (handle, handle - 1)
