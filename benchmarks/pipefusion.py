"""PipeFusion by numbers: what it sends, what its stages wait, and when they compute what.

    python -m benchmarks.pipefusion [--steps 6] [--rounds 2]

Owns the plans that are compared, benchmarks/pipefusion.md and its picture. How a run is measured is
pipeline_timeline.py's. Four CPU ranks of one thread, a random Flux in fp32 whose blocks divide into 2, 3 and 4 stages.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill

import torch

from benchmarks.pipeline_schedule import draw
from benchmarks.pipeline_timeline import Measured, euler_run, measure, pictures, rows_of
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.parallel.pipefusion import PatchedSequence
from parallel_runtime.parallel.shard import SequenceShard
from parallel_runtime.parallel.traffic import AttentionShape, predict, predict_stage
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

TARGET = Path(__file__).with_name("pipefusion.md")
STAGES = (2, 3, 4)
PATCHES_A_STAGE = (1, 2, 4)
DRAWN = ("pipefusion=2,patches=4", "pipefusion=4,patches=8")
FLUX_1 = sample_config(heads=24, head_dim=128, depth=19, depth_single=38)
FLUX_1_IMAGE = Workload(width=1024, height=1024, text_tokens=512)
FLUX_1_RANKS = (2, 4, 8)

BUBBLE = """## The bubble

The share of the stages' time after the warm-up in which they compute nothing, from the first patch to the last.

- *clock*: of the run, as the ranks saw it, median of the rounds. **Only two stages had a core each here.** With three
  and four, ranks take turns on two cores: a stage that waits for a core counts as computing, so this column says
  nothing of what as many devices would do.
- *schedule, measured*: the order that the stages kept to in the run and what waits for what, each patch taking the
  median of what it took there and messages no time.
- *schedule, counted*: the same, each patch taking the operations of its tokens in the blocks of its stage. No clock.
- *even*: (N - 1) / (M C + N - 1) of N stages, M patches, C steps, all alike: filling and draining, once a run.
- *each step by itself*: counted, when every step begins and ends with an empty pipeline, as in ComfyUI's loop.
"""
SENT = """## Bytes a step

Counted by the ranks as they sent, all ranks together, a step; one side, so cfg 1. A stage sends hidden states to the
next and the last one the latent to the first, however many patches there are; Ulysses and Ring send in every block.
"""
FORMULA = """The same for Flux.1-dev at 1024 x 1024 in bf16, 512 text tokens, by the formulas of
`parallel/traffic.py`, which a test holds to the bytes that are sent:
"""
TIMELINES = """## Who computes what, when

