"""A long video: memory of a rank and time of a call with 100,000 tokens, by how many ranks share them.

    python benchmarks/long_video.py [COMFYUI] [--tokens 100000] [--write FILE]

COMFYUI is the folder of ComfyUI's main.py, by default that of the tests; `make long-video` writes the page. One block
of ComfyUI's own Wan class, tiny, on CPU ranks of one thread; the row of one rank is the bare module in one process, and
the others' results are held against its result. Memory is the most that a rank held at once beyond what it held before,
without what files and shared memory stand for. A table of tokens squared would be 37 GiB at 100,000 tokens, of bytes
9.3 GiB. Owns the measure and the page.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from host.fetch import comfyui_path  # noqa: E402
from parallel_runtime.checkpoint import ModelSpec  # noqa: E402
from parallel_runtime.devices import parse_devices  # noqa: E402
from parallel_runtime.model_call import ModelCall  # noqa: E402
from parallel_runtime.models.hosted.calls import forward_call  # noqa: E402
from parallel_runtime.plan import ParallelPlan  # noqa: E402
from parallel_runtime.planner.comfyui_process import find_comfyui  # noqa: E402
from parallel_runtime.pool.pool import Pool  # noqa: E402
from parallel_runtime.proof import relative_error  # noqa: E402

MIB = 2**20
HEADS, HEAD_DIM, TEXT, FRAMES = 4, 16, 48, 20
SIZES = {"dim": HEADS * HEAD_DIM, "ffn_dim": 4 * HEADS * HEAD_DIM, "num_layers": 1, "freq_dim": 32}
SILENT_S = 1800.0  # a rank shows life after each block, and here one takes minutes on a busy machine
WIDE = 640  # channels, so that a latent of few tokens is large
PLANS = (ParallelPlan(ulysses=2), ParallelPlan(ring=2), ParallelPlan(ulysses=4), ParallelPlan(ulysses=2, ring=2))
HEAD = ("plan", "tokens", "latent, MiB", "memory of a rank, MiB", "of one process'", "seconds", "relative error")


@dataclass(frozen=True)
class Measured:
    """The result of a call, its seconds, and the bytes that each rank held at most beyond what it held before."""

    out: torch.Tensor
    seconds: float
    grown: list[int]


def write_wan(folder: Path, *, channels: int = 16) -> Path:
    """A Wan file of one block, for latents of so many channels."""
    from families.files import write_model_files
    from families.wan import wan_file

    sizes = SIZES | {"in_dim": channels, "out_dim": channels}
    (path,) = write_model_files(folder, [wan_file(f"long_{channels}", "t2v", heads=HEADS, seed=1, **sizes)])
    return path


def video_call(tokens: int, *, channels: int = 16) -> ModelCall:
    """A call of `FRAMES` frames with about `tokens` tokens in all, each 2 x 2 latent pixels."""
    height = max(1, math.isqrt(tokens // FRAMES // 2))
    width = tokens // FRAMES // height
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(1, channels, FRAMES, 2 * height, 2 * width, generator=numbers)
    given = (x, torch.tensor([700.0]), torch.randn(1, 9, TEXT, generator=numbers))
    return forward_call(torch.nn.Identity(), channels, given, {})


def measured(path: Path, comfyui: str, plan: ParallelPlan, call: ModelCall, warm: ModelCall) -> Measured:
    """A call in ranks of their own, after another one."""
    spec = ModelSpec.of(path, "float32", comfyui=find_comfyui(comfyui))
    with Pool(parse_devices(f"cpu:{plan.ranks}").devices, threads_per_rank=1, deadline_s=SILENT_S) as pool:
        pool.run(spec, plan, [warm])
        pids = pool.status()["pids"]
        before = [held(pid) for pid in pids]
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        began = time.perf_counter()
        (out,) = pool.run(spec, plan, [call]).outs
        seconds = time.perf_counter() - began
        return Measured(out, seconds, [peak(pid) - then for pid, then in zip(pids, before, strict=True)])


def held(pid: int) -> int:
    """Bytes of a process that neither a file nor shared memory stands for."""
    return _status(pid)["RssAnon"]


def peak(pid: int) -> int:
    """The most of them at once since its peak was reset. What files and shared memory stand for has only grown."""
    now = _status(pid)
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"]


def _status(pid: int) -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def rows(path: Path, comfyui: str, call: ModelCall, plans: Sequence[ParallelPlan]) -> list[str]:
    """The lines of one call under each plan, the one process first; printed as they are known."""
    channels = call.tensors["t0"].shape[1]
    tokens, size = call.tensors["t0"][0, 0].numel() // 4, call.tensors["t0"].nbytes / MIB
    warm, lines, one = video_call(1000, channels=channels), [], None
    for plan in (ParallelPlan(), *plans):
        found = measured(path, comfyui, plan, call, warm)
        one = found if one is None else one
        error = relative_error(found.out, one.out) if plan.parts > 1 else 0.0
        most, share = max(found.grown) / MIB, max(found.grown) / max(one.grown)
        name = "one process" if plan.parts == 1 else plan.describe()
        lines.append(
            f"| {name} | {tokens:,} | {size:.0f} | {most:.0f} | {share:.2f} | {found.seconds:.1f} | {error:.1e} |"
        )
        print(lines[-1], flush=True)  # noqa: T201
    return lines


def without_exchange(call: ModelCall) -> ModelCall:
    """The same call, whose ranks attend to their own tokens alone: what must be seen as wrong."""
    return replace(call, options={**call.options, "local_attention": True})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", nargs="?", help="the folder of ComfyUI's main.py; default: that of the tests")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--write", type=Path, help="the page, whose table this replaces")
    arguments = parser.parse_args()
    comfyui = arguments.comfyui or str(comfyui_path())
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    with tempfile.TemporaryDirectory(prefix="long-video-") as folder:
        path = write_wan(Path(folder))
        lines += rows(path, comfyui, video_call(arguments.tokens), PLANS)
        wide = write_wan(Path(folder), channels=WIDE)
        lines += rows(wide, comfyui, video_call(arguments.tokens // 3, channels=WIDE), PLANS[:1])
    if arguments.write is not None:
        page = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(re.sub(r"(^\|.*\n)+", "\n".join(lines) + "\n", page, flags=re.M), encoding="utf-8")


if __name__ == "__main__":
    main()
