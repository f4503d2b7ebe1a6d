"""`bench`: is a plan faster, and than what? Everything is interleaved in one run, so that drift hits all alike.

Baselines: one rank of the same engine, and the unmodified diffusers model in one process with one thread and with as
many threads as the plan has ranks (on a GPU, threads play no part: one process, one device). Medians after warm-up.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ..adapters.flux_config import FluxConfig
from ..adapters.flux_inputs import check_plan
from ..checkpoint import ModelSpec, read_header
from ..plan import ParallelPlan
from ..pool.pool import Pool
from .judge import load_judge
from .verify import PlanRunner
from .workload import Workload, choose_devices, relative_error

if TYPE_CHECKING:
    from ..oracle import Oracle

Lane = Callable[[], torch.Tensor]


def run(arguments: argparse.Namespace) -> dict:
    """Time the lanes and return the report. Raises `ValueError` for what cannot be run."""
    if arguments.runs < 1 or arguments.warmup < 0:
        raise ValueError(f"--runs={arguments.runs} --warmup={arguments.warmup}; use at least 1 run and 0 warm-up")
    judge = load_judge()
    plan = ParallelPlan.parse(arguments.plan)
    workload = Workload(
        width=arguments.width, height=arguments.height, text_tokens=arguments.text_tokens, batch=arguments.batch
    )
    config = FluxConfig.from_header(read_header(arguments.model))
    check_plan(config, plan)
    spec = ModelSpec.of(arguments.model, arguments.dtype)
    selection = choose_devices(arguments.devices, plan)
    on_cpu = selection.devices[0].kind == "cpu"
    with Pool(selection.devices, threads_per_rank=arguments.threads_per_rank) as pool:
        loaded = pool.load(spec)
        oracle = judge(spec.path, dtype=getattr(torch, loaded.dtype), device="cpu" if on_cpu else "cuda:0")
        tensors = workload.tensors(config)
        many, one = (PlanRunner(pool, spec, p, options={}) for p in (plan, ParallelPlan()))
        lanes: dict[str, Lane] = {"plan": lambda: many(tensors), "one_rank": lambda: one(tensors)}
        lanes["one_process"] = _in_process(oracle, tensors, threads=1, on_cpu=on_cpu)
        if on_cpu:
            lanes["one_process_n_threads"] = _in_process(oracle, tensors, threads=plan.ranks, on_cpu=True)
        times, blocks, outputs = _interleave(lanes, {"plan": many, "one_rank": one}, arguments)
    return _report(plan, workload, arguments, times, blocks, outputs, many.ranks) | {
        "dtype": loaded.dtype,
        "devices": [str(device) for device in selection.devices],
        "threads_per_rank": arguments.threads_per_rank,
        "torch": torch.__version__,
        "warnings": list(selection.warnings),
    }


def _in_process(oracle: "Oracle", tensors: Mapping[str, torch.Tensor], *, threads: int, on_cpu: bool) -> Lane:
    def lane() -> torch.Tensor:
        if on_cpu:
            torch.set_num_threads(threads)
            return oracle(tensors)
        there = {name: tensor.to("cuda:0") for name, tensor in tensors.items()}
        return oracle(there).cpu()  # waits for the device

    return lane


def _interleave(
    lanes: Mapping[str, Lane], runners: Mapping[str, PlanRunner], arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, torch.Tensor]]:
    """Seconds of every run by lane, seconds in the blocks by lane of ours, and the last outputs."""
    times: dict[str, list[float]] = {name: [] for name in lanes}
    blocks: dict[str, list[float]] = {name: [] for name in runners}
    outputs: dict[str, torch.Tensor] = {}
    for count in range(arguments.warmup + arguments.runs):
        for name, lane in lanes.items():
            began = time.perf_counter()
            outputs[name] = lane()
            seconds = time.perf_counter() - began
            if count < arguments.warmup:
                continue
            times[name].append(seconds)
            if name in runners:
                blocks[name].append(max(rank["blocks_s"] for rank in runners[name].ranks))
    return times, blocks, outputs


def _report(
    plan: ParallelPlan,
    workload: Workload,
    arguments: argparse.Namespace,
    times: Mapping[str, list[float]],
    blocks: Mapping[str, list[float]],
    outputs: Mapping[str, torch.Tensor],
    ranks: list[dict],
) -> dict:
    median = {name: statistics.median(values) for name, values in times.items()}
    block = {name: statistics.median(values) for name, values in blocks.items()}
    end_to_end_speedup = median["one_rank"] / median["plan"]
    block_speedup = block["one_rank"] / block["plan"]
    report = {
        "plan": plan.describe(),
        "name": plan.name,
        "image_tokens": workload.image_tokens,
        "text_tokens": workload.text_tokens,
        "batch": workload.batch,
        "warmup": arguments.warmup,
        "runs": arguments.runs,
        "median_s": median["plan"],
        "min_s": min(times["plan"]),
        "max_s": max(times["plan"]),
        "one_rank_s": median["one_rank"],
        "one_process_s": median["one_process"],
        "speedup_over_one_rank": end_to_end_speedup,
        "speedup_over_one_process": median["one_process"] / median["plan"],
        "block_speedup_over_one_rank": block_speedup,
        "end_to_end_over_block": end_to_end_speedup / block_speedup,
        "max_rel_err": relative_error(outputs["plan"], outputs["one_process"]),
        "bytes_per_step": [rank["bytes"] for rank in ranks],
        "calls_per_step": [rank["calls"] for rank in ranks],
    }
    if "one_process_n_threads" in median:
        report["one_process_n_threads_s"] = median["one_process_n_threads"]
        report["speedup_over_one_process_n_threads"] = median["one_process_n_threads"] / median["plan"]
    return report


def describe(report: Mapping) -> str:
    """The report for people."""
    rows = [
        (report["name"], report["median_s"]),
        ("one rank", report["one_rank_s"]),
        ("diffusers, one process, one thread", report["one_process_s"]),
    ]
    if "one_process_n_threads_s" in report:
        rows.append(("diffusers, one process, as many threads as ranks", report["one_process_n_threads_s"]))
    lines = [f"  {name:50} {seconds:9.4f} s {seconds / report['median_s']:7.2f}x" for name, seconds in rows]
    head = (
        f"{report['image_tokens']} image + {report['text_tokens']} text tokens, batch {report['batch']}, "
        f"{report['dtype']}, median of {report['runs']} after {report['warmup']} warm-up, interleaved"
    )
    tail = (
        f"  blocks alone {report['block_speedup_over_one_rank']:.2f}x over one rank; end to end over blocks "
        f"{report['end_to_end_over_block']:.2f}; relative error {report['max_rel_err']:.1e}; "
        f"{report['calls_per_step'][0]} collectives, {report['bytes_per_step'][0]:,} bytes sent a step by rank 0"
    )
    return "\n".join([*(f"warning: {text}" for text in report["warnings"]), head, *lines, tail])
