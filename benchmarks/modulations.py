"""What a rank keeps with `modulations` set to keep and to release: weights, private memory, and the time of a step.

    python -m benchmarks.modulations [--steps 6] [--rounds 3]

Owns the plans, the rounds and the page benchmarks/modulations.md. Two CPU ranks of one thread run a random Flux whose
blocks are cut as Flux.1's are, two single ones to each double one, so that its modulations have the same share. Each
round runs each plan twice, keeping and releasing, by turns first; one round before them is left out.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from textwrap import fill

import torch

from benchmarks.pipeline_timeline import euler_run
from parallel_runtime.adapters.flux import FluxAdapter
from parallel_runtime.adapters.flux_config import FluxConfig
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.sample_model import sample_config, write_sample
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.pool.resident import ResidentRun

TARGET = Path(__file__).with_name("modulations.md")
PLANS = ("ulysses=2", "ulysses=2,weights=sharded", "pipefusion=2,patches=4")
DTYPES = {
    "bfloat16": "The file is fp32 and computed in bf16: each rank has a copy of its own, as on a GPU.",
    "default": "The file is computed in its own fp32: on the CPU whole weights are pages of the file, which the system "
    "shares and takes back as it likes, so there is no private memory to free.",
}
MODES = ("keep", "release")
MIB = 1 << 20
COLUMNS = ("plan", "modulations", "weights a rank", "released", "private while sampling", "step", "prepared", "run")

HOW_TO_READ = """- *weights a rank*: what the rank with most holds while it samples; *released*: what it does without.
- *private while sampling*: growth since the workers were ready, before the model came, of the memory that is the
  rank's alone and no page of a file; in the middle of the run, with activations and the modulations of all steps.
- *step*: median but for the first, of the slowest rank. *prepared*: all that is computed before the first step.
- *run*: the whole request; with release it reads the weights again that the run before gave up.
- Sharded weights release nothing: their blocks are gathered whole, modulations and all, for every step.
"""


@dataclass(kw_only=True)
class Measured:
    """What one mode of one plan took; each list has an entry a round. Bytes and seconds of the rank with the most."""

    held: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    prepare_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


def private_bytes(pids: Sequence[int]) -> list[int]:
    """Memory of each process that is its alone and no page of a file: what it allocated and wrote."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines() for pid in pids]
    return [1024 * int(line.split()[1]) for lines in rollups for line in lines if line.startswith("Anonymous:")]


def measure_run(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: ResidentRun, *, ready: Sequence[int], into: Measured
) -> torch.Tensor:
    """One run, its figures added; memory is looked at in the middle of it. Returns the latent."""
    pids, private = pool.status()["pids"][: plan.ranks], [0]
    middle = len(run.program.step_ends) // 2

    def step_done(step: int, _: torch.Tensor) -> None:
        if step == middle:
            private[0] = max(now - then for now, then in zip(private_bytes(pids), ready, strict=False))

    began = time.perf_counter()
    result = pool.sample(spec, plan, run, on_step=step_done)
    into.run_s.append(time.perf_counter() - began)
    ranks = result.ranks[: plan.ranks]
    freed = [rank.get("released_bytes", 0) for rank in ranks]
    held = pool.load(spec, plan).parameter_bytes[: plan.ranks]
    into.held.append(max(whole - less for whole, less in zip(held, freed, strict=True)))
    into.released.append(max(freed))
    into.private.append(private[0])
    into.step_s.append(max(median(rank["step_s"][1:]) for rank in ranks))
    into.prepare_s.append(max(rank["prepare_s"] for rank in ranks))
    return result.out


def measure_plan(pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: ResidentRun, *, rounds: int) -> list[list[str]]:
    """A row for each mode, from a fresh set of workers, whose memory before the model is what growth counts from."""
    pool.close()
    pool.start()
    ready = private_bytes(pool.status()["pids"])
    found = {mode: Measured() for mode in MODES}
    for number in range(rounds + 1):
        outs = {}
        for mode in MODES if number % 2 else reversed(MODES):
            into = found[mode] if number else Measured()
            asked = replace(run, release_modulations=mode == "release")
            outs[mode] = measure_run(pool, spec, plan, asked, ready=ready, into=into)
        if error := relative_error(outs["release"], outs["keep"]):
            raise ValueError(f"{plan.describe()}: released and kept differ by {error:.1e}; they must be the same")
    return [row(plan, mode, values) for mode, values in found.items()]


def row(plan: ParallelPlan, mode: str, values: Measured) -> list[str]:
    """A line of the table."""
    numbers = (values.held, values.released, values.private)
    seconds = (values.step_s, values.prepare_s, values.run_s)
    return [
        plan.describe(),
        mode,
        *(f"{median(each) / MIB:,.0f} MiB" for each in numbers),
        *(f"{1000 * median(each):,.0f} ms" for each in seconds),
    ]


def modulation_share(path: str, config: FluxConfig) -> float:
    """The modulations' part of the file."""
    names, entries = FluxAdapter(config).modulation_weights, read_header(path).tensors
    return sum(entries[name].num_bytes for name in names) / sum(entry.num_bytes for entry in entries.values())


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    config = sample_config(heads=8, head_dim=64, depth=4, depth_single=8)
    workload = Workload(width=192, height=192, text_tokens=32)
    run = euler_run(config, workload, steps=arguments.steps)
    load_before, body = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder, Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        path = str(Path(folder) / "model.safetensors")
        write_sample(path, config)
        for dtype, told in DTYPES.items():
            body += [fill(told, 120), "", *(f"| {' | '.join(each)} |" for each in (COLUMNS, ["---"] * len(COLUMNS)))]
            for plan in map(ParallelPlan.parse, PLANS):
                rows = measure_plan(pool, ModelSpec.of(path, dtype), plan, run, rounds=arguments.rounds)
                body += [f"| {' | '.join(each)} |" for each in rows]
            body.append("")
        size, share = Path(path).stat().st_size, modulation_share(path, config)
    loads = f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    about = (
        f"{config.depth} double and {config.depth_single} single blocks, hidden size {config.hidden_size}, "
        f"{size / MIB:,.0f} MiB in fp32, of which modulations {share:.0%}; {workload.image_tokens} image and "
        f"{workload.text_tokens} text tokens, {arguments.steps} steps, medians of {arguments.rounds} rounds. torch "
        f"{torch.__version__}, {os.cpu_count()} cores, {loads}."
    )
    head = ["# Modulations kept and released", "", (__doc__ or "").strip(), "", fill(about, 120), "", HOW_TO_READ]
    arguments.output.write_text("\n".join([*head, *body]), encoding="utf-8")


if __name__ == "__main__":
    main()
