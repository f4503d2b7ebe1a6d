"""What a hosted model costs to load, in seconds and memory, beside stock ComfyUI: a Wan file, in each kind of weights.

    python benchmarks/hosted_loading.py COMFYUI [--gib 1.0] [--runs 3] [--write FILE]

Stock is `comfy.sd.load_diffusion_model` and `load_models_gpu` in a process of its own; ours is the pool's load by two
CPU ranks that run. Both in turn, of a file that the system has in memory. Memory is what a process holds that no file
stands for (`Anonymous` of its smaps_rollup), more than before.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from parallel_runtime.checkpoint import HOSTED, ModelSpec  # noqa: E402
from parallel_runtime.devices import parse_devices  # noqa: E402
from parallel_runtime.plan import ParallelPlan  # noqa: E402
from parallel_runtime.planner.comfyui_process import find_comfyui  # noqa: E402
from parallel_runtime.pool.pool import Pool  # noqa: E402

GIB, MIB = 2**30, 2**20
BLOCKS = 30
PLANS = (ParallelPlan(ulysses=2), ParallelPlan(ulysses=2, weights="sharded"))
HEAD = ("file", "computes in", "loaded by", "seconds, median of runs", "of stock's", "memory a process grows by")
STOCK = """
import json, sys, time
path, comfyui, dtype = sys.argv[1:]
sys.path.insert(0, comfyui)
sys.argv = ["comfyui", "--cpu", "--use-pytorch-cross-attention"]
import comfy.options
comfy.options.enable_args_parsing()
import comfy.model_management, comfy.sd, torch
from pathlib import Path
def held():
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(text.split("Anonymous:")[1].split()[0])
for line in sys.stdin:
    before, began = held(), time.perf_counter()
    model = comfy.sd.load_diffusion_model(path, model_options={"dtype": getattr(torch, dtype)})
    comfy.model_management.load_models_gpu([model])
    print(json.dumps([time.perf_counter() - began, held() - before]), flush=True)
    del model
    comfy.model_management.unload_all_models()
    comfy.model_management.cleanup_models_gc()
"""


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", help="the folder of ComfyUI's main.py")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the file, in bf16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", type=Path, help="append the table to this file")
    arguments = parser.parse_args()
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    print(*lines, sep="\n", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        path = write_file(Path(folder) / "wan.safetensors", gib=arguments.gib)
        for dtype in ("bfloat16", "float32"):
            for row in rows(path, arguments.comfyui, dtype, runs=arguments.runs):
                lines.append(f"| {path.stat().st_size / GIB:.2f} GiB, bf16 | {dtype} | {row} |")
                print(lines[-1], flush=True)  # noqa: T201
    if arguments.write is not None:
        with arguments.write.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + f"\n\ntorch {torch.__version__}, {arguments.runs} runs a row.\n")


def write_file(path: Path, *, gib: float) -> Path:
    """A Wan file in bf16 of about this size; its blocks are alike."""
    from families.comfy_classes import shapes_of
    from families.wan import wan_file
    from host.tiny_models import make_tensor, to_bytes, write_layout

    width = 128 * max(1, round((gib * GIB / 2 / BLOCKS / 12) ** 0.5 / 128))  # 12 squares of it a block
    sizes = {"dim": width, "ffn_dim": 2 * width, "num_layers": BLOCKS, "freq_dim": 256}
    file = wan_file("loading", "t2v", heads=width // 128, seed=1, **sizes)
    shapes = shapes_of({file.name: (file.class_path, file.arguments)})[file.name]
    made: dict[str, bytes] = {}

    def values_of(row: object) -> bytes:
        name = re.sub(r"blocks\.\d+\.", "blocks.0.", row.name)  # type: ignore[attr-defined]
        if name not in made:
            made[name] = to_bytes(make_tensor(row, seed=1).bfloat16())  # type: ignore[arg-type]
        return made[name]

    told = {"dtype": torch.bfloat16, "metadata": file.metadata}
    return write_layout(path, file.rows(shapes), seed=1, values_of=values_of, **told)


def rows(path: Path, comfyui: str, dtype: str, *, runs: int) -> list[str]:
    """Stock's row, and ours for each kind of weights."""
    command = [sys.executable, "-c", STOCK, str(path), comfyui, dtype]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(command, **pipes)  # noqa: S603  our own program
    spec = ModelSpec.of(path, dtype, adapter=HOSTED, comfyui=find_comfyui(comfyui))
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in ("stock", *(plan.weights for plan in PLANS))}
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        pool.start()
        for _ in range(runs + 1):  # the first imports
            taken["stock"].append(asked(child))
            for plan in PLANS:
                before, began = held(pool), time.perf_counter()
                pool.load(spec, plan)
                took = time.perf_counter() - began
                taken[plan.weights].append(
                    (took, max(now - then for now, then in zip(held(pool), before, strict=True)))
                )
                pool.unload(spec)
    child.communicate()
    stock = median(took for took, _ in taken["stock"][1:])
    found = []
    for name, each in taken.items():
        seconds, more = median(took for took, _ in each[1:]), median(grown for _, grown in each[1:])
        title = "stock ComfyUI" if name == "stock" else f"2 ranks, {name}"
        found.append(f"{title} | {seconds:.2f} | {seconds / stock:.2f}x | {more / MIB:.0f} MiB")
    return found


def asked(child: "subprocess.Popen[bytes]") -> tuple[float, int]:
    """Stock's seconds and bytes of one load."""
    if child.stdin is None or child.stdout is None:
        raise ValueError("the process was started without pipes; start it with both")
    child.stdin.write(b"load\n")
    child.stdin.flush()
    took, grown = json.loads(child.stdout.readline())
    return took, grown


def held(pool: Pool) -> list[int]:
    """Bytes of each rank that no file stands for."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pool.status()["pids"]]
    return [1024 * int(text.split("Anonymous:")[1].split()[0]) for text in texts]


if __name__ == "__main__":
    main()
