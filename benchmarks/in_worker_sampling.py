"""Every sampler of ComfyUI with its loop in the workers and in ComfyUI: error, calls of the model, requests, seconds.

    PYTHONPATH=tests:. python -m benchmarks.in_worker_sampling [--only euler heun] [--parts families hosted unet]
    [--rounds 4] [--minutes 9]

Owns the graphs, the rounds and the page benchmarks/in_worker_sampling.md, of which a run writes anew the parts that it
measures. Does not own the server, the client and the tiny files (tests/host, tests/families). One ComfyUI runs Parallel
Sampler on CPU ranks of one thread each, in fp32 on random weights. A round runs each graph once with `loop` auto and
once with host, by turns first, same seed for both.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from textwrap import fill

import torch

from families.cases import PLANS
from families.variant import Variant
from families.variants import BY_NAME, write_families
from host.client import ComfyClient, Workflow
from host.pack_workflows import relative_error, saved_latent
from host.server import ComfyServer
from parity.runner import parallelized

TARGET = Path(__file__).with_name("in_worker_sampling.md")
LOOPS = ("auto", "host")
FEW = "So few rounds on a busy machine say about how long a step takes, and not which loop is faster."
STEPS, CFG = 6, 3.0  # of ComfyUI's own models
# A variant of each family, and a plan.
FAMILIES = {
    "wan 2.1 t2v": "ulysses 2",
    "wan 2.1 i2v": "ulysses 2",
    "wan 2.2 5b i2v": "ulysses 2",
    "ltx-video t2v": "ulysses 2",
    "ltx-2 t2v": "ulysses 2",
    "hunyuanvideo 1.5 t2v": "ulysses 2",
    "minimax h3 t2v": "ulysses 2",
    "flux.2 klein": "ulysses 2",
    "sd3.5 medium": "ulysses 2",
    "pixart sigma": "ulysses 2",
    "krea 2": "ulysses 2",
    "sdxl koala": "cfg 2",
}
SAMPLED = {"hosted": "wan 2.1 t2v", "unet": "sdxl koala"}


# By part: what it is called on the page, and how many rounds count.
TITLES = {
    "families": "ComfyUI's own models, family by family",
    "hosted": "ComfyUI's own models, all samplers on a flow",
    "unet": "ComfyUI's own models, all samplers on a U-Net",
}
ROUNDS = {"families": 5, "hosted": 2, "unet": 1}


@dataclass(kw_only=True)
class Found:
    """What was measured of one graph. Lists have an entry a round; reports are the sampler's own."""

    errors: list[float] = field(default_factory=list)
    reports: dict[str, list[dict]] = field(default_factory=lambda: {loop: [] for loop in LOOPS})

    @property
    def reason(self) -> str:
        """Why the loop stays in ComfyUI; "" where it does not."""
        return str(self.reports["auto"][0]["loop"].get("reason", ""))

    def calls(self, loop: str) -> int:
        """Calls of the model in a run, but for what is asked once before its first step."""
        report = self.reports[loop][-1]
        calls = report["timings"]["calls"]
        return sum(calls) if self.reason or loop == "host" else calls[-1]

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


@dataclass(frozen=True, kw_only=True)
class FamilyRuns:
    """A variant of a family under a plan, computed by ComfyUI's own module."""

    variant: Variant
    plan: str

    @property
    def saves(self) -> tuple[str, ...]:
        """The nodes that save latents."""
        return self.variant.latents

    def graph(self, sampler: str, *, loop: str, seed: int) -> Workflow:
        """The graph with our sampler."""
        graph = parallelized(self.variant.graph(cfg=CFG, steps=STEPS, seed=seed), **PLANS[self.plan])
        graph["sampler"]["class_type"] = "ParallelSampler"
        graph["sampler"]["inputs"] |= {"loop": loop, "sampler_name": sampler}
        return graph


def measure(
    client: ComfyClient, cases: Mapping[str, tuple[FamilyRuns, str]], *, rounds: int, until_s: float
) -> dict[str, Found]:
    """All cases, a sampler's name each, in every round; round 0 loads, warms up and is left out.

    None but the first starts after `until_s`, which is on `time.monotonic`.
    """
    found = {name: Found() for name in cases}
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() > until_s:
            break
        for name, (runs, sampler) in cases.items():
            latents = {}
            for loop in LOOPS if number % 2 else reversed(LOOPS):
                result = client.queue(runs.graph(sampler, loop=loop, seed=1000 + number), timeout_s=600)
                latents[loop] = [saved_latent(client, result.require_success(), node=each) for each in runs.saves]
                if number:
                    found[name].reports[loop].append(copy.deepcopy(result.outputs["sampler"]["parallel_dit"][0]))
            if number:
                pairs = zip(*(latents[loop] for loop in LOOPS), strict=True)
                found[name].errors.append(max(relative_error(*pair) for pair in pairs))
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


