"""PipeFusion by numbers: what its stages wait, what it sends, and when which stage computes what.

    python -m benchmarks.pipefusion [--steps 6]

Owns the plans that are compared and benchmarks/pipefusion.md. What a bubble is, and schedules and their lines, are
pipeline_schedule.py's. ComfyUI's own modules of three classes, small and of random weights in fp32, whose
12 blocks divide into 2, 3 and 4 stages, on CPU ranks of one thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from benchmarks.pipeline_schedule import (  # noqa: E402
    Cost,
    Span,
    bubble,
    counted_cost,
    even_order,
    ideal_bubble,
    orders_of,
    picture,
    schedule,
    steady,
)
from families.files import ModelFile, write_model_files  # noqa: E402
from families.sd3 import sd3_file  # noqa: E402
from families.wan import wan_file  # noqa: E402
from host import layouts  # noqa: E402
from host.fetch import comfyui_path  # noqa: E402
from host.hosted_runs import Model, euler, make_run  # noqa: E402
from parallel_runtime.checkpoint import ComfyUI, ModelSpec, read_header  # noqa: E402
from parallel_runtime.devices import parse_devices  # noqa: E402
from parallel_runtime.models.hosted.call import TokenCall  # noqa: E402
from parallel_runtime.models.specs import SPECS  # noqa: E402
from parallel_runtime.parallel.attention import SequenceParallelAttention  # noqa: E402
from parallel_runtime.parallel.pipefusion import balanced_stages  # noqa: E402
from parallel_runtime.plan import ParallelPlan  # noqa: E402
from parallel_runtime.pool.calls import WorkerLoopRun  # noqa: E402
from parallel_runtime.pool.pool import Pool  # noqa: E402

TARGET = Path(__file__).with_name("pipefusion.md")
STAGES = (2, 3, 4)
PATCHES_A_STAGE = (1, 2, 4)
DRAWN = ("pipefusion=2,patches=4", "pipefusion=4,patches=8")
FLUX = "Flux.1"

BUBBLE = """## The bubble

The share of the stages' time after the warm-up in which they compute nothing, from the first patch to the last.

- *clock*: of the run, as the ranks saw it. Ranks took turns on the cores that there were, and a stage that waits for a
  core counts as computing: it says nothing of what as many devices would do.
- *counted*: of the order that the stages kept to in the run and what waits for what, each patch taking the operations
  of its tokens in the blocks of its stage, and messages no time. No clock.
- *even*: (N - 1) / (M C + N - 1) of N stages, M patches, C steps, all alike: filling and draining, once a run.
- *each step by itself*: counted, when every step begins and ends with an empty pipeline, as in ComfyUI's loop.
"""
SENT = """## Bytes a step

Counted by the ranks as they sent, all ranks together, a step, of one prompt of Flux.1. A stage sends hidden states to
the next and the last one the latent to the first, however many patches there are; Ulysses and Ring send in every block.
"""
TIMELINES = """## Who computes what, when

Of Flux.1, from the runs above; `#` is the warm-up, a digit or letter the patch, a dot waiting. Below each the order of
the same run on stages that take what is counted.
"""


@dataclass(frozen=True)
class Case:
    """A class's file, what its runs are of, and the tokens of each of its streams, in its own order."""

    file: ModelFile
    model: Model
    text: int
    streams: dict[str, int]

    def write(self, folder: Path) -> ModelSpec:
        """Its file, for ranks."""
        (path,) = write_model_files(folder, [self.file])
        return ModelSpec.of(path, "float32", comfyui=ComfyUI(str(comfyui_path()), ()))

    def run(self, steps: int) -> WorkerLoopRun:
        """Euler steps of one prompt."""
        recurrence = euler(steps, timesteps=1.0)
        return make_run(self.model, recurrence=recurrence, texts=(self.text,), timeline=True)

    def tokens(self, patches: int) -> list[int]:
        """Of each patch, as a rank deals them."""
        call = TokenCall(SequenceParallelAttention(), "")
        call.parts = patches
        dealt = [call.introduce(stream, total) for stream, total in self.streams.items()]
        return [sum(lengths) for lengths in zip(*dealt, strict=True)]

    def blocks(self, spec: ModelSpec, stages: int) -> list[int]:
        """Of each stage, as ranks cut them (`HostedWeights`)."""
        told, costs = SPECS[self.file.class_path], dict[str, float]()
        for name, entry in read_header(spec.path).tensors.items():
            for listed in told.staged:
                if name.startswith(f"{listed}."):
                    handed = told.handed_on(listed)
                    block = ".".join(name.split(".")[: listed.count(".") + 2])
                    share = entry.num_bytes / (1 if isinstance(handed, str) else len(handed))
                    costs[block] = costs.get(block, 0.0) + share
        in_order = sorted(
            costs, key=lambda block: (told.staged.index(block.rpartition(".")[0]), int(block.split(".")[-1]))
        )
        return [len(run) for run in balanced_stages([costs[block] for block in in_order], stages)]


