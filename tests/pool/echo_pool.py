"""Pools of CPU ranks that run the engines of engines.py, and what to ask them."""

from pathlib import Path

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


def is_alive(pid):
    """Whether a process exists as anything but a corpse that waits for its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
