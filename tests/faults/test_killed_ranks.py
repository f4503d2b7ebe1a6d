"""A rank is killed: idle, while it loads, in the middle of an exchange. The prompt fails at once, naming it."""

import logging
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from pool.echo_pool import FRESH, failure, first_line, held, is_alive, make_spec, run_step, wait_until

from parallel_runtime.errors import PoolError


@pytest.mark.parametrize("num_mib", [pytest.param(8, marks=pytest.mark.full), 64])
def test_a_rank_killed_in_the_middle_of_an_exchange(pool, num_mib, tmp_path):
    """The other rank's "connection closed by peer" must not be taken for the cause."""
    exchange = ["exchange", num_mib << 20, 3600.0]
    victim, generation = pool.status()["pids"][1], pool.generation
    exchanged, killed = tmp_path / "exchanged", []

    def kill():
        if not killed and exchanged.exists():  # both do nothing else from there on
            killed.append(os.kill(victim, signal.SIGKILL))

    error = failure(pool, check_cancelled=kill, faults={0: [[*exchange, str(exchanged)]], 1: [exchange]})
    assert first_line(error) == f"rank 1: killed by SIGKILL; {FRESH}"
    assert error.rank == 1
    assert (pool.generation, pool.status()["pids"]) == (generation, []), "something was started again by itself"
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert pool.generation == generation + 1


def test_a_rank_killed_while_it_loads(pool):
    """The other rank has the whole model by then, or not; the next prompt loads it anew in both."""
    pids = pool.status()["pids"]
    with pytest.raises(PoolError, match="^rank 1: killed by SIGKILL; the next prompt starts fresh workers"):
        pool.load(make_spec("die1"))
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert held(run_step(pool).ranks) == [1, 1]


def test_a_rank_that_dies_while_idle_takes_the_others_along_and_the_next_prompt_works(pool, caplog):
    caplog.set_level(logging.WARNING)
    pids = pool.status()["pids"]
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    wait_until(lambda: pool.state == "failed")
    assert torch.equal(run_step(pool).out, torch.arange(10.0))
    assert [record.getMessage() for record in caplog.records] == [
        f"parallel workers failed while idle: rank 1: killed by SIGKILL; {FRESH}"
    ]


def closed_on_exec(pid):
    """Whether the descriptors that a rank was given are closed in what it starts, by what they are for."""
    given = re.findall("--(lifeline|socket|store)=([0-9]+)", Path(f"/proc/{pid}/cmdline").read_text())
    said = {name: Path(f"/proc/{pid}/fdinfo/{number}").read_text() for name, number in given}
    return {name: bool(int(re.search("flags:.*?([0-7]+)", text)[1], 8) & os.O_CLOEXEC) for name, text in said.items()}


def test_a_crash_names_the_signal_shows_where_and_ends_what_the_rank_has_started(lone_rank, tmp_path):
    noted, (rank,) = tmp_path / "child", lone_rank.status()["pids"]
    assert closed_on_exec(rank) == dict.fromkeys(("lifeline", "socket", "store"), True)
    before = [["start_child", str(noted)], ["say", "about to crash"]]
    error = failure(lone_rank, faults={0: [*before, ["send_signal", "SIGSEGV"]]})
    assert first_line(error) == f"rank 0: killed by SIGSEGV; {FRESH}"
    assert "about to crash" in error.detail
    assert "in send_signal" in error.detail
    child = int(noted.read_text())
    wait_until(lambda: not is_alive(child))
