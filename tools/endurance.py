"""Two models and two plans in one server, in turn, many times: what the server and the workers hold after each prompt.

`PYTHONPATH=tests python -m tools.endurance` runs 50 prompts and writes benchmarks/endurance.md. Models compute in bf16,
so that weights are private memory of each rank and not pages of the file.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from host import workflows
from host.client import ComfyClient, Workflow
from host.fetch import comfyui_path
from host.pack_workflows import parallel, to_latent
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels, write_tiny_models
from host.workers import command, workers

DOCUMENT = PACK_ROOT / "benchmarks" / "endurance.md"
WARM_UP = 8  # each of the four mixes twice
PLANS = ({"mode": "manual", "ulysses": 2}, {"mode": "manual", "ring": 2})
MIB = 2**20
# What a leak of one prompt would pass many times over: weights are 57 MB a model and rank, a latent 16 kB.
MOST_GROWN = {"MiB of the server": 48.0, "MiB of a worker": 48.0, "threads": 6, "descriptors": 6, "processes": 0}


@dataclass(frozen=True)
class Held:
    """What there is after a prompt. Memory is what belongs to the process alone (USS), of the biggest worker."""

    server_mib: float
    worker_mib: float
    threads: int
    descriptors: int
    processes: int

    def row(self) -> dict[str, float]:
        """By the names of MOST_GROWN."""
        return dict(zip(MOST_GROWN, vars(self).values(), strict=True))


def prompt(tiny: TinyModels, number: int) -> Workflow:
    """The prompt of that number: the model changes every time, the plan every second time; always another seed."""
    graph = workflows.text_to_image(tiny, seed=1000 + number, width=128, height=128)
    graph["model"]["inputs"]["unet_name"] = (tiny.dev, tiny.schnell)[number % 2]
    return to_latent(parallel(graph, weight_dtype="bfloat16", **PLANS[number // 2 % 2]))


def held(server: ComfyServer) -> Held:
    """Measured now, over the server and its workers together."""
    host = psutil.Process(server.pid)
    ranks = workers(server)
    everybody = (host, *ranks)
    return Held(
        server_mib=host.memory_full_info().uss / MIB,
        worker_mib=max(rank.memory_full_info().uss for rank in ranks) / MIB,
        threads=sum(process.num_threads() for process in everybody),
        descriptors=sum(process.num_fds() for process in everybody),
        processes=sum("host.forked_ranks" not in command(child) for child in host.children(recursive=True)),
    )


def run(server: ComfyServer, tiny: TinyModels, prompts: int) -> list[Held]:
    """Run the prompts, of which all must succeed; what is held after each."""
    client = ComfyClient(server.url)
    found = []
    for number in range(prompts):
        client.queue(prompt(tiny, number)).require_success()
        found.append(held(server))
    return found


def growth(found: list[Held]) -> dict[str, float]:
    """From the end of the warm-up to the end, by the names of MOST_GROWN; the mixes of model and plan are the same."""
    first, last = found[WARM_UP - 1].row(), found[-1].row()
    return {name: last[name] - first[name] for name in MOST_GROWN}


def document(found: list[Held]) -> str:
    """The table: every tenth prompt, and the growth."""
    version = (comfyui_path() / "comfyui_version.py").read_text(encoding="utf-8").split('"')[1]
    head = f"| after prompt | {' | '.join(MOST_GROWN)} |\n{'| --- ' * (1 + len(MOST_GROWN))}|\n"
    numbers = [WARM_UP, *range(10, len(found), 10), len(found)]
    lines = [(f"{number}", found[number - 1].row()) for number in numbers]
    lines += [(f"grown since {WARM_UP}", growth(found)), ("allowed", MOST_GROWN)]
    body = "".join(f"| {name} | {' | '.join(f'{value:g}' for value in rounded(row))} |\n" for name, row in lines)
    return (
        "# Growth over many prompts\n\n"
        f"Two models (dev and schnell, tiny, in bf16) and two plans (ulysses 2, ring 2) in one server, in turn, "
        f"{len(found)} prompts with a seed each; written by `make endurance`. Memory is what belongs to a process "
        "alone; threads and descriptors are of the server and both workers together.\n\n"
        f"ComfyUI {version}, torch {torch.__version__}, Python {platform.python_version()}, CPU ranks.\n\n{head}{body}"
    )


def rounded(row: dict[str, float]) -> list[float]:
    """Memory to a tenth."""
    return [round(value, 1) for value in row.values()]


def main() -> int:
    """Command line: 1 when anything grew by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--write", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    if arguments.prompts <= WARM_UP:
        parser.error(f"--prompts={arguments.prompts} is the warm-up alone; use more than {WARM_UP}")
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_models(Path(folder))
        with ComfyServer(models=tiny.models) as server:
            found = run(server, tiny, arguments.prompts)
    text = document(found)
    arguments.write.write_text(text, encoding="utf-8")
    print(text)  # noqa: T201
    return int(any(by > MOST_GROWN[name] for name, by in growth(found).items()))


if __name__ == "__main__":
    sys.exit(main())
