"""Ranks on several machines for tests, the model that they run, and what one process makes of it.

Owns: pools whose further machines are this one again (loopback.py), a tiny model's calls and their reference results.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from host.tiny_hosted import OneProcess, spec_of, with_options, write_tiny
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error
from parallel_runtime.trials.workload import worst

from .loopback import LoopbackMachine

FILE = "wan.safetensors"
TEXTS = (13, 7)  # of two calls, as of both sides of cfg


@dataclass(frozen=True)
class Model:
    """A file's calls, and what ComfyUI's bare module makes of them."""

    spec: ModelSpec
    calls: list[ModelCall]
    expected: list[torch.Tensor]

    def error(self, pool: Pool, plan: ParallelPlan, *, control: bool = False) -> float:
        """The largest relative error of a step under a plan; with `control`, of one made wrong on purpose."""
        calls = self.calls
        if control and plan.parts > 1:
            calls = [with_options(call, local_attention=True) for call in calls]
        elif control:
            calls = [calls[0].of_first_row()] * len(calls)
        outs = pool.run(self.spec, plan, calls).outs
        return worst([relative_error(*pair) for pair in zip(outs, self.expected, strict=True)])


def tiny_model(folder: Path, *, width: int = 112, height: int = 80, frames: int = 5, batch: int = 2) -> Model:
    """12 heads, four blocks, in a file of that folder; a step of latents of so many pixels."""
    spec = spec_of(folder / FILE if (folder / FILE).is_file() else write_tiny(folder / FILE))
    with OneProcess(spec) as process:
        return Model(spec, *process.calls(TEXTS, width=width, height=height, frames=frames, batch=batch))


@contextmanager
def several_machines(
    folder: Path, ranks: Sequence[int], **options: object
) -> Iterator[tuple[Pool, list[LoopbackMachine]]]:
    """A pool of so many ranks on each machine, ours first; `folder` is where the others look for files."""
    machines = [
        LoopbackMachine(f"host-{number}", tuple(f"cpu:{index}" for index in range(count)), (str(folder),))
        for number, count in enumerate(ranks[1:], start=2)
    ]
    devices = parse_devices(f"cpu:{ranks[0]}").devices
    pool = Pool(devices, threads_per_rank=1, machines=lambda _: machines, **options)  # type: ignore[arg-type]
    with pool:
        yield pool, machines
