"""Stock ComfyUI and one rank on one GPU, in one server, previews on: a step, a prompt, and memory. Flux.1's widths.

    PYTHONPATH=tests python benchmarks/one_gpu.py --folder DIR --kinds bfloat16 "fp8 e4m3" [--flags --fast ...]

Files are written, with random weights. Each round runs all graphs with a seed of its own, one after the other, every
second round in the other order. A step is the median time between two progress events of a run; "prompt" is all of it,
the first one with loading. What a rank holds is memory of another process, so the GPU's whole use is read (nvidia-smi)
after each run.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from benchmarks.gpu.formats import write_format  # noqa: E402
from benchmarks.share.cases import CASES, write_case  # noqa: E402
from families.graphs import plain, prompts, through  # noqa: E402
from host.client import ComfyClient, PromptResult, Workflow  # noqa: E402
from host.pack_workflows import parallel, relative_error, saved_latent  # noqa: E402
from host.server import ComfyServer  # noqa: E402

STOCK, RANK, COMPILED = "stock ComfyUI", "one rank", "one rank, compiled blocks"
PLAIN_KIND = "bfloat16"
HEAD = (
    *("file", "options", "loader", "first prompt s", "prompt s", "step ms", "beside stock", "GPU memory GiB"),
    "difference from stock",
)


def graph_of(file: str, config: dict[str, str], *, size: int, steps: int, seed: int) -> Workflow:
    """Flux.1 with 512 tokens of text; `config` are inputs of SP Config, none for ComfyUI's own loader."""
    graph = plain(file, cfg=1.0, seed=seed, steps=steps)
    prompts(graph, width=4096, tokens=512, pooled=768)
    through(graph, "latent", "EmptySD3LatentImage", "latent_image", width=size, height=size, batch_size=1)
    through(graph, "guidance", "FluxGuidance", "positive", conditioning=["positive", 0], guidance=3.5)
    return parallel(graph, mode="manual", devices="cuda:0", **config) if config else graph


def steps_ms(result: PromptResult) -> float:
    """The median between two progress events."""
    times = [each.t_s for each in result.progress]
    return 1000 * median(later - earlier for earlier, later in itertools.pairwise(times))


def gpu_gib() -> float:
    """What all processes hold on the first GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) / 1024  # noqa: S603


def file_in(folder: Path, kind: str, depth: tuple[int, int]) -> Path:
    """A Flux.1 of published widths with so many double and single blocks, random, in `folder`."""
    case = CASES["flux.1"]
    double, single = depth
    arguments = {**case.arguments, "depth": double, "depth_single_blocks": single}
    path = folder / f"flux_{double}_{single}.safetensors"
    if not path.is_file():
        write_case(replace(case, arguments=arguments), path, "bfloat16")
    return path if kind == PLAIN_KIND else write_format(path, kind, torch.device("cuda:0"))


def in_turn(client: ComfyClient, file: str, ways: dict[str, dict[str, str]], given: argparse.Namespace) -> list[str]:
    """The rows of a file: each way loads alone first, then all run one after another in each round."""
    found: dict[str, list[tuple[float, float, float, torch.Tensor]]] = {way: [] for way in ways}
    for number in range(given.rounds + 1):
        turn = list(found.items())
        for way, runs in turn if number % 2 == 0 else reversed(turn):  # drift hits all alike
            graph = graph_of(file, ways[way], size=given.size, steps=given.steps, seed=7 + number)
            began = time.monotonic()
            result = client.queue(graph).require_success()
            took = time.monotonic() - began
            runs.append((took, steps_ms(result), gpu_gib(), saved_latent(client, result)))
            print(file, way, *(f"{each:.2f}" for each in runs[-1][:3]), flush=True)  # noqa: T201
            if number == 0:
                client.free()
    lines, stock = [], median(each[1] for each in found[STOCK][1:])
    for way, runs in found.items():
        first, *rest = runs
        error = max(relative_error(each[3], theirs[3]) for each, theirs in zip(runs, found[STOCK], strict=True))
        prompt, step, memory = (median(each[column] for each in rest) for column in range(3))
        cells = [f"{first[0]:.1f}", f"{prompt:.2f}", f"{step:.1f}", f"{step / stock:.3f}x", f"{memory:.1f}"]
        lines.append(f"| {file} | {' '.join(given.flags)} | {way} | {' | '.join(cells)} | {error:.1e} |")
    client.free()
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the files are, or are written")
    parser.add_argument("--kinds", nargs="+", default=[PLAIN_KIND], help=f"{PLAIN_KIND}, or of tests/host/quantised.py")
    parser.add_argument("--depth", default="19,38", help="double and single blocks (default: %(default)s)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="what follows goes to ComfyUI")
    parser.add_argument("--compiled", action="store_true", help="one rank with compiled blocks beside them")
    parser.add_argument("--write-only", action="store_true", help="write the files and end")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="append the table to this file")
    given = parser.parse_args()
    double, single = (int(each) for each in given.depth.split(","))
    given.folder.mkdir(parents=True, exist_ok=True)
    files = [file_in(given.folder, kind, (double, single)) for kind in given.kinds]
    if given.write_only:
        return
    ways: dict[str, dict[str, str]] = {STOCK: {}, RANK: {"compiled": "off"}}
    ways |= {COMPILED: {"compiled": "blocks"}} if given.compiled else {}
    models = Path(tempfile.mkdtemp(prefix="one-gpu-"))
    (models / "diffusion_models").mkdir()
    for file in files:
        (models / "diffusion_models" / file.name).symlink_to(file.resolve())
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    with ComfyServer(models=models, flags=given.flags, environment={"START_EACH_RANK": "1"}) as server:
        try:
            for file in files:
                lines += in_turn(ComfyClient(server.url), file.name, ways, given)
        finally:
            print(server.log[-6000:])  # noqa: T201
    shutil.rmtree(models)
    device = torch.cuda.get_device_name(0)
    lines += [
        "",
        f"{device}, torch {torch.__version__}, {double} + {single} blocks, {given.size} px, {given.steps} steps.",
    ]
    print(*lines, sep="\n")  # noqa: T201
    if given.write is not None:
        with given.write.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
