"""PixArt Sigma at 2048 x 2048, the comparison that PipeFusion began with: pipelines, Ulysses, Ring, alone and with cfg.

    python -m benchmarks.pixart [--rounds 3] [--size 256] [--time-size 256] [--keep FILE]

ComfyUI's own module in CPU ranks of one thread, fp32: 16,384 tokens, a tenth of the width (16 heads of 7), 8 blocks,
random weights. A step is ComfyUI's at a cfg above 1: a call for the prompt and one for the negative, of unequal texts.
Latents alone; what a VAE takes stands apart. Owns the plans, what is counted and timed, and benchmarks/pixart.md.

Calls, bytes and memory are of every plan, with an attention function that leaves out the arithmetic: eight ranks share
two cores, and what is sent does not depend on it. Times are with ComfyUI's, at as many ranks as there are cores.
"""

import argparse
import json
import math
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from benchmarks.pipefusion import table  # noqa: E402
from families.comfy_classes import Shapes, shapes_of  # noqa: E402
from families.files import ModelFile, write_model_files  # noqa: E402
from host.fetch import comfyui_path  # noqa: E402
from parallel_runtime.checkpoint import HOSTED, ComfyUI, ModelSpec  # noqa: E402
from parallel_runtime.devices import parse_devices  # noqa: E402
from parallel_runtime.models.hosted.calls import to_tree  # noqa: E402
from parallel_runtime.plan import ParallelPlan  # noqa: E402
from parallel_runtime.planner.counted import counted_cost  # noqa: E402
from parallel_runtime.planner.counting import Counts  # noqa: E402
from parallel_runtime.planner.known import known_calibration  # noqa: E402
from parallel_runtime.planner.shapes import Work  # noqa: E402
from parallel_runtime.pool.calls import ModelCall  # noqa: E402
from parallel_runtime.pool.pool import Pool  # noqa: E402

TARGET = Path(__file__).with_name("pixart.md")
PIXART, STEPS = "comfy.ldm.pixart.pixartms.PixArtMS", 20
WIDTH, BLOCKS, TEXTS = 112, 8, (120, 20)  # of the prompt and the negative
COUNTED = (
    *("ulysses=1", "pipefusion=2", "pipefusion=4", "pipefusion=8", "ulysses=2", "ulysses=4", "ulysses=8"),
    *("ring=2", "ring=4", "ring=8", "cfg=2", "cfg=2,pipefusion=2", "cfg=2,pipefusion=4", "cfg=2,ulysses=2"),
    *("cfg=2,ulysses=4", "cfg=2,ring=2", "cfg=2,pipefusion=2,ulysses=2"),
)
TIMED = ("ulysses=1", "pipefusion=2", "pipefusion=2,patches=8", "ulysses=2", "ring=2", "cfg=2")
PUBLISHED = """## The published figures

PixArt-alpha at 2048 x 2048, 20 steps, 8 A100, whole images, seconds, by an engine and by its version after a rewrite
(https://github.com/xdit-project/xDiT/issues/137):

| plan | before | after |
| --- | --- | --- |
| pipefusion=8 | 3.37 | 3.98 |
| ulysses=8 | 2.46 | 11.00 |

They are of 28 blocks, 1,152 wide, by the clock of the whole pipeline. Nothing above is a time of eight devices; what
can be set beside them is what is sent. Between A100s of one board what Ulysses sends costs little, and a pipeline waits
while it fills and drains; over slow links the bytes above decide.

## What the planner predicts of the real model

ComfyUI's class of 28 blocks, 1,152 wide, fp16, counted on the meta device; 20 steps of both calls at 16,384 tokens on
the planner's figures of A100s, seconds of the steps alone. A pipeline is empty between two calls here, with as many
patches as stages: its bubble is what makes it slower than in engines that go on from step to step.

{predicted}
"""


