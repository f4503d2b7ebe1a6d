"""Every way a rank can fail: the caller learns at once which rank and why, and no process is left."""

import logging
import os
import signal
import time

import pytest
import torch

from parallel_runtime.errors import PoolError
from pool.echo_pool import is_alive, make_spec, run_step

FRESH = "the next prompt starts fresh workers"


@pytest.fixture
def pool(pool):
    """The module's pool, running, whatever the test before did to it."""
    yield from running(pool)


@pytest.fixture
def lone_rank(lone_rank):
    """The module's pool of one rank, likewise."""
    yield from running(lone_rank)


def running(pool):
    run_step(pool)
    yield pool
    if pool.state == "failed":
        pool.close()  # forgets the failure: three in a minute are too many


def failure(pool, **options):
    """The error of a step that fails, its seconds, and what its ranks' processes were."""
    pids = pool.status()["pids"]
    began = time.monotonic()
    with pytest.raises(PoolError) as caught:
        run_step(pool, **options)
    seconds = time.monotonic() - began
    assert pool.state == "failed"
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return caught.value, seconds


def first_line(error):
    return str(error).partition("\n")[0]


def wait_until(condition, timeout_s=5.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("num_mib", [8, 64])
def test_a_rank_killed_in_the_middle_of_an_exchange(pool, num_mib):
    """The other rank's "connection closed by peer" must not be taken for the cause."""
    exchange = ["exchange", num_mib << 20, 30.0]
    victim = pool.status()["pids"][1]
    killed = []

    def kill():
        if not killed and time.monotonic() - began > 0.5:
            killed.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

    began = time.monotonic()
    error, _ = failure(pool, check_cancelled=kill, faults={0: [exchange], 1: [exchange]})
    assert time.monotonic() - killed[0] < 1.0
    assert first_line(error) == f"rank 1: killed by SIGKILL; {FRESH}"
    assert error.rank == 1
    assert torch.equal(run_step(pool).out, torch.arange(10.0))


def test_a_rank_that_raises_while_the_others_wait_for_it(pool):
    text = "rank 0 says no\nand why"
    error, seconds = failure(pool, faults={0: [["fail", "ValueError", text]], 1: [["exchange", 1 << 20, 30.0]]})
    assert first_line(error) == f"rank 0: ValueError: rank 0 says no; {FRESH}"
    assert "in fail\n" in error.detail
    assert "and why" in error.detail
    assert seconds < 1.0


def test_the_cause_is_preferred_to_an_earlier_consequence(pool):
    """Rank 0 learns that its peer is gone before rank 1 has said why it went."""
    peer = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    faults = {0: [["fail", "RuntimeError", peer]], 1: [["sleep", 0.05], ["fail", "ValueError", "the cause"]]}
    error, _ = failure(pool, faults=faults)
    assert first_line(error) == f"rank 1: ValueError: the cause; {FRESH}"


def test_a_consequence_without_a_cause_is_reported_all_the_same(pool):
    peer = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    error, seconds = failure(pool, faults={0: [["fail", "RuntimeError", peer]], 1: [["sleep", 30]]})
    assert first_line(error) == f"rank 0: RuntimeError: {peer}; {FRESH}"
    assert seconds < 1.0


def test_running_out_of_memory_has_a_remedy_of_its_own(lone_rank):
    text = "CUDA out of memory. Tried to allocate 20.00 GiB"
    error, _ = failure(lone_rank, faults={0: [["fail", "memory", text]]})
    assert first_line(error).startswith(f"rank 0: OutOfMemoryError: {text}; use a smaller image")


def test_a_crash_names_the_signal_and_shows_where(lone_rank):
    error, _ = failure(lone_rank, faults={0: [["say", "about to crash"], ["send_signal", "SIGSEGV"]]})
    assert first_line(error) == f"rank 0: killed by SIGSEGV; {FRESH}"
    assert "about to crash" in error.detail
    assert "in send_signal" in error.detail


def test_an_exit_names_the_code_and_shows_what_was_printed_last(lone_rank):
    """More output than a pipe holds neither blocks the rank nor floods the error."""
    error, _ = failure(lone_rank, faults={0: [["say", "lots", 1 << 18], ["say", "the end"], ["leave", 3]]})
    assert first_line(error) == f"rank 0: exited with code 3; {FRESH}"
    assert error.detail.endswith("lots\nthe end")
    assert len(error.detail) < 10_000


def test_an_error_text_that_no_message_can_hold_is_cut(lone_rank):
    error, _ = failure(lone_rank, faults={0: [["fail", "ValueError", "\N{GRINNING FACE}", 30_000]]})
    assert first_line(error).startswith("rank 0: ValueError: \N{GRINNING FACE}\N{GRINNING FACE}")
    assert len(str(error)) < 20_000


def test_what_a_rank_has_started_ends_with_it(lone_rank, tmp_path):
    noted = tmp_path / "child"
    failure(lone_rank, faults={0: [["start_child", str(noted)], ["send_signal", "SIGKILL"]]})
    child = int(noted.read_text())
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        (["send_garbage", 5], "broke the protocol: 5 bytes, a header alone has 28"),
        (["speak_out_of_turn", -1], "broke the protocol: it answered DONE to request"),
        (["close_channel"], "closed its channel"),
    ],
)
def test_a_rank_that_breaks_the_protocol_is_ended(lone_rank, action, cause):
    error, seconds = failure(lone_rank, faults={0: [action]})
    assert first_line(error).startswith(f"rank 0: {cause}")
    assert seconds < 1.0


