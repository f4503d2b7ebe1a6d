"""What the hooks that share a model's tokens cost beside the bare module: microseconds a block, by family.

    nice -n -5 python benchmarks/hook_cost.py COMFYUI [--pairs 60] [--only Wan] [--profile] [--write FILE]

COMFYUI is the folder of ComfyUI's main.py. `--write benchmarks/hook_cost.md` writes that page.

ComfyUI's own classes, tiny, with as many blocks as published models have about, so that what a call costs once is
spread as it is there. Each pair is one call of the bare module and one with the hooks at work, in turn, in one process;
the group has one rank, so nothing is exchanged and every tensor is as long as in the bare call. What is left is what
hooks do: looking up, cutting, checking lengths, handing attention on. The clock is the thread's own CPU time, which
other programs do not lengthen.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

LIMIT_US = 100
BLOCKS = 24
ABOUT = f"""# What hooks cost

`python benchmarks/hook_cost.py COMFYUI`: ComfyUI's own classes, tiny, {BLOCKS} blocks, one thread, once bare and once
with the hooks of the class's plan at work in a group of one rank, in turn. The difference of each pair, by blocks, in
CPU time of the thread; the limit is a median of {LIMIT_US} us. "bare" is a block of the bare module. Where the
module's own time moves more than hooks cost, the least of all bare calls taken from the least with hooks says more.
"""
HEAD = "| family | bare us | hooks us, median | quartiles | least less least |\n| --- | --- | --- | --- | --- |"


def families() -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    """A tiny model of each family and a call of it."""
    from models.cases_flux import flux, inputs
    from models.cases_images import described, lumina, picture, qwen
    from models.cases_lightricks import av, ltx2, ltxv
    from models.cases_videos import clip, h3
    from models.cases_wan import VIDEO, wan
    from models.tiny import at, noise

    video = {"timestep": at(0.7), "context": noise(1, 9, 48), "attention_mask": None}
    return {
        "Flux.1": lambda: (flux(depth=BLOCKS // 2, depth_single_blocks=BLOCKS // 2), inputs(1)),
        "Qwen-Image": lambda: (qwen(num_layers=BLOCKS), picture(1)),
        "Wan 2.1": lambda: (
            wan(num_layers=BLOCKS),
            {"x": noise(1, *VIDEO), "timestep": at(700), "context": noise(1, 9, 48)},
        ),
        "LTX-Video": lambda: (ltxv(num_layers=BLOCKS), {"x": noise(1, 16, 3, 5, 7), **video}),
        "LTX-2": lambda: (ltx2(num_layers=BLOCKS), av(at(0.7)[None].repeat(1, 105))),
        "MiniMax H3": lambda: (h3(num_layers=BLOCKS), clip()),
        "Z-Image": lambda: (lumina(n_layers=BLOCKS), described(1)),
    }


def measured(model: nn.Module, inputs: dict[str, Any], pairs: int) -> tuple[list[float], list[float]]:
    """CPU seconds of the bare calls, and of those with hooks, pair by pair."""
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs import spec_of
    from parallel_runtime.parallel.attention import SequenceParallelAttention

    shared: SharedModel | None = None

    def seconds(*, hooked: bool) -> float:
        nonlocal shared
        if hooked and shared is None:
            shared = SharedModel(model, spec_of(type(model)), SequenceParallelAttention())
        elif not hooked and shared is not None:
            shared.remove()
            shared = None
        given = copy.deepcopy(inputs)
        began = time.thread_time()
        model(**given)
        return time.thread_time() - began

    bare, shared_s = [], []
    for number in range(pairs + 5):
        order = (False, True) if number % 2 else (True, False)
        took = {hooked: seconds(hooked=hooked) for hooked in order}
        if number >= 5:  # the first calls warm up
            bare.append(took[False])
            shared_s.append(took[True])
    return bare, shared_s


def profiled(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Print where a hooked call's time goes."""
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs import spec_of
    from parallel_runtime.parallel.attention import SequenceParallelAttention

    sequence = SequenceParallelAttention()
    shared = SharedModel(model, spec_of(type(model)), sequence)
    profile = cProfile.Profile()
    for _ in range(10):
        given = copy.deepcopy(inputs)
        profile.enable()
        model(**given)
        profile.disable()
    shared.remove()
    pstats.Stats(profile).sort_stats("tottime").print_stats("parallel_runtime", 25)


def main() -> None:
    """Measure what the command line chooses, print the table and write it."""
    parser = argparse.ArgumentParser(prog="hook_cost", description=__doc__)
    parser.add_argument("comfyui", help="the folder of ComfyUI's main.py")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--only", default="", help="families with this in their name")
    parser.add_argument("--profile", action="store_true", help="print where the time of hooked calls goes instead")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from models.ranks import start_comfyui

    start_comfyui(options.comfyui)
    rows = []
    with torch.inference_mode():
        for name, make in families().items():
            if options.only not in name:
                continue
            model, inputs = make()
            if options.profile:
                profiled(model, inputs)
                continue
            bare, hooked = measured(model, inputs, options.pairs)
            more = [one - other for one, other in zip(hooked, bare, strict=True)]
            low, middle, high = (1e6 * each / BLOCKS for each in statistics.quantiles(more, n=4))
            least = 1e6 * (min(hooked) - min(bare)) / BLOCKS
            one = 1e6 * statistics.median(bare) / BLOCKS
            rows.append(f"| {name} | {one:.0f} | {middle:.0f} | {low:.0f} to {high:.0f} | {least:.0f} |")
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    where = (
        f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}, {options.pairs} pairs."
    )
    if options.write:
        options.write.write_text("\n".join([ABOUT, where, "", HEAD, *rows, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
