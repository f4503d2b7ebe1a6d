"""A pool that works: what is asked is answered, whatever its size, and nothing of one request reaches another."""

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from host.forked_ranks import start_ranks
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.wire.protocol import DTYPE_BYTES
from pool.echo_pool import Gate, make_pool, make_spec, run_step, wait_until

MIB = 1 << 20


def test_a_step_gives_back_what_the_ranks_wrote(pool):
    result = run_step(pool, torch.arange(101.0), torch.full((101,), 2.0), add=0.5)
    assert torch.equal(result.out, torch.arange(101.0) + 2.5)
    assert [rank.memory.resident_bytes for rank in result.ranks] == [0, 1]
    assert 0 < max(rank.ran.step_s for rank in result.ranks) < result.wall_s


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BYTES) - {"bool", "float8_e4m3fn", "float8_e5m2"}))
def test_every_dtype_travels_both_ways(pool, dtype):
    given = torch.tensor([[1, 2, 3], [4, 5, 100]], dtype=getattr(torch, dtype))
    assert torch.equal(run_step(pool, given, add=1).out, given + 1)


@pytest.mark.parametrize(
    "given",
    [torch.tensor(3.0), torch.zeros(5, 0), torch.nn.Parameter(torch.ones(3))],
    ids=["scalar", "empty", "parameter"],
)
def test_any_kind_of_tensor_travels(pool, given):
    """Of any layout: test_repeated_inputs.py's."""
    out = run_step(pool, given).out
    assert torch.equal(out, given.detach())
    assert not out.requires_grad


def test_a_step_works_in_inference_mode_and_outside_of_it(pool):
    with torch.inference_mode():
        inside = run_step(pool, torch.ones(3)).out
    assert torch.equal(run_step(pool, inside).out, torch.ones(3))


def test_results_are_copies_that_later_steps_do_not_touch(pool):
    first = run_step(pool, torch.ones(1000)).out
    run_step(pool, torch.zeros(1000))
    assert first.eq(1).all()


def test_a_result_outlives_the_workers(pool):
    result = run_step(pool, torch.ones(MIB)).out
    view = pool._workers.generation.segments[0].words()
    os.kill(pool.status()["pids"][1], 9)
    while pool.state != "failed":
        time.sleep(0.01)
    last = view[0]
    assert run_step(pool, torch.zeros(5)).out.eq(0).all()
    gc.collect()
    assert result.eq(1).all()
    assert view[0] == last  # the dead generation's memory is still mapped while somebody views it


def test_a_request_bigger_than_the_segment_goes_to_a_further_one(pool_of):
    pool = pool_of(1, segment_bytes=MIB)
    fits = (MIB - 4096) // 2  # bytes: as much again for the result, and the control page
    segments = []
    for num_bytes in (fits, fits + 1, 8 * MIB, 10, 4 * MIB, 32 * MIB, 8 * MIB, fits):
        given = torch.randint(0, 200, (num_bytes,), dtype=torch.uint8)
        assert torch.equal(run_step(pool, given, add=1).out, given + 1)
        segments.append(pool._workers.generation.segments.indices)
    # made once, used again while it is big enough, replaced when it is not
    assert segments == [[0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 2], [0, 2], [0, 2]]


def test_a_plan_of_fewer_ranks_runs_and_one_of_more_is_refused(pool):
    for plan in (ParallelPlan(ulysses=2), ParallelPlan()):
        assert run_step(pool, plan=plan).out.numel() == 10
    with pytest.raises(ValueError, match="ulysses=3 needs 3 ranks, the pool has 2; name more devices"):
        run_step(pool, plan=ParallelPlan(ulysses=3))
    assert pool.status()["meshes"][-2:] == ["uly2", "single"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensors": {"out": torch.ones(1)}}, "named 'out'"),
        ({"tensors": {"Bad name": torch.ones(1)}}, "'0.Bad name' is not 1 to 24"),
        ({"out_shape": (1, -1)}, "no size may be below 0"),
        ({"out_shape": (1,) * 7}, "7 dims, at most 6"),
        ({"out_dtype": torch.complex64}, "complex64"),
        ({"options": {"a": object()}}, "cannot be written as JSON"),
    ],
)
def test_what_cannot_travel_is_refused_and_the_pool_goes_on(pool, change, reason):
    request = {"tensors": {}, "out_shape": (1,), "out_dtype": torch.float32, **change}
    generation = pool.generation
    with pytest.raises(ValueError, match=reason):
        pool.run(make_spec(), ParallelPlan(ulysses=2), [ModelCall(**request)])
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert pool.generation == generation


def test_the_pattern_check_reports_each_rank(pool):
    assert pool.exchange_pattern(ParallelPlan(ulysses=2)) == [0, 7]


