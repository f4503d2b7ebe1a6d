"""Every sampler of ComfyUI with its loop in the workers and in ComfyUI: error, calls of the model, requests, seconds.

    PYTHONPATH=tests python -m benchmarks.in_worker_sampling [--only euler heun] [--shapes small big] [--rounds 4]
    [--minutes 9]

Owns the graphs, the rounds and the page benchmarks/in_worker_sampling.md. Does not own the server, the client and the
tiny files (tests/host). One ComfyUI runs Parallel Flux Sampler under ulysses 2 on two CPU ranks of one thread, a random
Flux in fp32, cfg 1. A round runs each sampler once with `loop` auto and once with host, by turns first, same seed for
both.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from textwrap import fill

import torch

from host import workflows
from host.client import ComfyClient, Workflow
from host.layouts import FluxShape, flux
from host.pack_workflows import parallel, relative_error, saved_latent, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels, write_layout, write_tiny_models

TARGET = Path(__file__).with_name("resident.md")
LOOPS = ("auto", "host")
RESIDENT = "resident"
FEW = "So few rounds on a busy machine say about how long a step takes, and not which loop is faster."
POPULAR = ("euler", "heun", "dpmpp_2m", "dpmpp_2m_sde", "lcm", "euler_ancestral")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and an image; at most `rounds` count, one before them does not."""

    file: str
    flux: FluxShape
    width: int
    height: int
    steps: int
    rounds: int


SMALL = Shape(
    file="resident_small.safetensors",
    flux=FluxShape(hidden=256, depth=2, single=4),
    width=256,
    height=256,
    steps=6,
    rounds=4,
)
BIG = Shape(
    file="resident_big.safetensors",
    flux=FluxShape(hidden=512, depth=3, single=6),
    width=512,
    height=512,
    steps=4,
    rounds=3,
)
SHAPES = {"small": SMALL, "big": BIG}


@dataclass(kw_only=True)
class Found:
    """What was measured of one sampler. Lists have an entry a round; reports are the sampler's own."""

    errors: list[float] = field(default_factory=list)
    reports: dict[str, list[dict]] = field(default_factory=lambda: {loop: [] for loop in LOOPS})

    @property
    def reason(self) -> str:
        """Why the loop stays in ComfyUI; "" where it does not."""
        return str(self.reports["auto"][0]["loop"].get("reason", ""))

    def calls(self, loop: str) -> int:
        """Calls of the model in a run."""
        return sum(self.reports[loop][-1]["timings"]["calls"])

    def requests(self, loop: str) -> int:
        """Exchanges with the workers in a run."""
        return len(self.reports[loop][-1]["timings"]["request_s"])

    def seconds(self, loop: str) -> list[float]:
        """The sampler's loop, all that is prepared for it included, of each round."""
        return [report["timings"]["denoise_s"] for report in self.reports[loop]]

    @property
    def ratio(self) -> float:
        """Median of each round's own ratio of the loop in the workers over ComfyUI's."""
        return median(ours / host for ours, host in zip(*map(self.seconds, LOOPS), strict=True))

    def step_s(self, loop: str) -> float:
        """Median over rounds of the median step but the first, as the sampler's caller sees it."""
        return median(median(report["timings"]["step_s"][1:]) for report in self.reports[loop])

    @property
    def prepare_s(self) -> float:
        """Median of what the workers compute once before the first step."""
        return median(report["timings"]["prepare_s"] for report in self.reports["auto"])


def graph_of(tiny: TinyModels, shape: Shape, *, sampler: str, loop: str, seed: int) -> Workflow:
    """Text to latent with our loader and our sampler."""
    stock = workflows.text_to_image(
        tiny, width=shape.width, height=shape.height, steps=shape.steps, seed=seed, sampler=sampler
    )
    stock["model"]["inputs"]["unet_name"] = shape.file
    graph = parallel(to_latent(stock), mode="manual", ulysses=2, sampler="ParallelFluxSampler")
    graph["sampler"]["inputs"] |= {"loop": loop, "modulations": "keep"}
    return graph


def measure(
    client: ComfyClient, tiny: TinyModels, shape: Shape, samplers: Sequence[str], *, until_s: float
) -> dict[str, Found]:
    """All samplers in every round; round 0 loads, warms up and is left out. None but the first starts after `until_s`.

    `until_s` is on `time.monotonic`.
    """
    found = {sampler: Found() for sampler in samplers}
    for number in range(shape.rounds + 1):
        if number > 1 and time.monotonic() > until_s:
            break
        for sampler, values in found.items():
            latents = {}
            for loop in LOOPS if number % 2 else reversed(LOOPS):
                graph = graph_of(tiny, shape, sampler=sampler, loop=loop, seed=1000 + number)
                result = client.queue(graph, timeout_s=600).require_success()
                latents[loop] = saved_latent(client, result)
                if number:
                    values.reports[loop].append(copy.deepcopy(result.outputs["sampler"]["parallel_dit"][0]))
            if number:
                values.errors.append(relative_error(*(latents[loop] for loop in LOOPS)))
    return found


def stock_samplers(client: ComfyClient) -> list[str]:
    """Those that KSampler lists, in its order."""
    return list(client.object_info("KSampler")["KSampler"]["input"]["required"]["sampler_name"][0])


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]


def milliseconds(seconds: float) -> str:
    """To a millisecond, for a table."""
    return f"{1000 * seconds:,.0f}"