def samplers_page(found: dict[str, Found]) -> list[str]:
    """Two tables: samplers that run in the workers, and the others with their reasons."""
    inside = {name: each for name, each in found.items() if not each.reason}
    staying = {name: each for name, each in found.items() if each.reason}
    ratios = sorted(each.ratio for each in inside.values()) or [0.0]
    worst = max((max(each.errors) for each in inside.values()), default=0.0)
    told = (
        f"{len(inside)} of {len(found)} samplers run in the workers. The largest error of any round is "
        f"{worst:.1e}; the loop takes {ratios[0]:.2f} to {ratios[-1]:.2f}\n"
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


def steps_page(found: dict[str, Found], what: str) -> list[str]:
    """One table, with the time of a step; `what` is measured in a row."""
    columns = (
        what,
        "error",
        "requests, host",
        "requests",
        "ms a step, host",
        "ms a step",
        "ms prepared",
        "ms a run, host",
        "ms a run",
        "ratio",
    )
    rows = [
        (
            name,
            f"{max(each.errors):.1e}",
            *(each.requests(loop) for loop in reversed(LOOPS)),
            *(milliseconds(each.step_s(loop)) for loop in reversed(LOOPS)),
            milliseconds(each.prepare_s),
            *(milliseconds(median(each.seconds(loop))) for loop in reversed(LOOPS)),
            f"{each.ratio:.2f}",
        )
        for name, each in found.items()
    ]
    return [*table(columns, rows), ""]


def about(part: str, found: dict[str, Found]) -> str:
    """What was run, in a sentence or two."""
    reports = next(iter(found.values())).reports["host"]
    rounds = f"medians of {len(reports)} round(s).{' ' + FEW if len(reports) < 3 else ''}"
    names = FAMILIES if part == "families" else [SAMPLED[part]]
    plans = ", ".join(dict.fromkeys(FAMILIES[name] for name in names))
    which = f"{', '.join(names)} of tests/families" if part != "families" else "The tiny files of tests/families"
    return f"{which}, cfg {CFG:g}, {plans}, {STEPS} steps of {'euler' if part == 'families' else 'each'}, {rounds}"


HOW_TO_READ = """- *error*: relative, of the latent against that of ComfyUI's loop with the same seed; the worst round.
- *calls*: of the model. *requests*: exchanges with the workers; the loop in the workers needs one for the whole run
  (two more where a model encodes its texts before it).
- *ms*: the sampler's whole loop at its caller, median of the rounds; in the workers with all that is computed ahead.
- *ratio*: median of each round's own ratio, in the workers over host; below 1 the loop in the workers is faster.
- uni_pc and uni_pc_bh2 do the same work, as do dpmpp_2m_sde and dpmpp_2m_sde_gpu on a CPU: how far apart their ratios
  are is how little a ratio means.
- *host*: the same node with `loop` host: ComfyUI's own loop, whose every call goes to the same workers.
- What the loop in the workers costs ComfyUI is to find the sampler's recurrence, once a run: the sampler is run three
  times on a handful of numbers. Samplers that draw from a Brownian tree (the names with sde) take longest over that.
"""


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="SAMPLER", help="default: all that KSampler lists")
    parser.add_argument("--parts", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--rounds", type=int, help=f"at most; default: {ROUNDS}")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further round starts")
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    until_s = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="in-workers-") as base:
        write_families(Path(base) / "models", only=FAMILIES)
        with ComfyServer(Path(base)) as server:
            client = ComfyClient(server.url)
            listed = arguments.only or stock_samplers(client)
            version = client.get("/system_stats")["system"]["comfyui_version"]
            for part in arguments.parts:
                load = os.getloadavg()[0]
                cases = cases_of(part, listed)
                found = measure(client, cases, rounds=arguments.rounds or ROUNDS[part], until_s=until_s)
                machine = (
                    f"torch {torch.__version__}, ComfyUI {version}, {os.cpu_count()} cores, load average {load:.1f} "
                    f"before, {os.getloadavg()[0]:.1f} after."
                )
                write(arguments.output, part, [fill(f"{about(part, found)} {machine}", 120), "", *rows_of(part, found)])


def cases_of(part: str, samplers: Sequence[str]) -> dict[str, tuple[FamilyRuns, str]]:
    """The runs of a part, and each one's sampler."""
    if part == "families":
        return {name: (FamilyRuns(variant=BY_NAME[name], plan=plan), "euler") for name, plan in FAMILIES.items()}
    runs = FamilyRuns(variant=BY_NAME[SAMPLED[part]], plan=FAMILIES[SAMPLED[part]])
    return {each: (runs, each) for each in samplers}


def rows_of(part: str, found: dict[str, Found]) -> list[str]:
    """The tables of a part."""
    if part == "families":
        return steps_page(found, "model")
    return samplers_page(found)


def write(page: Path, part: str, lines: Sequence[str]) -> None:
    """Put a part's lines in the page; other parts stay."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    parts = {title: rest for title, _, rest in (each.partition("\n") for each in text.split("\n## ")[1:])}
    parts[TITLES[part]] = "\n".join(["", *lines]).rstrip("\n")
    head = ["# The loop in the workers, sampler by sampler", "", (__doc__ or "").strip(), "", HOW_TO_READ.rstrip("\n")]
    known = [f"## {title}\n{parts[title].rstrip()}" for title in TITLES.values() if title in parts]
    page.write_text("\n\n".join(["\n".join(head), *known]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the server's and the workers' threads are what is measured
    main()