From the runs above; `#` is the warm-up, a digit or letter the patch, a dot waiting. Below each the order of the same
run on stages that take what is counted.
"""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]


def plans() -> Iterator[ParallelPlan]:
    """Pipelines, and what as many ranks do without one."""
    for stages in STAGES:
        for times in PATCHES_A_STAGE:
            yield ParallelPlan(pipefusion=stages, patches=times * stages)
        yield ParallelPlan(ulysses=stages)
        yield ParallelPlan(ring=stages)


def bubble_rows(found: dict[ParallelPlan, list[Measured]]) -> list[list[str]]:
    """A row a pipeline."""
    rows = []
    for plan, rounds in found.items():
        if plan.pipefusion == 1:
            continue
        shares = [each.bubbles() for each in rounds]
        cells = [median(share[name] for share in shares) for name in ("clock", "measured costs")]
        cells += [shares[0]["counted costs"], shares[0]["even"], rounds[0].bubble_within_a_step()]
        rows.append([str(plan.pipefusion), str(plan.num_patches), *(f"{cell:.1%}" for cell in cells)])
    return rows


def sent_rows(found: dict[ParallelPlan, list[Measured]]) -> list[list[str]]:
    """A row a plan: bytes, weights of the rank with the most, and the time of a step."""
    rows = []
    for plan, rounds in found.items():
        if plan.pipefusion > 1 and plan.num_patches != plan.pipefusion * PATCHES_A_STAGE[1]:
            continue
        held = max(rounds[0].held_bytes)
        step_s = median(each.step_s for each in rounds)
        row = [str(plan.ranks), plan.describe(), f"{rounds[0].sent_bytes:,.0f}", f"{held:,}", f"{1000 * step_s:,.0f}"]
        rows.append(row)
    return sorted(rows, key=lambda row: int(row[0]))


def formula_rows(config: FluxConfig, image: Workload) -> list[list[str]]:
    """A row a number of ranks: megabytes a step of all ranks together, by formula, of each kind of plan."""
    text, tokens = image.text_tokens, image.image_tokens
    blocks = config.depth + config.depth_single
    shape = AttentionShape(blocks=blocks, heads=config.num_heads, head_dim=config.head_dim, element_bytes=2, batch=1)
    rows = []
    for ranks in FLUX_1_RANKS:
        lengths = SequenceShard(text, tokens, ranks, 0).lengths
        ulysses = sum(sent for _, sent in predict(shape, lengths=lengths, ring=1, ulysses=ranks))
        ring = sum(sent for _, sent in predict(shape, lengths=lengths, ring=ranks, ulysses=1))
        chunks = [PatchedSequence(text, tokens, ranks, 1).lengths(range(n, n + 1)) for n in range(ranks)]
        _, hidden = predict_stage(shape, chunks, part=0, ring=1, ulysses=1)
        _, latent = predict_stage(shape, [], part=0, ring=1, ulysses=1, latents=[4 * tokens * config.out_channels])
        pipeline = (ranks - 1) * hidden + latent
        sent = (ulysses, ring, pipeline)
        rows.append([str(ranks), *(f"{each / 1e6:,.0f}" for each in sent), f"{ulysses / pipeline:.0f} times"])
    return rows


def run_all(spec: ModelSpec, config: FluxConfig, image: Workload, *, steps: int, rounds: int) -> dict:
    """Every plan in every round, in one set of workers."""
    run = euler_run(config, image, steps=steps)
    found: dict[ParallelPlan, list[Measured]] = {plan: [] for plan in plans()}
    with Pool(parse_devices(f"cpu:{max(STAGES)}").devices, threads_per_rank=1) as pool:
        for number in range(rounds):
            for plan, values in found.items():
                values.append(measure(pool, spec, plan, run, warm=number == 0))
    return found


def page(found: dict[ParallelPlan, list[Measured]], about: str) -> str:
    """All of it."""
    bubbles = ("stages", "patches", "clock", "schedule, measured", "schedule, counted", "even", "each step by itself")
    sent = ("ranks", "plan", "bytes a step", "weights of the fullest rank, bytes", "step, ms")
    lines = ["# PipeFusion by numbers", "", (__doc__ or "").strip(), "", fill(about, 120), "", BUBBLE]
    lines += [*table(bubbles, bubble_rows(found)), "", SENT, *table(sent, sent_rows(found)), "", FORMULA]
    formula = ("ranks", "Ulysses, MB", "Ring, MB", "PipeFusion, MB", "Ulysses over PipeFusion")
    lines += [*table(formula, formula_rows(FLUX_1, FLUX_1_IMAGE)), "", TIMELINES]
    for name in DRAWN:
        measured = found[ParallelPlan.parse(name)][-1]
        lines += [fill(measured.describe(), 120), "", "```", pictures(measured), "```", ""]
    return "\n".join([*lines, "![The same as a picture](pipefusion.png)", ""])


def main() -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=TARGET, help="the picture goes beside it")
    arguments = parser.parse_args()
    config = sample_config(heads=12, head_dim=32, depth=4, depth_single=8)
    image = Workload(width=384, height=384, text_tokens=72)  # as much text to the image as Flux.1 at 1024 x 1024
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        write_sample(path, config)
        found = run_all(ModelSpec.of(path), config, image, steps=arguments.steps, rounds=arguments.rounds)
    about = (
        f"{config.depth} double and {config.depth_single} single blocks, hidden size {config.hidden_size}, "
        f"{image.image_tokens} image and {image.text_tokens} text tokens, {arguments.steps} steps of which the first "
        f"is warm-up, {arguments.rounds} round(s). torch {torch.__version__}, {os.cpu_count()} cores, load average "
        f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    )
    arguments.output.write_text(page(found, about), encoding="utf-8")
    drawn = [row for name in DRAWN for row in rows_of(found[ParallelPlan.parse(name)][-1])]
    draw(drawn, str(arguments.output.with_suffix(".png")))


if __name__ == "__main__":
    main()
