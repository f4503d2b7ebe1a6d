"""What the stages of a pipeline do when: a picture of a real run, its bubble, and the bubble of an ideal one.

    python -m benchmarks.pipeline_timeline --stages 2 --patches 2 4 --steps 6 --png timeline.png

Owns the runs. What a bubble is, and schedules and pictures, are pipeline_schedule.py's. Four bubbles are told, all of
the steps after the warm-up:

- *clock*: of this run, as the ranks saw it. On fewer cores than stages it is the cores that wait, not the pipeline.
- *measured costs*: of the order that the stages kept to and of what waits for what, each patch taking the median of
  what it took here, messages no time. What remains is filling, draining, and stages and patches that differ.
- *counted costs*: the same, each patch taking the operations of its tokens in the stage's blocks. Needs no clock.
- *even*: of as many stages and patches that are all alike: nothing but filling and draining.

Also counted: bytes a step beside ulysses and ring on as many ranks, and each rank's weights. Without --model, a small
one of random weights.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.pipeline_schedule import (
    BEGAN,
    ENDED,
    FIRST,
    Cost,
    Span,
    bubble,
    counted_cost,
    draw,
    even_order,
    ideal_bubble,
    orders_of,
    picture,
    scaled,
    schedule,
    steady,
)
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.adapter import FluxAdapter
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.family import FluxModel
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.parallel.pipefusion import PatchedSequence
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence


def euler_run(config: FluxConfig, workload: Workload, *, steps: int) -> InWorkerRun:
    """Euler steps from sigma 1 to 0 over random inputs."""
    tensors = workload.tensors(config)
    sigmas = torch.linspace(1, 0, steps + 1).tolist()
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1.0)]
    for step in range(1, steps + 1):
        ratio = sigmas[step] / sigmas[step - 1]
        ends = {} if step == steps else {"sigma": sigmas[step], "timestep": sigmas[step]}
        states.append(RecurrenceStep(inputs=((step - 1, ratio),), denoised=((step - 1, 1 - ratio),), **ends))
    shape = (*tensors["img"].shape[:2], config.out_channels)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    call = ModelCall(tensors=tensors, out_shape=shape, out_dtype=torch.float32)
    recurrence = SamplerRecurrence(states=tuple(states), step_ends=tuple(range(steps)))
    return InWorkerRun(recurrence=recurrence, conds=(call,), cfg=1.0, given={0: noise}, timeline=True)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan's run: bytes sent a step by all ranks, bytes of weights by rank, seconds of a step and when what was done.

    `stages` are the spans of each stage, `after` those after the warm-up; none without a pipeline.
    """

    plan: ParallelPlan
    sent_bytes: float
    held_bytes: list[int]
    step_s: float
    stages: list[list[Span]]
    after: list[list[Span]]
    counted: Cost

    @property
    def measured_cost(self) -> Cost:
        """What each stage's patches took, median over the steps."""
        took: dict[tuple[int, int], list[float]] = {}
        for stage, spans in enumerate(self.after):
            for span in spans:
                took.setdefault((stage, int(span[FIRST])), []).append(span[ENDED] - span[BEGAN])
        medians = {place: statistics.median(seconds) for place, seconds in took.items()}
        return lambda stage, patch: medians[stage, patch]

    def scheduled(self, cost: Cost) -> list[list[Span]]:
        """The order of this run after its warm-up, on stages that take `cost`."""
        return schedule(orders_of(self.after), cost)

    def bubbles(self) -> dict[str, float]:
        """By the names that the file's docstring explains."""
        patches, stages = self.plan.num_patches, len(self.after)
        return {
            "clock": bubble(self.after),
            "measured costs": bubble(self.scheduled(self.measured_cost)),
            "counted costs": bubble(self.scheduled(self.counted)),
            "even": ideal_bubble([1.0] * stages, patches=patches, calls=len(self.after[0]) // patches),
        }

    def bubble_within_a_step(self) -> float:
        """Of counted costs, when each step begins and ends with an empty pipeline, as in the host's loop."""
        orders = even_order(len(self.after), patches=self.plan.num_patches, calls=1)
        return bubble(schedule(orders, self.counted))

    def describe(self) -> str:
        """A line."""
        held = ", ".join(f"{part / 1e6:.1f}" for part in self.held_bytes)
        line = f"{self.plan.describe()}: {self.sent_bytes / 1e6:.2f} MB a step, weights {held} MB"
        told = [f"{name} {share:.1%}" for name, share in self.bubbles().items()] if self.after else []
        return f"{line}, bubble: {', '.join(told)}" if told else line


def measure(pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: InWorkerRun, *, warm: bool = True) -> Measured:
    """One run, after one to `warm` the machine up."""
    if warm:
        pool.sample(spec, plan, run)
    ranks = pool.sample(spec, plan, run).ran
    steps, tokens = len(run.recurrence.step_ends), run.conds[0].tensors
    adapter = FluxAdapter(FluxConfig.from_header(read_header(spec.path)))
    sequence = PatchedSequence(tokens["txt"].shape[1], tokens["img"].shape[1], plan.num_patches, plan.parts)
    stages = [list(rank.timeline.spans) for rank in ranks[:: plan.parts] if rank.timeline is not None]
    return Measured(
        plan=plan,
        sent_bytes=sum(rank.sent_bytes for rank in ranks) / steps,
        held_bytes=pool.load(spec, plan).parameter_bytes[: plan.ranks],
        step_s=max(statistics.median(rank.step_s[1:]) for rank in ranks),
        stages=stages,
        after=[steady(spans, plan.warmup_steps) for spans in stages],
        counted=counted_cost(adapter, sequence, stages=plan.pipefusion),
    )


def pictures(measured: Measured) -> str:
    """The run as text, and its order after the warm-up on stages that take counted costs."""
    ideal = measured.scheduled(measured.counted)
    return f"by the clock:\n{picture(measured.stages)}\nby counted costs, after the warm-up:\n{picture(ideal)}"


def rows_of(measured: Measured) -> list[tuple[str, list[list[Span]], str]]:
    """The same for `draw`."""
    name, shares, ideal = measured.plan.describe(), measured.bubbles(), measured.scheduled(measured.counted)
    told = f"{name}, the same order after the warm-up by counted costs: bubble {shares['counted costs']:.1%}"
    return [
        (f"{name}, by the clock: bubble {shares['clock']:.1%}", scaled(measured.stages, 1000), "ms"),
        (told, scaled(ideal, 1e-9), "10^9 operations"),
    ]


def main() -> None:
    """Measure every number of patches, print, and draw if asked."""
    parser = argparse.ArgumentParser(description="Timelines of pipelines, and what they send and hold.")
    parser.add_argument("--model", help="a Flux.1 .safetensors file (default: a small random one)")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--patches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=512, help="pixels")
    parser.add_argument("--height", type=int, default=512, help="pixels")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--devices", help="default: as many CPU ranks as stages")
    parser.add_argument("--png", metavar="FILE.png")
    arguments = parser.parse_args()
    plans = [ParallelPlan(pipefusion=arguments.stages, patches=patches) for patches in arguments.patches]
    others = [ParallelPlan(ulysses=arguments.stages), ParallelPlan(ring=arguments.stages)]
    workload = Workload(width=arguments.width, height=arguments.height, text_tokens=arguments.text_tokens)
    devices = parse_devices(arguments.devices or f"cpu:{arguments.stages}").devices
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or str(Path(folder) / "sample.safetensors")
        if arguments.model is None:
            write_sample(path, sample_config(depth=2, depth_single=4))
        spec, config = ModelSpec.of(path), FluxConfig.from_header(read_header(path))
        for plan in (*plans, *others):
            FluxModel(config).check_plan(plan)
        run = euler_run(config, workload, steps=arguments.steps)
        drawn = []
        with Pool(devices) as pool:
            for plan in (*plans, *others):
                measured = measure(pool, spec, plan, run)
                sys.stdout.write(f"{measured.describe()}\n")
                if measured.stages:
                    drawn += rows_of(measured)
                    sys.stdout.write(f"{pictures(measured)}\n")
    if arguments.png:
        draw(drawn, arguments.png)


if __name__ == "__main__":
    main()
