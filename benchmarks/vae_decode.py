"""VAE decodes by one and two CPU ranks of one thread, beside ComfyUI's own: seconds, CPU seconds, memory, differences.

    python benchmarks/vae_decode.py COMFYUI [--only wan] [--turns 5] [--write FILE]

COMFYUI is the folder of ComfyUI's main.py. `--write benchmarks/vae_decode.md` writes that page.

VAEs of ComfyUI's classes with random weights, small but for classes that have one size. ComfyUI's decodes run in this
process, with one thread. All in turn, each turn in another order. Memory is what a process holds at most during a
decode, more than before it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil  # noqa: E402
import torch  # noqa: E402

from parallel_runtime.devices import parse_devices  # noqa: E402
from parallel_runtime.planner.comfyui_process import find_comfyui  # noqa: E402
from parallel_runtime.pool.pool import Pool  # noqa: E402
from parallel_runtime.weights.host_memory import give_back_heap  # noqa: E402

MIB = 2**20
CASES = {
    "pictures: flux": ("flux", (1, 16, 2, 328)),
    "video: wan 2.1": ("wan 2.1", (1, 16, 2, 2, 680)),
    "wan 2.2 at its size": ("wan 2.2", (1, 48, 1, 1, 340)),
    "minimax h3 at its size": ("minimax h3", (1, 24, 1, 6, 148)),
}
AT_THEIR_SIZE = ("wan 2.2", "minimax h3")
PLAIN, TILED = "VAE Decode", "VAE Decode (Tiled)"
RANKS = {"1 rank": 1, "2 ranks": 2}
HEAD = (
    "decode",
    "by",
    "tiles",
    "seconds",
    "least",
    "CPU s of a process",
    "memory, MiB",
    "from tiled",
    "from VAE Decode",
)
INTRODUCTION = """# VAE decode over ranks

`python benchmarks/vae_decode.py COMFYUI`: a decode of a random latent by ComfyUI in one process, and by one and two CPU
ranks, one thread each, in turn. VAEs of ComfyUI's classes with random weights: Flux's with a decoder of a quarter of
its width, Wan 2.1's of a twelfth; Wan 2.2's (0.7 billion weights) and MiniMax H3's (2.6 billion) as they are, in bf16.
"CPU s" is what the busiest process computed for, which other work on the machine changes less; "memory" what it held at
most, more than before the decode. The last columns are the largest difference, by the range of the picture. Random
weights make the difference from VAE Decode larger than trained ones do. MiniMax H3's VAE Decode cuts the same tiles.
"""
CLOSING = """
ComfyUI cuts a picture into tiles three times and takes the mean: those of a square one of 1024 pixels have 3.8 times
its area, those of this strip 3.5 times. So two ranks are slower than VAE Decode here, and each holds less. A video it
cuts once.
"""


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pack = in_comfyui(find_comfyui(arguments.comfyui).path)
    began_load = os.getloadavg()[0]
    rows, lines = [], []
    pools = {name: Pool(parse_devices(f"cpu:{count}").devices, threads_per_rank=1) for name, count in RANKS.items()}
    for title, (kind, shape) in ((title, case) for title, case in CASES.items() if arguments.only in title):
        found, line = measured(pack, title, kind, shape, pools, turns=arguments.turns)
        rows += found
        lines.append(line)
    for pool in pools.values():
        pool.close()
    load = f"load average {began_load:.1f} before and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} CPUs"
    machine = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {arguments.turns} turns, medians, {load}."
    table = "".join(f"| {' | '.join(map(str, row))} |\n" for row in (HEAD, ["---"] * len(HEAD), *rows))
    text = "\n".join([INTRODUCTION, machine + "\n", table, *(f"- {line}" for line in lines)]) + "\n" + CLOSING
    sys.stdout.write(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


def in_comfyui(path: str) -> ModuleType:
    """The pack's parallel_decode, in this process, with ComfyUI on the CPU."""
    sys.path.insert(0, path)
    sys.argv = ["comfyui", "--cpu", "--use-pytorch-cross-attention"]
    importlib.import_module("comfy.options").enable_args_parsing()
    sys.modules["probe_nodes"] = package = ModuleType("probe_nodes")  # without its other nodes, which want a server
    package.__path__ = [str(ROOT / "tests" / "host" / "probe_nodes")]
    importlib.import_module("probe_nodes.vaes")
    load("pack", ROOT / "__init__.py")
    return importlib.import_module("pack.nodes.host.vae.parallel_decode")


