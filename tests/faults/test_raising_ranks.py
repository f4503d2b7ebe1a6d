"""A rank raises or runs out of memory: its own text is the first line of the error, and every rank is replaced."""

import logging
import resource

import psutil
import pytest
import torch
from pool.echo_pool import FRESH, Gate, failure, first_line, run_step

from parallel_runtime.errors import PoolError


def test_a_rank_that_raises_while_the_others_wait_for_it(pool):
    text = "rank 0 says no\nand why"
    pids = pool.status()["pids"]
    error = failure(pool, faults={0: [["fail", "ValueError", text]], 1: [["exchange", 1 << 20, 3600.0]]})
    assert first_line(error) == f"rank 0: ValueError: rank 0 says no; {FRESH}"
    assert "in fail\n" in error.detail
    assert "and why" in error.detail
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert set(pool.status()["pids"]).isdisjoint(pids), "a rank was kept"


def test_the_cause_is_preferred_to_an_earlier_consequence(pool, monkeypatch):
    """Rank 0 learns that its peer is gone before rank 1 has said why it went."""
    monkeypatch.setattr("parallel_runtime.pool.generation.SETTLE_S", 300.0)  # it ends with the cause
    peer = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    faults = {0: [["fail", "RuntimeError", peer]], 1: [["sleep", 0.05], ["fail", "ValueError", "the cause"]]}
    error = failure(pool, faults=faults)
    assert first_line(error) == f"rank 1: ValueError: the cause; {FRESH}"


def test_a_consequence_without_a_cause_is_reported_all_the_same(pool):
    peer = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    error = failure(pool, faults={0: [["fail", "RuntimeError", peer]], 1: [["sleep", 3600]]})
    assert first_line(error).startswith(f"rank 0: RuntimeError: {peer}; another rank ended")


def test_an_error_text_that_no_message_can_hold_is_cut(lone_rank):
    error = failure(lone_rank, faults={0: [["fail", "ValueError", "\N{GRINNING FACE}", 30_000]]})
    assert first_line(error).startswith("rank 0: ValueError: \N{GRINNING FACE}\N{GRINNING FACE}")
    assert len(str(error)) < 20_000


def test_memory_that_runs_out_in_a_step_is_named_and_the_next_prompt_is_right(lone_rank):
    """The limit is set in the rank itself, as an operator of containers may, for what it has and 64 MiB more."""
    run_step(lone_rank)
    (pid,) = lone_rank.status()["pids"]
    limit = psutil.Process(pid).memory_info().vms + (64 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
    line = first_line(failure(lone_rank, faults={0: [["allocate", 1 << 30]]}))
    assert line.startswith("rank 0: RuntimeError: ")
    assert "can't allocate memory" in line
    assert line.endswith(
        f"set weights in SP Config to sharded, or offloaded; use a smaller image, or free that device's memory; {FRESH}"
    )
    assert torch.equal(run_step(lone_rank).out, torch.arange(10.0))


def test_a_rank_that_fails_after_its_step_was_cancelled_does_not_fail_the_next_one(pool, caplog, tmp_path):
    class Cancelled(Exception):  # noqa: N818
        pass

    gate = Gate(tmp_path)

    def cancel():
        if gate.reached:
            raise Cancelled

    caplog.set_level(logging.WARNING)
    generation = pool.generation
    late = ["fail", "ValueError", "'/home/some body/a model.safetensors' is too late"]
    with pytest.raises(Cancelled):
        run_step(pool, check_cancelled=cancel, faults={1: [gate.waits, late]})
    assert torch.equal(run_step(pool, check_cancelled=gate.open).out, torch.arange(10.0))
    assert pool.generation == generation + 1
    for told in (caplog.text, pool.status()["last_failure"]):
        assert "rank 1: ValueError: 'a model.safetensors' is too late" in told, "a folder is nobody's business"


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
