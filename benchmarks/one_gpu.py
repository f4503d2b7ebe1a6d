"""Stock ComfyUI and one rank on one GPU, in one server: seconds a step, of a prompt, and memory. Flux.1's sizes.

    PYTHONPATH=tests python benchmarks/one_gpu.py FLUX.safetensors [--steps 20] [--rounds 3] [--write FILE]

Each round runs both graphs with a seed of its own, one after the other, every second round in the other order. A step
is the median time between two progress events of a run; "prompt" is all of it, the first one with loading. What a rank
holds is memory of another process, so the GPU's whole use is read (nvidia-smi) after each run.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from families.graphs import plain, prompts, through  # noqa: E402
from host.client import ComfyClient, PromptResult, Workflow  # noqa: E402
from host.pack_workflows import parallel, relative_error, saved_latent  # noqa: E402
from host.server import ComfyServer  # noqa: E402

STOCK, RANK = "stock ComfyUI", "one rank"
HEAD = ("loader", "first prompt s", "prompt s", "step ms", "GPU memory GiB", "difference from stock")


def graph_of(file: str, loader: str, *, size: int, steps: int, seed: int) -> Workflow:
    """Flux.1 with 512 tokens of text."""
    graph = plain(file, cfg=1.0, seed=seed, steps=steps)
    prompts(graph, width=4096, tokens=512, pooled=768)
    through(graph, "latent", "EmptySD3LatentImage", "latent_image", width=size, height=size, batch_size=1)
    through(graph, "guidance", "FluxGuidance", "positive", conditioning=["positive", 0], guidance=3.5)
    return graph if loader == STOCK else parallel(graph, mode="manual", devices="cuda:0")


def steps_ms(result: PromptResult) -> float:
    """The median between two progress events."""
    times = [each.t_s for each in result.progress]
    return 1000 * median(later - earlier for earlier, later in itertools.pairwise(times))


def gpu_gib() -> float:
    """What all processes hold on the first GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) / 1024  # noqa: S603


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Flux.1 file of the usual sizes")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="append the table to this file")
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, float, torch.Tensor]]] = {STOCK: [], RANK: []}
    folder = Path(tempfile.mkdtemp(prefix="one-gpu-"))
    (folder / "diffusion_models").mkdir()
    (folder / "diffusion_models" / arguments.model.name).symlink_to(arguments.model.resolve())
    with ComfyServer(models=folder, environment={"START_EACH_RANK": "1"}) as server:
        client = ComfyClient(server.url)
        for number in range(arguments.rounds + 1):
            in_turn = list(found.items())
            for loader, runs in in_turn if number % 2 == 0 else reversed(in_turn):  # drift hits all alike
                size = {"size": arguments.size, "steps": arguments.steps, "seed": 7 + number}
                began = time.monotonic()
                result = client.queue(graph_of(arguments.model.name, loader, **size)).require_success()
                took = time.monotonic() - began
                runs.append((took, steps_ms(result), gpu_gib(), saved_latent(client, result)))
                print(loader, *(f"{each:.2f}" for each in runs[-1][:3]), flush=True)  # noqa: T201
                if number == 0:
                    client.free()  # each loads alone, and is then in turn with the others
        log = server.log
    shutil.rmtree(folder)
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    for loader, runs in found.items():
        first, *rest = runs
        error = max(relative_error(each[3], theirs[3]) for each, theirs in zip(runs, found[STOCK], strict=True))
        prompt, step, memory = (median(each[column] for each in rest) for column in range(3))
        lines.append(f"| {loader} | {first[0]:.1f} | {prompt:.2f} | {step:.1f} | {memory:.1f} | {error:.1e} |")
    device = torch.cuda.get_device_name(0)
    lines += ["", f"{device}, torch {torch.__version__}, {arguments.size} px, {arguments.steps} steps, bf16."]
    print(*lines, sep="\n")  # noqa: T201
    print("\n".join(line for line in log.splitlines() if "loaded" in line.lower())[-1500:])  # noqa: T201
    if arguments.write is not None:
        with arguments.write.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