def load(name: str, path: Path) -> ModuleType:
    """A module by its file."""
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.inference_mode()
def measured(
    pack: ModuleType, title: str, kind: str, shape: Sequence[int], pools: dict[str, Pool], *, turns: int
) -> tuple[list[Sequence[object]], str]:
    """A row for each way to decode one latent, and how the ranks compare."""
    import nodes as comfy_nodes

    vae = vae_of(kind)
    latent = {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(3))}
    tiles, weights = pack.tiles_of(vae, latent["samples"]), pack.weights_of(vae)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        PLAIN: lambda: comfy_nodes.VAEDecode().decode(vae, latent)[0],
        TILED: lambda: comfy_nodes.VAEDecodeTiled().decode(vae, latent, 512, 64, 64, 8)[0],
    }
    shared = partial(pack.blended, vae, latent["samples"], tiles, weights, check_cancelled=lambda: None)
    for name, pool in pools.items():
        ways[name] = partial(lambda pool: shared(pool=pool)[0], pool)
    large = kind in AT_THEIR_SIZE  # so only the ranks that decode have it, and no turn is thrown away
    for way in () if large else ways.values():
        way()
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    pictures: dict[str, torch.Tensor] = {}
    for turn in range(turns):
        order = list(ways)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for name in order:
            pids = [os.getpid()]
            give_back_heap()
            if name in pools:
                pools[name].vae(lambda held, check: held.hold(weights, check), check_cancelled=lambda: None)
                pids = pools[name].status()["pids"]
                pools[name].give_back(pools[name].devices)
            pictures[name], figure = watched(ways[name], pids)
            figures[name].append(figure)
            if large and name in pools:
                pools[name].vae(lambda held, check: held.free(check), check_cancelled=lambda: None)
    rows = []
    for name, found in figures.items():
        seconds, cpu, memory = ([each[place] for each in found] for place in range(3))
        off = [difference(pictures[name], pictures[other]) for other in (TILED, PLAIN)]
        count = 1 if name == PLAIN and not pack.tiles_by_itself(vae) else len(tiles)
        figures_told = (f"{median(seconds):.2f}", f"{min(seconds):.2f}", f"{median(cpu):.2f}", f"{median(memory):.0f}")
        rows.append((title, name, count, *figures_told, *(f"{each:.1e}" for each in off)))
    one, two = (figures[name] for name in RANKS)
    paired = median(each[0] / other[0] for each, other in zip(one, two, strict=True))
    cpu = median(each[1] for each in one) / median(each[1] for each in two)
    line = f"{title}, {len(tiles)} tiles: two ranks are {paired:.2f} times as fast as one in seconds (median of pairs),"
    return rows, line + f"\n  {cpu:.2f} times by the CPU seconds of the busier rank."


def vae_of(kind: str) -> Any:  # noqa: ANN401 (ComfyUI is imported late)
    """A loaded VAE of random weights."""
    made = sys.modules["probe_nodes.vaes"]
    if kind == made.H3:
        return made.large_h3()
    return made.small_vae(kind, torch.bfloat16 if kind in AT_THEIR_SIZE else None)


def watched(way: Callable[[], torch.Tensor], pids: Sequence[int]) -> tuple[torch.Tensor, tuple[float, float, float]]:
    """What a decode makes, its seconds, the CPU seconds of the busiest of these processes, and MiB that one grew by."""
    processes = [psutil.Process(pid) for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = [(process.cpu_times().user, process.memory_info().rss) for process in processes]
    began = time.perf_counter()
    picture = way()
    seconds = time.perf_counter() - began
    cpu = max(process.cpu_times().user - user for process, (user, _) in zip(processes, before, strict=True))
    grown = max(peak(pid) - held for pid, (_, held) in zip(pids, before, strict=True))
    return picture, (seconds, cpu, grown / MIB)


def peak(pid: int) -> int:
    """Bytes that a process held at most since its peak started anew."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest, by the range of the other."""
    return float((one - other).abs().max() / (other.max() - other.min()))


if __name__ == "__main__":
    main()
