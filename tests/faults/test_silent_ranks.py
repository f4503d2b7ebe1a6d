"""A rank stops answering: the deadline of the request ends it, and the deadline is long enough for what is well."""

import os
import re
import signal
import threading
import time

import pytest
import torch
from pool.echo_pool import Gate, failure, first_line, make_pool, make_spec, run_step, wait_until

from parallel_runtime.errors import PoolError
from parallel_runtime.pool import generation as of_pool
from parallel_runtime.pool.failures import VARIABLE
from parallel_runtime.pool.generation import Generation
from parallel_runtime.pool.known_errors import TRY_COPIES
from parallel_runtime.pool.ranks import deadline_from
from parallel_runtime.process.environment import RankSettings
from parallel_runtime.wire.protocol import Op

DEADLINE = "the deadline is 1 s"


@pytest.fixture
def impatient(pool):
    """Two ranks that may be silent for a second."""
    yield from with_deadline(pool, 1.0)


@pytest.fixture
def lone(lone_rank):
    """A rank that may be silent for half a second."""
    yield from with_deadline(lone_rank, 0.5)


def with_deadline(pool, seconds):
    """The pool with that deadline of a request for the length of a test, once fresh ranks, which are slow, have run."""
    run_step(pool)
    before, pool.deadline_s = pool.deadline_s, seconds
    yield pool
    pool.deadline_s = before


def runs_again(pool):
    """Whether the next step is right, however long fresh ranks take to it."""
    pool.deadline_s = 120.0
    return torch.equal(run_step(pool).out, torch.arange(10.0))


def test_a_stopped_rank_is_found_by_its_silence(impatient):
    impatient.deadline_s = 2.0
    error = failure(impatient, faults={1: [["send_signal", "SIGSTOP"]]})
    assert first_line(error).startswith("rank 1: no answer to STEP and no heartbeat for ")
    assert "held by a signal; the deadline is 2 s; " in first_line(error)


def test_a_stopped_rank_is_found_while_another_gets_on(impatient):
    """No other rank vouches for it: rank 0 works for longer than the deadline."""
    impatient.deadline_s = 2.0
    error = failure(impatient, faults={0: [["work", 3600.0]], 1: [["send_signal", "SIGSTOP"]]})
    assert first_line(error).startswith("rank 1: no answer to STEP and no heartbeat for ")
    assert "held by a signal; the deadline is 3 s" in first_line(error)


def test_a_rank_that_is_stopped_before_it_can_say_anything_is_found_by_its_silence(impatient, monkeypatch):
    impatient.close()
    spawn = of_pool.spawn

    def stopped(rank, *arguments, **more):
        made = spawn(rank, *arguments, **more)
        if rank == 1:
            os.kill(made.pid, signal.SIGSTOP)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(of_pool, "spawn", stopped)
        with pytest.raises(PoolError, match="^rank 1: no answer to READY .* held by a signal; the deadline is 3 s"):
            impatient.start()
    assert runs_again(impatient)


def test_a_rank_that_does_nothing_before_its_first_pulse_is_found_by_its_silence(impatient, monkeypatch):
    """As one that waits for ever while it imports: it has said HELLO, runs, and neither computes nor reads."""
    impatient.close()
    packets = Generation._packets

    def without_segment(self, asked, op, *rest):
        return packets(self, asked[:1] if op is Op.ATTACH else asked, op, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Generation, "_packets", without_segment)
        with pytest.raises(PoolError, match="^rank 1: no answer to READY and no heartbeat for .* s; the deadline is 3"):
            impatient.start()
    assert runs_again(impatient)


def test_a_rank_that_is_stopped_while_idle_is_found_by_the_next_load(impatient):
    """A load may go on for minutes without a sign that it gets on, but not without a pulse."""
    os.kill(impatient.status()["pids"][1], signal.SIGSTOP)
    with pytest.raises(PoolError, match="^rank 1: no answer to LOAD .* held by a signal; the deadline is 3 s"):
        impatient.load(make_spec("quick"))
    assert runs_again(impatient)


