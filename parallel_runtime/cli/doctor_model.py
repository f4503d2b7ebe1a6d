"""`doctor --model FILE`: what the file is, which plans it takes on these devices, and how much memory a rank needs.

Owns the plans that are tried and what is said of them. Does not own what ComfyUI knows of a file
(models/hosted/reference.py). Reads headers; nothing is loaded. The image is of 1024 x 1024 pixels.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..checkpoint import read_header
from ..devices import Device
from ..plan import ParallelPlan
from ..planner.comfyui_process import ComfyUIProcess, find_comfyui
from ..planner.memory import BLOCKS_AT_HAND

GIB = 2**30


@dataclass(frozen=True)
class Needed:
    """Bytes that a plan takes of each rank's device, and of host memory."""

    device: int
    host: int = 0


def describe_file(path: str, comfyui: str | None, devices: Sequence[Device], free: Sequence[int | None]) -> dict:
    """What is known of the file at `path`; `free` are the bytes that each device has free, None where it is silent.

    Raises `ValueError` for a file that is no diffusion model, and where no ComfyUI is to be found.
    """
    read_header(path)
    report, needed, refuse = _asked(path, comfyui, devices[0])
    rows = []
    for plan in _plans(len(devices)):
        why = _why_not(refuse, plan)
        bytes_ = None if why else needed(plan)
        rows.append({"plan": plan.describe(), "takes": not why, "why": why} | _memory(bytes_, plan, devices, free))
    return {"file": os.path.basename(path), **report, "file_bytes": os.path.getsize(path), "plans": rows}


def describe(report: Mapping) -> list[str]:
    """The lines for people."""
    tokens = "" if report["tokens"] == "shared" else f"; {report['tokens']}"
    lines = [
        f"model {report['file']}: {report['model']}, computed by {report['computed_by']}, "
        f"{report['file_bytes'] / GIB:.2f} GiB{tokens}"
    ]
    for row in report["plans"]:
        if not row["takes"]:
            lines.append(f"  {row['plan']}: no: {row['why']}")
            continue
        host = f" and {row['host_bytes_per_rank'] / GIB:.2f} GiB of host memory" if row["host_bytes_per_rank"] else ""
        fits = ", which does not fit" if row["fits"] is False else ""
        lines.append(f"  {row['plan']}: yes, {row['bytes_per_rank'] / GIB:.2f} GiB a rank{host}{fits}")
    return lines


def _plans(ranks: int) -> Iterator[ParallelPlan]:
    """Every way to use so many ranks, each by itself."""
    if ranks == 1:
        texts = ["ulysses=1", "weights=offloaded"]
    else:
        texts = [f"ulysses={ranks}", f"ring={ranks}"]
        texts += [f"cfg=2,ulysses={ranks // 2}"] if ranks % 2 == 0 else []
        texts += [f"data={ranks}", f"ulysses={ranks},weights=sharded"]
        texts += [f"cfg=2,ulysses={ranks // 2},weights=sharded"] if ranks % 2 == 0 else []
        texts += [f"ulysses={ranks},weights=offloaded"]
    yield from map(ParallelPlan.parse, texts)


def _why_not(refuse: Callable[[ParallelPlan], None], plan: ParallelPlan) -> str:
    try:
        refuse(plan)
    except ValueError as error:
        return str(error)
    return ""


def _memory(needed: Needed | None, plan: ParallelPlan, devices: Sequence[Device], free: Sequence[int | None]) -> dict:
    """Ranks on the CPU share its memory, and weights that are replicated, which lie in the file's pages.

    `fits` is None where a device does not say what it has free.
    """
    if needed is None:
        return {"bytes_per_rank": None, "host_bytes_per_rank": None, "fits": None}
    taken, known = needed.device, [each for each in free if each is not None]
    if devices[0].kind == "cpu":
        taken += needed.host
        taken *= 1 if plan.weights == "replicated" else plan.ranks
    fits = taken <= min(known) if len(known) == len(free) else None
    return {"bytes_per_rank": needed.device, "host_bytes_per_rank": needed.host, "fits": fits}


def _asked(
    path: str, comfyui: str | None, device: Device
) -> tuple[dict, Callable[[ParallelPlan], Needed], Callable[[ParallelPlan], None]]:
    """What ComfyUI says of the file: the report's first entries, what a plan needs, and what refuses one."""
    with ComfyUIProcess(find_comfyui(comfyui), "cpu" if device.kind == "cpu" else str(device)) as process:
        said = process.ask("describe", path=os.path.abspath(path))
    blocks, other = sum(said["block_bytes"]), said["weight_bytes"] - sum(said["block_bytes"])
    visiting = min(blocks, BLOCKS_AT_HAND * max(said["block_bytes"], default=0))

    def needed(plan: ParallelPlan) -> Needed:
        activations = round(said["activation_bytes"] / plan.parts)
        if plan.weights == "replicated":
            return Needed(said["weight_bytes"] + activations)
        part, here = blocks // plan.layout.shards, other + visiting + activations
        return Needed(here, part) if plan.weights == "offloaded" else Needed(here + part)

    def refuse(plan: ParallelPlan) -> None:
        if plan.parts > 1 and said["unshared"]:
            raise ValueError(said["unshared"])

    report = {
        "model": said["model"],
        "computed_by": f"ComfyUI's {said['class']} in {said['dtype']}",
        "tokens": said["unshared"] or "shared",
        "latent": said["latent"],
    }
    return report, needed, refuse