def small_page(found: dict[str, Found]) -> list[str]:
    """Two tables: samplers that run in the workers, and the others with their reasons."""
    inside = {name: each for name, each in found.items() if not each.reason}
    staying = {name: each for name, each in found.items() if each.reason}
    ratios = sorted(each.ratio for each in inside.values())
    told = (
        f"{len(inside)} of {len(found)} samplers run in the workers. The largest error of any round is "
        f"{max(max(each.errors) for each in inside.values()):.1e}; the loop takes {ratios[0]:.2f} to {ratios[-1]:.2f}\n"
        f"of the host's time, {median(ratios):.2f} in the middle."
    )
    columns = ("sampler", "error", "calls, host", "calls", "requests, host", "requests", "ms, host", "ms", "ratio")
    rows = [
        (
            name,
            f"{max(each.errors):.1e}",
            *(measure(loop) for measure in (each.calls, each.requests) for loop in reversed(LOOPS)),
            *(milliseconds(median(each.seconds(loop))) for loop in reversed(LOOPS)),
            f"{each.ratio:.2f}",
        )
        for name, each in inside.items()
    ]
    stay = [
        (name, each.reason, f"{max(each.errors):.1e}", each.calls("auto"), f"{each.ratio:.2f}")
        for name, each in staying.items()
    ]
    lines = [told, "", *table(columns, rows), ""]
    if staying:
        lines += ["These stay in ComfyUI's loop. Ratio: having asked, over not asking.", ""]
        lines += [*table(("sampler", "the reason in the report", "error", "calls", "ratio"), stay), ""]
    return lines


def big_page(found: dict[str, Found]) -> list[str]:
    """One table, with the time of a step."""
    columns = ("sampler", "error", "ms a step, host", "ms a step", "ms prepared", "ms a run, host", "ms a run", "ratio")
    rows = [
        (
            name,
            f"{max(each.errors):.1e}",
            *(milliseconds(each.step_s(loop)) for loop in reversed(LOOPS)),
            milliseconds(each.prepare_s),
            *(milliseconds(median(each.seconds(loop))) for loop in reversed(LOOPS)),
            f"{each.ratio:.2f}",
        )
        for name, each in found.items()
    ]
    return [*table(columns, rows), ""]


def about(shape: Shape, found: dict[str, Found]) -> str:
    """What was run, in a sentence."""
    reports = next(iter(found.values())).reports["host"]
    sizes, rounds = reports[0]["sizes"], len(reports)
    return (
        f"Hidden size {shape.flux.hidden}, {shape.flux.depth} double and {shape.flux.single} single blocks, "
        f"{sizes['image_tokens']} image and {sizes['text_tokens']} text tokens, {shape.steps} steps, medians of "
        f"{rounds} round(s).{' ' + FEW if rounds < 3 else ''}"
    )


HOW_TO_READ = """- *error*: relative, of the latent against that of ComfyUI's loop with the same seed; the worst round.
- *calls*: of the model. *requests*: exchanges with the workers; the loop in the workers needs one for the whole run.
- *ms*: the sampler's whole loop at its caller, median of the rounds; in the workers with all that is computed ahead.
- *ratio*: median of each round's own ratio, in the workers over host; below 1 the loop in the workers is faster.
- uni_pc and uni_pc_bh2 do the same work, as do dpmpp_2m_sde and dpmpp_2m_sde_gpu on a CPU: how far apart their ratios
  are is how little a ratio means.
- *host*: Parallel Flux Sampler with `loop` host: ComfyUI's own loop, whose every call goes to the same workers.
- What the loop in the workers costs ComfyUI is to find the sampler's recurrence, once a run: the sampler is run three
  times on a handful of numbers. Samplers that draw from a Brownian tree (the names with sde) take longest over that.
"""


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="SAMPLER", help="default: all that KSampler lists")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, help="at most; default: 4, and 3 of the bigger image")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further round starts")
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    until_s = time.monotonic() + 60 * arguments.minutes
    load_before, body = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(prefix="resident-") as base:
        tiny = write_tiny_models(Path(base), hidden=256)
        for shape in SHAPES.values():
            write_layout(tiny.diffusion_model(shape.file), flux(shape.flux), seed=20)
        with ComfyServer(Path(base)) as server:
            client = ComfyClient(server.url)
            listed = arguments.only or stock_samplers(client)
            for name in arguments.shapes:
                shape = SHAPES[name] if arguments.rounds is None else replace(SHAPES[name], rounds=arguments.rounds)
                samplers = listed if shape.file == SMALL.file else [each for each in POPULAR if each in listed]
                found = measure(client, tiny, shape, samplers, until_s=until_s)
                body += section(shape, found)
            about_host = client.get("/system_stats")["system"]
    machine = (
        f"torch {torch.__version__}, ComfyUI {about_host['comfyui_version']}, {os.cpu_count()} cores, load average "
        f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    )
    head = [
        "# The loop in the workers, sampler by sampler",
        "",
        (__doc__ or "").strip(),
        "",
        fill(machine, 120),
        "",
        HOW_TO_READ,
    ]
    arguments.output.write_text("\n".join([*head, *body]), encoding="utf-8")


def section(shape: Shape, found: dict[str, Found]) -> list[str]:
    """What the page says of one shape; nothing where no sampler was asked for."""
    if not found:
        return []
    title, rows = ("## All samplers", small_page) if shape.file == SMALL.file else ("## A bigger image", big_page)
    return [title, "", fill(about(shape, found), 120), "", *rows(found)]


if __name__ == "__main__":
    torch.set_num_threads(1)  # the server's and the workers' threads are what is measured
    main()