def write_zeros(path: Path, shapes: Shapes) -> None:
    """A file of fp16 weights that are all zero and take no space on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def predicted() -> list[list[str]]:
    """Rows of the real model's plans: seconds of 20 steps on A100s by NVLink and by PCIe, and beside one."""
    arguments = {"model_max_length": 300, "micro_condition": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pixart.safetensors"
        write_zeros(path, shapes_of({"": (PIXART, arguments)})[""])
        comfyui = ComfyUI(str(comfyui_path()), ("--use-pytorch-cross-attention",))
        counted = Counts().of(str(path), "float16", comfyui, width=2048, height=2048)
    text = TEXTS[0]
    work = Work(image_tokens=counted.image_tokens, text_tokens=text, guided=True, element_bytes=2, steps=STEPS)
    rows = []
    for name in COUNTED:
        plan, cells = ParallelPlan.parse(name), []
        for kind, link in (("A100", "nvlink3"), ("A100 PCIe", "pcie4")):
            machine = known_calibration(kind, link, devices=8)
            seconds, alone = (
                counted_cost(counted.model, work, each, machine).image_s(STEPS) for each in (plan, ParallelPlan())
            )
            cells += [f"{seconds:.2f}", f"{alone / seconds:.2f}x"]
        rows.append([str(plan.ranks), plan.describe(), *cells])
    return rows


def write_model(folder: Path) -> ModelSpec:
    """The file."""
    arguments = {"depth": BLOCKS, "hidden_size": WIDTH, "model_max_length": 300, "micro_condition": False}
    file = ModelFile(name="pixart.safetensors", class_path=PIXART, arguments=arguments, seed=8)
    (path,) = write_model_files(folder, [file])
    comfyui = ComfyUI(str(comfyui_path()), ("--use-pytorch-cross-attention",))
    return ModelSpec.of(path, "float32", adapter=HOSTED, comfyui=comfyui)


def calls_of(size: int, *, run: str, step: int) -> list[ModelCall]:
    """Both calls of a step, of a latent of `size` x `size`; `run` has the keys of the step before."""
    found = []
    for text in TEXTS:
        numbers = torch.Generator().manual_seed(text)
        x = torch.randn(1, 4, size, size, generator=numbers) * (1 - 0.1 * step)
        context = torch.randn(1, text, 4096, generator=numbers)
        timestep = torch.full((1,), 900.0 - 100 * step)
        tree, tensors = to_tree({"args": [x, timestep, context], "kwargs": {"transformer_options": {}}})
        options = {"call": tree, "tensors": 3, "batched": [], "residuals": [], "method": None}
        told = {"pipeline": {"run": run, "key": f"text of {text}"}}
        named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
        shape = (1, x.numel())
        found.append(ModelCall(tensors=named, out_shape=shape, out_dtype=torch.float32, options=options | told))
    return found


@contextmanager
def pool_of(ranks: int, engine: str = "NarrowEngine") -> Iterator[Pool]:
    """CPU ranks of one thread, whose engine is one of pixart_engine.py's."""
    devices, folder = parse_devices(f"cpu:{ranks}").devices, str(Path(__file__).parent)
    with Pool(devices, threads_per_rank=1, engine=f"pixart_engine:{engine}", python_path=(folder,)) as pool:
        yield pool


def memory(pids: Sequence[int], field: str) -> list[int]:
    """Bytes of a field of each process's status: VmRSS, or VmHWM, the most that there was."""
    found = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith(f"{field}:"))
        found.append(int(line.split()[1]) * 1024)
    return found


def count(spec: ModelSpec, name: str, size: int) -> list[str]:
    """A row of what a plan's fullest rank sends and holds: two steps in workers of its own, of stages one is warm-up.

    Ranks, plan, calls; megabytes sent by it and by all, in warm-up by it; those of its weights; its peak above them.
    """
    plan = ParallelPlan.parse(name)
    with pool_of(plan.ranks, engine="CountedEngine") as pool:
        loaded = pool.load(spec, plan)
        warm = pool.run(spec, plan, calls_of(64, run="small", step=0))  # what is imported and made once
        pids = pool.status()["pids"]
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
        before = memory(pids, "VmRSS")
        warm = pool.run(spec, plan, calls_of(size, run="counted", step=0))
        result = pool.run(spec, plan, calls_of(size, run="counted", step=1))
        peak = max(after - first for after, first in zip(memory(pids, "VmHWM"), before, strict=True))
    sent = [rank.sent_bytes for rank in result.ran]
    sizes = (max(sent), sum(sent), max(rank.sent_bytes for rank in warm.ran), max(loaded.parameter_bytes), peak)
    calls = max(rank.collectives for rank in result.ran)
    return [str(plan.ranks), plan.describe(), str(calls), *(f"{each / 1e6:,.1f}" for each in sizes)]


def timed(pool: Pool, spec: ModelSpec, name: str, size: int, number: int) -> list[str]:
    """Seconds of the first step of a run and of the one after it."""
    plan, seconds = ParallelPlan.parse(name), []
    pool.load(spec, plan)
    for step in (0, 1):
        calls = calls_of(size, run=f"{name} {number}", step=step)
        began = time.perf_counter()
        pool.run(spec, plan, calls)
        seconds.append(time.perf_counter() - began)
    return [f"{each:.2f}" for each in seconds]