CASES = {
    FLUX: Case(
        ModelFile(
            name="pipefusion_flux.safetensors",
            class_path="comfy.ldm.flux.model.Flux",
            layout=tuple(layouts.flux(layouts.FluxShape(hidden=512, depth=4, single=8))),
            seed=1,
        ),
        Model((16, 24, 24), 64, {"y": (32,), "guidance": ()}),
        18,  # as much text to the image as Flux.1 at 1024 x 1024
        {"img": 144, "txt": 18},
    ),
    "Wan": Case(
        wan_file("pipefusion", "t2v", heads=8, seed=2, num_layers=12),
        Model((16, 4, 12, 12), 48),
        16,
        {"x": 144},
    ),
    "SD3.5": Case(
        sd3_file("pipefusion", seed=3, twice=[], depth=12),
        Model((16, 24, 24), 48, {"y": (64,)}),
        18,
        {"x": 144, "context": 18},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan's run: bytes sent a step by all ranks, bytes of weights by rank, and when which stage did what.

    `stages` are the spans of each stage, `after` those after the warm-up; none without a pipeline.
    """

    plan: ParallelPlan
    sent_bytes: float
    held_bytes: list[int]
    stages: list[list[Span]]
    after: list[list[Span]]
    counted: Cost

    def scheduled(self) -> list[list[Span]]:
        """The order of this run after its warm-up, on stages that take what is counted."""
        return schedule(orders_of(self.after), self.counted)

    def bubbles(self) -> dict[str, float]:
        """By the columns that the page explains."""
        patches, stages = self.plan.num_patches, len(self.after)
        alone = even_order(stages, patches=patches, calls=1)
        return {
            "clock": bubble(self.after),
            "counted": bubble(self.scheduled()),
            "even": ideal_bubble([1.0] * stages, patches=patches, calls=len(self.after[0]) // patches),
            "each step by itself": bubble(schedule(alone, self.counted)),
        }

    def describe(self) -> str:
        """A line."""
        held = ", ".join(f"{part / 1e6:.1f}" for part in self.held_bytes)
        told = ", ".join(f"{name} {share:.1%}" for name, share in self.bubbles().items())
        return f"{self.plan.describe()}: {self.sent_bytes / 1e6:.2f} MB a step, weights {held} MB, bubble: {told}"


def plans(case: str) -> list[ParallelPlan]:
    """Pipelines, and of Flux.1 what as many ranks do without one."""
    found = [ParallelPlan(pipefusion=stages, patches=times * stages) for stages in STAGES for times in PATCHES_A_STAGE]
    if case != FLUX:
        return [plan for plan in found if (plan.pipefusion, plan.num_patches) in ((2, 2), (4, 8))]
    return found + [ParallelPlan(**{kind: ranks}) for ranks in STAGES for kind in ("ulysses", "ring")]


def measure(pool: Pool, case: Case, spec: ModelSpec, plan: ParallelPlan, *, steps: int) -> Measured:
    """One run. Raises `RuntimeError` for a pipeline that was empty between steps."""
    result = pool.sample(spec, plan, case.run(steps))
    if result.drained:
        raise RuntimeError(f"{plan.describe()}: {result.drained}")
    stages = [list(rank.timeline.spans) for rank in result.ran[:: plan.parts] if rank.timeline is not None]
    return Measured(
        plan=plan,
        sent_bytes=sum(rank.sent_bytes for rank in result.ran) / steps,
        held_bytes=pool.load(spec, plan).parameter_bytes[: plan.ranks],
        stages=stages,
        after=[steady(spans, plan.warmup_steps) for spans in stages],
        counted=counted_cost(case.blocks(spec, plan.pipefusion), case.tokens(plan.num_patches)),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]


def bubble_rows(found: dict[str, list[Measured]]) -> list[list[str]]:
    """A row a pipeline."""
    rows = []
    for name, measured in found.items():
        for each in measured:
            if each.after:
                shares = [f"{share:.1%}" for share in each.bubbles().values()]
                rows.append([name, str(each.plan.pipefusion), str(each.plan.num_patches), *shares])
    return rows


def sent_rows(measured: Sequence[Measured]) -> list[list[str]]:
    """A row a plan: bytes, and weights of the rank with the most."""
    rows = []
    for each in measured:
        if each.plan.pipefusion == 1 or each.plan.num_patches == each.plan.pipefusion * PATCHES_A_STAGE[1]:
            rows.append(
                [str(each.plan.ranks), each.plan.describe(), f"{each.sent_bytes:,.0f}", f"{max(each.held_bytes):,}"]
            )
    return sorted(rows, key=lambda row: int(row[0]))


def page(found: dict[str, list[Measured]], about: str) -> str:
    """All of it."""
    bubbles = ("class", "stages", "patches", "clock", "counted", "even", "each step by itself")
    lines = ["# PipeFusion by numbers", "", (__doc__ or "").strip(), "", fill(about, 120), "", BUBBLE]
    lines += [*table(bubbles, bubble_rows(found)), "", SENT]
    lines += table(("ranks", "plan", "bytes a step", "weights of the fullest rank, bytes"), sent_rows(found[FLUX]))
    lines += ["", TIMELINES]
    for each in [each for each in found[FLUX] if each.plan in map(ParallelPlan.parse, DRAWN)]:
        clock, counted = picture(each.stages), picture(each.scheduled())
        lines += [fill(each.describe(), 120), "", "```", f"by the clock:\n{clock}"]
        lines += [f"by counted costs, after the warm-up:\n{counted}", "```", ""]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    load_before, found = os.getloadavg()[0], dict[str, list[Measured]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(parse_devices(f"cpu:{max(STAGES)}").devices, threads_per_rank=1) as pool,
    ):
        for name, case in CASES.items():
            spec, found[name] = case.write(Path(folder)), []
            for plan in plans(name):
                found[name].append(measure(pool, case, spec, plan, steps=arguments.steps))
                sys.stdout.write(f"{name}, {plan.describe()}: {found[name][-1].sent_bytes:,.0f} bytes a step\n")
    about = (
        f"12 blocks each (Flux.1: 4 of two streams, 8 of one; hidden size 512), 144 tokens of the picture, 18 of the "
        f"text, {arguments.steps} steps of which the first is warm-up. torch {torch.__version__}, {os.cpu_count()} "
        f"cores, load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    )
    arguments.output.write_text(page(found, about), encoding="utf-8")


if __name__ == "__main__":
    main()
