"""A load may go on for minutes without a sign that it gets on; a process that does not run is found all the same."""

import os
import signal

import pytest
import torch

from parallel_runtime.errors import PoolError
from pool.echo_pool import first_line, make_pool, make_spec, run_step

DEADLINE_S, LOAD_S = 3.0, 30.0


@pytest.fixture(scope="module")
def ranks():
    """Two ranks whose requests may show no sign of life for 3 s, and loads for 30 s."""
    with make_pool(deadline_s=DEADLINE_S, load_deadline_s=LOAD_S) as made:
        yield made


def test_a_rank_that_is_stopped_while_it_loads_is_found_by_its_silence(ranks):
    ranks.start()
    with pytest.raises(PoolError) as caught:
        ranks.load(make_spec("stop1"))
    assert first_line(caught.value).startswith("rank 1: no answer to LOAD and no heartbeat for ")
    assert "held by a signal; the deadline is 3 s" in first_line(caught.value)


def test_a_rank_that_is_stopped_while_idle_is_found_by_the_next_load(ranks):
    run_step(ranks)
    os.kill(ranks.status()["pids"][1], signal.SIGSTOP)
    with pytest.raises(PoolError, match="^rank 1: no answer to LOAD .* held by a signal; the deadline is 3 s"):
        ranks.load(make_spec("quick"))
    assert torch.equal(run_step(ranks).out, torch.arange(10.0))