def time_rows(found: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    """A row a plan: medians, and the median of each round's ratio to one rank."""
    alone = found["ulysses=1"]
    rows = []
    for name, rounds in found.items():
        first, later = (median(each[step] for each in rounds) for step in (0, 1))
        faster = median(one[1] / mine[1] for one, mine in zip(alone, rounds, strict=True))
        plan = ParallelPlan.parse(name)
        rows.append([str(plan.ranks), plan.describe(), f"{first:.2f}", f"{later:.2f}", f"{faster:.2f}x"])
    return rows


def decode_s(size: int) -> float:
    """Seconds that a decoder of SD's layout, a quarter as wide, takes for a latent of `size` x `size`."""
    sys.path.insert(0, str(comfyui_path()))
    sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfy.ldm.modules.diffusionmodules.model import Decoder

    torch.manual_seed(0)
    sizes = {"ch": 32, "out_ch": 3, "ch_mult": (1, 2, 4, 4), "num_res_blocks": 2, "attn_resolutions": []}
    decoder = Decoder(**sizes, in_channels=3, resolution=256, z_channels=4).eval()
    latent = torch.randn(1, 4, size, size)
    with torch.inference_mode():
        began = time.perf_counter()
        decoder(latent)
    return time.perf_counter() - began


class Kept:
    """What is known, in a file of a JSON object a line, so that a run that was ended goes on with it. None: no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []

    def cells(self, kind: str, name: str, measure: Callable[[], list[str]]) -> list[str]:
        """The cells of a row: as they are kept, else measured, kept and printed."""
        for said in map(json.loads, self._lines):
            if (said["kind"], said["name"]) == (kind, name):
                return list(said["cells"])
        cells = measure()
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "name": name, "cells": cells}) + "\n")
        print(kind, name, *cells, sep=" | ", flush=True)  # noqa: T201
        return cells


def page(counted: Sequence[list[str]], times: dict[str, list[tuple[float, float]]], about: str, vae: str) -> str:
    """All of it."""
    sent = ("ranks", "plan", "calls a rank", "sent a rank, MB", "by all, MB", "in warm-up, MB", "weights a rank, MB")
    took = ("ranks", "plan", "first step, s", "later step, s", "beside one rank")
    lines = [
        "# PixArt at 2048 x 2048",
        "",
        (__doc__ or "").strip(),
        "",
        about,
        "",
        "## What a step sends and holds",
        "",
    ]
    lines += [COUNTS, *table((*sent, "peak growth, MB"), counted), "", "## Times", ""]
    expected = ("ranks", "plan", "NVLink, s", "beside one", "PCIe 4.0, s", "beside one")
    real = PUBLISHED.format(predicted="\n".join(table(expected, predicted())))
    lines += [TIMES, *table(took, time_rows(times)), "", "## The VAE", "", vae, real]
    return "\n".join(lines)


COUNTS = """A step after the warm-up, both calls: a rank's calls (collectives and messages), its bytes and those of all
ranks, and what the same rank sends in a step of the warm-up. A rank here is the one with the most. Peak growth is
resident memory at its highest in two steps, above what the rank had with its weights: activations, kept keys and
values, buffers. Patches are as many as stages. Every stage has what is outside of the blocks, which at a tenth of the
width is half of the file (most of it the text's projection).
"""
TIMES = """Medians; plans in turn, round by round, and the last column the median of each round's ratio. `first step` is
warm-up for a pipeline: one stage after the other. `later step` begins and ends with the pipeline empty, as each step
does in ComfyUI's loop: with M patches over 2 stages, a bubble of 1 / (M + 1) a call.
"""
VAE = """One process decodes, whatever the plan was; it is in none of the figures above. A decoder of SD's layout at a
quarter of its width, random weights, a latent of {size} x {size}: {seconds} s.
"""


def main() -> None:
    """Count, time and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=256, help="height and width of the latent; 256 is 2048 pixels")
    parser.add_argument("--time-size", type=int, default=256, help="the same of the runs that are timed")
    parser.add_argument("--keep", type=Path, help="a file of what is known; a run that was ended goes on with it")
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    load_before, kept, time_size = os.getloadavg()[0], Kept(arguments.keep), arguments.time_size
    with tempfile.TemporaryDirectory() as folder:
        spec = write_model(Path(folder))
        counted = []
        for name in COUNTED:
            measure = partial(count, spec, name, arguments.size)
            counted.append(kept.cells("counted", ParallelPlan.parse(name).describe(), measure))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in TIMED}
        with pool_of(2) as pool:
            for number in range(arguments.rounds):
                for name, rounds in times.items():
                    cells = kept.cells(f"round {number}", name, partial(timed, pool, spec, name, time_size, number))
                    rounds.append((float(cells[0]), float(cells[1])))
    (vae_s,) = kept.cells("vae", "", lambda: [f"{decode_s(time_size):.1f}"])
    about = (
        f"{(arguments.size // 2) ** 2:,} tokens where plans are counted, {(time_size // 2) ** 2:,} where they are "
        f"timed, {arguments.rounds} round(s). torch {torch.__version__}, {os.cpu_count()} cores shared with others, "
        f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    )
    arguments.output.write_text(
        page(counted, times, about, VAE.format(seconds=vae_s, size=time_size)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
