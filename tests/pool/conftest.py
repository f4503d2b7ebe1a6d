"""Pools of real ranks that run the engines of engines.py."""

import functools
from pathlib import Path

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import Device
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

HERE = str(Path(__file__).parent)


def make_pool(num_ranks=2, **settings):
    """A pool of CPU ranks with the echo engine, not started."""
    settings = {"engine": "engines:Echo", "python_path": (HERE,), **settings}
    return Pool(tuple(Device("cpu", index) for index in range(num_ranks)), **settings)


def make_spec(name="model"):
    """The identity of a file that these engines do not open."""
    return ModelSpec(f"/nowhere/{name}", "float32", "flux", 1, 1)


def run_step(pool, *tensors, spec=None, plan=None, check_cancelled=None, **options):
    """Sum the tensors (by default a small one) in the pool. Keys of `faults` are ranks."""
    tensors = tensors or (torch.arange(10.0),)
    if "faults" in options:
        options["faults"] = {str(rank): actions for rank, actions in options["faults"].items()}
    return pool.step(
        spec or make_spec(),
        plan or ParallelPlan(ulysses=len(pool.devices)),
        {f"x{index}": tensor for index, tensor in enumerate(tensors)},
        out_shape=tuple(tensors[0].shape),
        out_dtype=tensors[0].dtype,
        options=options,
        check_cancelled=check_cancelled,
    )


@pytest.fixture(scope="session")
def new_pool():
    return make_pool


@pytest.fixture(scope="session")
def spec_of():
    return make_spec


@pytest.fixture(scope="session")
def step():
    return run_step


@pytest.fixture(scope="module")
def pool():
    """Two ranks that a whole module shares. A test that ends them leaves the next test a fresh start."""
    with make_pool() as shared:
        shared.start()
        yield shared


@pytest.fixture
def pool_of():
    """Makes pools of a test's own, closed when it ends."""
    made = []

    @functools.wraps(make_pool)
    def make(*arguments, **settings):
        made.append(make_pool(*arguments, **settings))
        return made[-1]

    yield make
    for own in made:
        own.close()
