"""Pools of CPU ranks that run the engines of engines.py, and what to ask them."""

import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import Device
from parallel_runtime.errors import PoolError
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

HERE = str(Path(__file__).parent)
FRESH = "the next prompt starts fresh workers"


def make_pool(num_ranks=2, **settings):
    """A pool of CPU ranks with the echo engine, not started."""
    settings = {"engine": "engines:Echo", "python_path": (HERE,), **settings}
    return Pool(tuple(Device("cpu", index) for index in range(num_ranks)), **settings)


def make_spec(name="model"):
    """The identity of a file that these engines do not open."""
    return ModelSpec(f"/nowhere/{name}", "float32", 1, 1)


class StepResult(NamedTuple):
    """What a request of one call gave."""

    out: torch.Tensor
    ranks: list
    wall_s: float


def run_step(pool, *tensors, spec=None, plan=None, on_sent=lambda: None, check_cancelled=None, **options):
    """Sum the tensors (by default a small one) in the pool. Keys of `faults` are ranks."""
    tensors = tensors or (torch.arange(10.0),)
    if "faults" in options:
        options["faults"] = {str(rank): actions for rank, actions in options["faults"].items()}
    call = ModelCall(
        tensors={f"x{index}": tensor for index, tensor in enumerate(tensors)},
        out_shape=tuple(tensors[0].shape),
        out_dtype=tensors[0].dtype,
        options=options,
    )
    plan = plan or ParallelPlan(ulysses=len(pool.devices))
    result = pool.run(spec or make_spec(), plan, [call], on_sent=on_sent, check_cancelled=check_cancelled)
    return StepResult(result.outs[0], result.ranks, result.wall_s)


def held(replies):
    """How many models each rank holds, as `Echo` says it."""
    return [reply.memory.allocated_bytes for reply in replies]


def repeated(replies):
    """The names of the inputs that each rank got before, as `Echo` says them."""
    return [sorted(reply.ran.regions) for reply in replies]


def is_alive(pid):
    """Whether a process exists as anything but a corpse that waits for its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def failure(pool, *tensors, **options):
    """The error of a step that fails; all ranks have been replaced by nothing."""
    pids = pool.status()["pids"]
    with pytest.raises(PoolError) as caught:
        run_step(pool, *tensors, **options)
    assert pool.state == "failed"
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return caught.value


class Gate:
    """Where a rank stays, by the action `waits` or while it loads `spec`, until a test has looked."""

    def __init__(self, folder):
        self._path = folder / "gate"
        self.waits = ["wait_at", str(self._path)]
        self.spec = ModelSpec(str(self._path), "float32", 1, 1)

    @property
    def reached(self):
        """Whether a rank is there."""
        return Path(f"{self._path}.reached").exists()

    def open(self):
        """Let it go on."""
        self._path.touch()


def first_line(error):
    """What most clients show of an error."""
    return str(error).partition("\n")[0]


def wait_until(condition, timeout_s=300.0):
    """Wait for it, and fail when it does not come."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