def test_ranks_that_wait_for_each_other_for_ever_are_ended(impatient):
    error = failure(impatient, faults={rank: [["receive"]] for rank in range(2)})
    assert "no answer to STEP and no heartbeat for " in first_line(error)
    longer = rf"; {DEADLINE}; if it only is slow, start ComfyUI with {VARIABLE}=[1-9]\S*; the next prompt starts fresh"
    assert re.search(longer, first_line(error))


def test_where_ranks_exchange_over_nccl_a_hang_says_how_to_try_the_copies(impatient, monkeypatch):
    impatient.close()
    monkeypatch.setattr(RankSettings, "over_nccl", True)
    impatient.start()
    error = failure(impatient, faults={rank: [["receive"]] for rank in range(2)})
    assert re.search(rf" s; {TRY_COPIES}; {DEADLINE}; ", first_line(error))


def test_a_rank_that_shows_life_may_take_longer_than_the_deadline(lone):
    lone.deadline_s = 2.0
    assert torch.equal(run_step(lone, torch.ones(7), faults={0: [["work", 3.0]]}).out, torch.ones(7))


def test_a_rank_whose_interpreter_never_returns_is_found_too(lone):
    error = failure(lone, faults={0: [["hold_the_interpreter"]]})
    assert first_line(error).startswith("rank 0: no answer to STEP and no heartbeat for ")
    assert runs_again(lone)


def test_the_silence_of_a_time_when_nobody_listened_does_not_count(lone, tmp_path):
    """The caller is busy with something else, or all of us were frozen: the ranks may have been just as well."""
    given, gate, rests = torch.ones(6), Gate(tmp_path), []

    def rest_once():
        if gate.reached and not rests:
            rests.append(time.sleep(3.0))
            gate.open()

    lone.deadline_s = 2.0
    assert torch.equal(run_step(lone, given, check_cancelled=rest_once, faults={0: [gate.waits]}).out, given)
    assert rests


def test_loading_is_a_state_of_its_own_with_a_deadline_of_its_own(lone, tmp_path):
    pool, gate = lone, Gate(tmp_path)
    loading = threading.Thread(target=pool.load, args=(gate.spec,))
    loading.start()
    wait_until(lambda: gate.reached)
    assert pool.state == "loading"
    time.sleep(0.8)  # longer than a request may be silent
    gate.open()
    loading.join()
    assert pool.state == "idle"
    assert "gate" in [model["name"] for model in pool.status()["models"]]


def test_compiling_is_a_state_of_its_own(impatient):
    """The rank that compiles shows life, and the other may wait for it."""
    given, states = torch.ones(33), set()
    impatient.deadline_s = 2.0
    compiles = [["say_compiling", True], ["work", 3.0], ["say_compiling", False]]
    result = run_step(impatient, given, faults={0: compiles}, check_cancelled=lambda: states.add(impatient.state))
    assert torch.equal(result.out, given)
    assert "compiling" in states
    assert impatient.state == "idle"


def test_a_rank_that_is_stopped_while_it_compiles_is_found_by_its_silence(impatient):
    run_step(impatient)
    compiles = [["say_compiling", True], ["send_signal", "SIGSTOP"]]
    error = failure(impatient, faults={1: compiles})
    assert first_line(error).startswith("rank 1: no answer to STEP and no heartbeat for ")


def test_the_deadline_is_what_the_environment_says_or_two_minutes():
    assert deadline_from({}) == deadline_from({VARIABLE: " "}) == 120
    assert deadline_from({VARIABLE: "300"}) == 300
    for wrong in ("soon", "0", "-5", "nan", "inf"):
        with pytest.raises(ValueError, match=f"{VARIABLE}='{wrong}' is no positive number of seconds; use"):
            deadline_from({VARIABLE: wrong})


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf")])
def test_a_pool_refuses_a_deadline_that_never_or_always_passes(wrong):
    with pytest.raises(ValueError, match="use a positive number of seconds"):
        make_pool(1, deadline_s=wrong)
