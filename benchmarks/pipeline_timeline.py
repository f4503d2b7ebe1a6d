"""What the stages of a pipeline do when: a picture of a real run, its bubble, and the bubble of an ideal one.

    python -m benchmarks.pipeline_timeline --stages 2 --patches 2 4 --steps 6 --png timeline.png

The *bubble* is the share of the stages' time after the warm-up in which they compute nothing, from the first patch that
comes to the last stage's last. The *ideal* one is that of the same run on stages that compute what these did, median
by stage, with messages that take no time: what remains is filling, draining and uneven stages. Also counted: bytes a
step beside ulysses and ring on as many ranks, and each rank's weights. Without --model, a small one of random weights.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from parallel_runtime.adapters.flux_config import FluxConfig
from parallel_runtime.adapters.flux_inputs import check_plan
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.sample_model import sample_config, write_sample
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool
from parallel_runtime.pool.resident import ResidentRun
from parallel_runtime.program import Program, State

CALL, FIRST, _, _, ASKED, BEGAN, ENDED = range(7)
Span = Sequence[float]


def euler_run(config: FluxConfig, workload: Workload, *, steps: int) -> ResidentRun:
    """Euler steps from sigma 1 to 0 over random inputs."""
    tensors = workload.tensors(config)
    sigmas = torch.linspace(1, 0, steps + 1).tolist()
    states = [State(given=True, sigma=1.0, timestep=1.0)]
    for step in range(1, steps + 1):
        ratio = sigmas[step] / sigmas[step - 1]
        ends = {} if step == steps else {"sigma": sigmas[step], "timestep": sigmas[step]}
        states.append(State(inputs=((step - 1, ratio),), denoised=((step - 1, 1 - ratio),), **ends))
    shape = (*tensors["img"].shape[:2], config.out_channels)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    call = ModelCall(tensors=tensors, out_shape=shape, out_dtype=torch.float32)
    program = Program(states=tuple(states), step_ends=tuple(range(steps)))
    return ResidentRun(program=program, conds=(call,), cfg=1.0, given={0: noise}, timeline=True)


def steady(spans: Sequence[Span], warm_calls: int) -> list[Span]:
    """The spans after the warm-up."""
    return [span for span in spans if span[CALL] >= warm_calls]


def bubble(stages: Sequence[Sequence[Span]]) -> float:
    """The share of the stages' time in which they compute nothing, from the first begin to the last end."""
    begin = min(spans[0][BEGAN] for spans in stages)
    end = max(spans[-1][ENDED] for spans in stages)
    busy = sum(span[ENDED] - span[BEGAN] for spans in stages for span in spans)
    return 1 - busy / ((end - begin) * len(stages))


def ideal_bubble(costs: Sequence[float], *, patches: int, calls: int) -> float:
    """`bubble` of stages that take `costs` a patch and of messages that take no time."""
    done: dict[tuple[int, int, int], float] = {}
    free = [0.0] * len(costs)
    for call in range(calls):
        for patch in range(patches):
            came = done.get((len(costs) - 1, call - 1, patch), 0.0)
            for stage, cost in enumerate(costs):
                came = free[stage] = done[stage, call, patch] = max(came, free[stage]) + cost
    return 1 - sum(costs) * patches * calls / (max(free) * len(costs))


def picture(stages: Sequence[Sequence[Span]], *, width: int = 110) -> str:
    """A line a stage: the patch's number while it computes (`#` all of them), a dot while it waits."""
    begin = min(spans[0][BEGAN] for spans in stages)
    end = max(spans[-1][ENDED] for spans in stages)
    lines = []
    for stage, spans in enumerate(stages):
        line = ["."] * width
        for span in spans:
            left, right = (int((span[at] - begin) / (end - begin) * (width - 1)) for at in (BEGAN, ENDED))
            mark = "#" if span[2] - span[FIRST] > 1 else str(int(span[FIRST]))
            line[left : right + 1] = [mark] * (right + 1 - left)
        lines.append(f"stage {stage} |{''.join(line)}|")
    return "\n".join(lines)


def draw(runs: Sequence[tuple[str, Sequence[Sequence[Span]]]], path: str) -> None:
    """The timelines as a PNG, one below the other; a colour a patch, time in ms. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + 1.6 * len(runs)), layout="constrained")
    for place, (title, stages) in enumerate(runs, 1):
        axes = figure.add_subplot(len(runs), 1, place)
        begin = min(spans[0][BEGAN] for spans in stages)
        for stage, spans in enumerate(stages):
            for span in spans:
                whole = span[2] - span[FIRST] > 1
                colour = "0.6" if whole else f"C{int(span[FIRST])}"
                left, length = (span[BEGAN] - begin) * 1000, (span[ENDED] - span[BEGAN]) * 1000
                axes.barh(stage, length, left=left, color=colour, edgecolor="white", linewidth=0.5)
        axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("ms")
    figure.savefig(path, dpi=120)


def measure(pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: ResidentRun) -> tuple[str, list[list[Span]]]:
    """A line about the plan, and its ranks' spans, after one run to warm the machine up."""
    pool.sample(spec, plan, run)
    ranks = pool.sample(spec, plan, run).ranks[: plan.ranks]
    steps = len(run.program.step_ends)
    sent = sum(rank["bytes"] for rank in ranks) / steps
    held = pool.load(spec, plan).parameter_bytes[: plan.ranks]
    line = (
        f"{plan.describe()}: {sent / 1e6:.2f} MB a step, weights {', '.join(f'{part / 1e6:.1f}' for part in held)} MB"
    )
    if plan.pipefusion == 1:
        return line, []
    stages = [rank["timeline"]["spans"] for rank in ranks[:: plan.parts]]
    after = [steady(spans, plan.warmup_steps) for spans in stages]
    costs = [statistics.median(span[ENDED] - span[BEGAN] for span in spans) for spans in after]
    ideal = ideal_bubble(costs, patches=plan.num_patches, calls=steps - plan.warmup_steps)
    return f"{line}, bubble {bubble(after):.1%}, ideal {ideal:.1%}", stages


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
            check_plan(config, plan)
        run = euler_run(config, workload, steps=arguments.steps)
        drawn = []
        with Pool(devices) as pool:
            for plan in (*plans, *others):
                line, stages = measure(pool, spec, plan, run)
                sys.stdout.write(f"{line}\n")
                if stages:
                    drawn.append((line, stages))
                    sys.stdout.write(f"{picture(stages)}\n")
    if arguments.png:
        draw(drawn, arguments.png)


if __name__ == "__main__":
    main()
