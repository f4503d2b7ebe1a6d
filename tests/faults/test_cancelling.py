"""Cancelling: at once for the caller, never in the middle of a collective for the ranks, and without a trace after.

At random moments: soak.py.
"""

import os
import signal
import threading

import pytest
import torch
from pool.echo_pool import Gate, held, make_spec, run_step, wait_until

from parallel_runtime.pool import generation as of_pool
from parallel_runtime.weight_delta import WeightDelta, WeightDeltas


class Cancelled(Exception):  # noqa: N818  stands for the caller's own
    """What the caller raises to cancel."""


def at(gate):
    """A check that cancels once a rank is at the gate."""

    def check():
        if gate.reached:
            raise Cancelled

    return check


def now():
    """A check that cancels."""
    raise Cancelled


def test_a_cancelled_step_returns_at_once_and_the_next_one_is_right(pool, tmp_path):
    run_step(pool)
    generation, gate = pool.generation, Gate(tmp_path)
    with pytest.raises(Cancelled):
        run_step(pool, torch.ones(9), check_cancelled=at(gate), faults={0: [gate.waits]})
    assert pool.state == "busy", "the ranks are left to finish: one of them is held"
    # the next one waits for it: nothing else opens the gate
    assert torch.equal(run_step(pool, torch.zeros(9), add=2, check_cancelled=gate.open).out, torch.full((9,), 2.0))
    assert pool.generation == generation


@pytest.mark.parametrize("asked_meanwhile", [False, True])
def test_what_a_cancelled_run_keeps_is_freed_once_its_last_step_has_ended(pool, tmp_path, asked_meanwhile):
    (before, *_), gate = [rank.ran.tokens for rank in run_step(pool).ranks], Gate(tmp_path)
    with pytest.raises(Cancelled):
        run_step(pool, check_cancelled=at(gate), faults={0: [gate.waits]})
    for _ in range(2):
        pool.give_back([], of_run=True)
    assert pool.state == "busy", "nobody has waited for it"
    if not asked_meanwhile:
        gate.open()
        wait_until(lambda: pool.state == "idle")
    for _ in range(2):  # a step of the next run, whose state is not freed by it
        ranks = run_step(pool, check_cancelled=gate.open).ranks
        assert [rank.ran.tokens for rank in ranks] == [before + 1] * 2


def test_the_memory_of_a_cancelled_step_is_not_written_before_it_has_ended(pool, tmp_path):
    """Rank 0 reads its inputs once the next step is asked for, and says what it saw."""
    seen, gate = tmp_path / "seen", Gate(tmp_path)
    late = [gate.waits, ["write_inputs", str(seen)]]
    with pytest.raises(Cancelled):
        run_step(pool, torch.full((4,), 5.0), check_cancelled=at(gate), faults={0: late})
    run_step(pool, torch.full((4,), 6.0), check_cancelled=gate.open)
    assert seen.read_text() == "[5.0, 5.0, 5.0, 5.0]"


def test_a_request_waiting_for_a_cancelled_one_can_be_cancelled_too(pool, tmp_path):
    gate = Gate(tmp_path)
    with pytest.raises(Cancelled):
        run_step(pool, check_cancelled=at(gate), faults={0: [gate.waits]})
    for _ in range(2):
        with pytest.raises(Cancelled):
            run_step(pool, check_cancelled=now)
    assert torch.equal(run_step(pool, check_cancelled=gate.open).out, torch.arange(10.0))


def test_a_cancelled_load_stops_early_and_leaves_no_part_of_the_model(pool):
    """Rank 0 has the whole model when rank 1, which is held half-way, is told to stop."""
    before, loaded = held(run_step(pool).ranks), [0]

    def cancel():
        if loaded[-1] == 150:
            raise Cancelled

    with pytest.raises(Cancelled):
        pool.load(make_spec("held1"), progress=lambda done, _: loaded.append(done), check_cancelled=cancel)
    assert "held1" not in [model["name"] for model in pool.status()["models"]]
    wait_until(lambda: pool.state == "idle")  # though nobody asks: stock prompts need the memory
    assert held(run_step(pool).ranks) == before
    assert held(pool.load(make_spec("held1")).ranks) == [count + 1 for count in before]
    pool.unload(make_spec("held1"))


def test_a_cancelled_step_is_one_though_the_system_has_no_thread_more(pool, tmp_path, monkeypatch, caplog):
    """The next request takes in then what it left."""
    gate = Gate(tmp_path)
    wait_until(lambda: pool._settling is None)  # a thread of a test before would take it in, too

    def refused(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(Cancelled):
            run_step(pool, check_cancelled=at(gate), faults={0: [gate.waits]})
    assert "what a cancelled request left stays until the next one: can't start new thread" in caplog.text
    assert pool.state == "busy"
    assert torch.equal(run_step(pool, check_cancelled=gate.open).out, torch.arange(10.0)) and pool.state == "idle"


def test_a_cancelled_change_of_weights_stops_early_and_is_made_whole_by_the_next(pool):
    """The second of its thirty changes is held until ranks are told to stop."""
    keys = ["x", "held", *(f"x{index}" for index in range(28))]
    change = WeightDeltas(
        "slow", tuple(WeightDelta(key=key, kind="diff", strength=1.0, values=(None,)) for key in keys)
    )
    pool.load(make_spec(), deltas=WeightDeltas("quick", change.deltas[:1]))
    memory, segments = pool.status()["memory"], pool._workers.generation.segments
    begun = [segments.beats(rank) for rank in range(2)]

    def cancel():
        if all(segments.beats(rank) >= begun[rank] + 2 for rank in range(2)):  # both are at "held"
            raise Cancelled

    with pytest.raises(Cancelled):
        pool.load(make_spec(), deltas=change, check_cancelled=cancel)
    pool.load(make_spec())
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    one_more = [{**each, "reserved_bytes": each["reserved_bytes"] + 1} for each in memory]
    assert pool.status()["memory"] == one_more, "ranks have done the first of the changes and no other"


def test_a_cancel_before_anything_is_sent_sends_nothing(pool):
    run_step(pool)
    with pytest.raises(Cancelled):
        run_step(pool, check_cancelled=now, faults={0: [["sleep", 5]]})
    assert pool.state == "idle"


def test_a_cancelled_start_goes_on_and_the_next_request_takes_it_over(pool_of, monkeypatch):
    """Its rank is held by a signal from the first moment on."""
    pool, spawn, made = pool_of(1), of_pool.spawn, []

    def stopped(*arguments, **more):
        made.append(spawn(*arguments, **more))
        os.kill(made[-1].pid, signal.SIGSTOP)
        return made[-1]

    monkeypatch.setattr(of_pool, "spawn", stopped)

    def cancel():
        if made:
            raise Cancelled

    with pytest.raises(Cancelled):
        pool.start(check_cancelled=cancel)
    assert pool.state == "starting"
    os.kill(made[0].pid, signal.SIGCONT)
    wait_until(lambda: pool.state == "idle")  # though nobody asks
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert (pool.generation, len(made)) == (1, 1)