def test_a_rank_killed_while_it_loads(lone_rank):
    with pytest.raises(PoolError, match="^rank 0: killed by SIGKILL; "):
        lone_rank.load(make_spec("die0"))


def test_a_load_that_is_refused_says_why(pool):
    with pytest.raises(PoolError, match="^rank 0: ValueError: this is no model; "):
        pool.load(make_spec("refuse0"))


def test_a_stopped_rank_is_found_by_its_silence(pool_of):
    pool = pool_of(deadline_s=1.0)
    run_step(pool)
    error, seconds = failure(pool, faults={1: [["sleep", 0.2], ["send_signal", "SIGSTOP"]]})
    assert first_line(error).startswith("rank 1: no answer to STEP and no heartbeat for 1.")
    assert "held by a signal; the deadline is 1 s" in first_line(error)
    assert seconds < 2.0


def test_a_rank_that_shows_life_may_take_longer_than_the_deadline(pool_of):
    pool = pool_of(1, deadline_s=0.5)
    assert torch.equal(run_step(pool, faults={0: [["work", 1.2]]}).out, torch.arange(10.0))


def test_a_rank_that_dies_while_idle_takes_the_others_along_and_the_next_prompt_works(pool, caplog):
    caplog.set_level(logging.WARNING)
    pids = pool.status()["pids"]
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert time.monotonic() - began < 1.0
    assert pool.state == "failed"
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert [record.getMessage() for record in caplog.records] == [
        f"parallel workers failed while idle: rank 1: killed by SIGKILL; {FRESH}"
    ]


def test_a_rank_that_fails_after_its_step_was_cancelled_does_not_fail_the_next_one(pool, caplog):
    class Cancelled(Exception):  # noqa: N818
        pass

    def cancel():
        if pool.state == "busy" and pool._crew.busy:
            raise Cancelled

    caplog.set_level(logging.WARNING)
    generation = pool.generation
    with pytest.raises(Cancelled):
        run_step(pool, check_cancelled=cancel, faults={1: [["sleep", 0.3], ["fail", "ValueError", "too late"]]})
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert pool.generation == generation + 1
    assert "rank 1: ValueError: too late" in caplog.text


def test_a_torch_that_cannot_be_imported_says_so_and_after_three_times_the_user_must_act(tmp_path, pool_of):
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    pool = pool_of(python_path=(str(tmp_path),))
    for _ in range(3):
        with pytest.raises(
            PoolError, match=r"^rank \d: ImportError: libtorch_cpu.so: cannot open .*; .* tries again"
        ) as e:
            pool.start()
        assert "torch/__init__.py" in e.value.detail
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(PoolError, match="failed 3 times in .* last with: ImportError.*; use Release Parallel Pool"):
            pool.start()
    assert time.monotonic() - began < 0.1
    assert (pool.generation, pool.state) == (3, "failed")
    pool.close()
    assert pool.state == "stopped"
    with pytest.raises(PoolError, match="tries again"):
        pool.start()


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        ("engines:Unmakeable", "RuntimeError: this engine does not start"),
        ("engines:Nothing", "AttributeError: module 'engines' has no attribute 'Nothing'"),
    ],
)
def test_an_engine_that_does_not_start_fails_the_start(pool_of, engine, cause):
    with pytest.raises(PoolError, match=rf"^rank 0: {cause}; "):
        pool_of(1, engine=engine).start()
