"""Ranks on several machines for tests, the models that they run, and what one process makes of those.

Owns: pools whose further machines are this one again (loopback.py), a Flux and a Wan, their reference results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from families.files import write_model_files
from families.variants import FILES
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.trial import Results, Trial
from parallel_runtime.cli.verify import Inputs, PlanRunner, control_options
from parallel_runtime.cli.workload import Workload, relative_error, worst
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

from .loopback import LoopbackMachine

FLUX, WAN = "flux.safetensors", "tiny_wan_t2v.safetensors"
CFG = ParallelPlan(cfg=2)  # two calls, of unequal text
ALL = ParallelPlan(cfg=2, ulysses=2, pipefusion=2)
WORKLOAD = Workload(width=112, height=80, text_tokens=13, batch=2)


class OwnTrial:
    """The calls of a Flux that blocks of ours compute, beside diffusers."""

    def __init__(self, path: Path, workload: Workload) -> None:
        config = FluxConfig.from_header(read_header(path))
        self.spec = ModelSpec.of(path, "float32")
        self.calls = workload.calls(config, CFG.cfg)

    def results(self, run: Callable[[Sequence[Inputs]], Results], _: torch.dtype) -> Results:
        return run(self.calls)

    def references(self, *_: torch.dtype) -> Results:
        return list(map(ReferenceModel(self.spec.path), self.calls))

    def close(self) -> None:
        """Nothing is held elsewhere."""


@dataclass
class Model:
    """A file's calls, and what one process that knows nothing of ours makes of them."""

    trial: Trial | OwnTrial

    @property
    def spec(self) -> ModelSpec:
        return self.trial.spec

    @cached_property
    def expected(self) -> Results:
        return self.trial.references(torch.float32, torch.float32)

    def error(self, pool: Pool, plan: ParallelPlan, *, control: bool = False) -> float:
        """The largest relative error of a step under a plan; with `control`, of one made wrong on purpose."""
        options = control_options(plan, WORKLOAD) if control else {}
        runner = PlanRunner(pool, self.spec, plan, options=options)
        results = self.trial.results(runner.run, torch.float32)
        return worst([relative_error(*pair) for pair in zip(results, self.expected, strict=True)])


@contextmanager
def flux_model(folder: Path, workload: Workload = WORKLOAD) -> Iterator[Model]:
    """Blocks of ours: 12 heads, two double and two single blocks."""
    path = folder / FLUX
    if not path.is_file():
        write_sample(path, sample_config(heads=12, depth=2, depth_single=2))
    yield Model(OwnTrial(path, workload))


@contextmanager
def wan_model(folder: Path, workload: Workload = WORKLOAD) -> Iterator[Model]:
    """ComfyUI's own module: 5 heads, three blocks."""
    if not (folder / WAN).is_file():
        write_model_files(folder, [FILES[WAN]])
    path, device = str(folder / WAN), parse_devices("cpu:1").devices[0]
    trial = Trial(path, "float32", workload, [ALL], steps=1, comfyui=str(comfyui_path()), device=device)
    with closing(trial):
        yield Model(trial)


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


__all__ = ["Inputs", "Model", "flux_model", "several_machines", "wan_model"]