def test_a_callback_that_calls_its_own_pool_is_told_so(pool):
    with pytest.raises(RuntimeError, match="from a callback of its own request"):
        pool.load(make_spec("inner"), progress=lambda *_: pool.close())
    found = []
    with ThreadPoolExecutor(1) as other:
        asked = lambda *_: found.append((pool.asked_here, other.submit(lambda: pool.asked_here).result()))  # noqa: E731
        pool.load(make_spec("third"), progress=asked)
    assert set(found) == {(True, False)} and not pool.asked_here
    assert torch.equal(run_step(pool).out, torch.arange(10.0))


def test_a_thread_that_waits_to_free_weights_is_seen_until_it_is_let_in_and_no_other(pool):
    found, looks = [], []
    with ThreadPoolExecutor(2) as others:

        def asked(*_):
            if not found:
                found.append(others.submit(pool.start, check_cancelled=lambda: looks.append(pool.is_waited_for)))
                wait_until(lambda: looks)
                found.append(others.submit(pool.unload, make_spec("none")))
                wait_until(lambda: pool.is_waited_for)

        pool.load(make_spec("fourth"), progress=asked)
        assert looks[0] is False and [each.result() for each in found] == [None, None]
    assert not pool.is_waited_for
    pool.unload(make_spec("fourth"))


def test_on_sent_is_called_while_the_ranks_are_at_the_request(pool, tmp_path):
    """Rank 0 answers once the file that it is called to make is there."""
    go = tmp_path / "go"
    assert torch.equal(run_step(pool, on_sent=go.touch, faults={0: [["wait_at", str(go)]]}).out, torch.arange(10.0))
    with pytest.raises(KeyError):
        run_step(pool, on_sent={}.popitem)
    assert torch.equal(run_step(pool).out, torch.arange(10.0))


def test_requests_of_many_threads_go_one_after_the_other(pool):
    wrong = []

    def ask(value):
        for _ in range(20):
            given = torch.full((5000,), float(value))
            if not torch.equal(run_step(pool, given).out, given):
                wrong.append(value)

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.full
def test_stepping_closing_and_asking_for_the_status_at_once_never_blocks(pool_of):
    pool = pool_of(1)
    pool.start()
    done = threading.Event()
    results = []

    def ask():
        while not done.is_set():
            results.append(torch.equal(run_step(pool).out, torch.arange(10.0)))

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for thread in askers:
        thread.start()
    for _ in range(2):
        time.sleep(0.1)
        closer = threading.Thread(target=pool.close)
        closer.start()
        while closer.is_alive():
            assert pool.status()["state"] in ("stopped", "starting", "idle", "loading", "busy")
            closer.join(0.01)
    done.set()
    for thread in askers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in askers)
    assert results
    assert all(results)


def test_the_state_follows_what_happens(pool_of, tmp_path):
    start_ranks()  # a forked one is there before anybody looks
    pool, gate = pool_of(1), Gate(tmp_path)
    states = [pool.state]

    def look():
        reached = gate.reached
        states.append(pool.state)
        if reached:
            gate.open()

    pool.start(check_cancelled=lambda: states.append(pool.state))
    states.append(pool.state)
    run_step(pool)  # the model is loaded by now, however long that took
    run_step(pool, check_cancelled=look, faults={0: [gate.waits]})
    states.append(pool.state)
    pool.close()
    states.append(pool.state)
    distinct = [state for state, before in zip(states, [None, *states], strict=False) if state != before]
    assert distinct == ["stopped", "starting", "idle", "busy", "idle", "stopped"]
    assert pool.generation == 1


def test_the_status_names_what_is_there_and_no_folder(pool):
    run_step(pool)
    status = pool.status()
    assert status["devices"] == ["cpu:0", "cpu:1"]
    assert len(status["pids"]) == 2
    assert "model" in [model["name"] for model in status["models"]]
    assert [memory["resident_bytes"] for memory in status["memory"]] == [0, 1]
    assert "nowhere" not in str(status)


def test_a_closed_pool_ends_its_workers_gently_and_can_start_again(pool_of):
    pool = pool_of(1)
    pool.close()
    run_step(pool)
    (rank,) = pool._workers.generation.ranks
    pool.close()
    pool.close()
    assert rank.end_text() == "exited with code 0"
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert pool.generation == 2


@pytest.mark.parametrize("settings", [{"num_ranks": 0}, {"num_ranks": 33}, {"threads_per_rank": 0}])
def test_a_pool_that_cannot_be_is_refused_at_once(settings):
    with pytest.raises(ValueError, match="; "):
        make_pool(**settings)
