"""Experiment 1: where the milliseconds between stock ComfyUI's step and one hosted rank's go.

One model four times: stock ComfyUI's module in a process of its own, which has nothing of this pack; the same bare in
this process, with the attention kernels that ranks ask first; as one rank calls it (hooks, signs of life, hand-over);
and a rank of a pool. Of the pool two times stand beside each other: the rank's own step, and what its
caller waits; the difference is the boundary between steps.
"""

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.share.device_time import Busy, busy_in
from benchmarks.share.exchange import local_sequence
from benchmarks.share.rank import OneRank, timed_runs
from parallel_runtime.devices import parse_devices
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.calls import from_tree
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.timing import wait_for_all
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

from .setting import Result, Setting

MODEL = "flux.1"
WORTH_MS = 2.0  # of boundary a step, above which the loop belongs into the workers


def bare_step(rank: OneRank, call: ModelCall) -> Callable[[], None]:
    """ComfyUI's module without anything around it."""
    tensors = [call.tensors[f"t{number}"].to(rank.device) for number in range(len(call.tensors))]

    def run() -> None:
        given: Any = from_tree(call.options["call"], [each.clone() for each in tensors])
        with torch.inference_mode():
            rank.model.module(*given["args"], **given["kwargs"])
        wait_for_all(rank.device)

    return run


def run(setting: Setting) -> Result:
    """Three ways, and what is between two steps."""
    name = setting.model_names()[0] if setting.small else MODEL
    rank = setting.rank(name)
    call = rank.call(setting.size(name))
    bare = bare_step(rank, call)
    hosted = rank.step(call, local_sequence(device=setting.device))
    seconds: dict[str, list[float]] = {"bare": [], "hosted": []}
    for round_ in range(2):  # in turn, in the other order the second time: drift hits both
        for which in ("bare", "hosted") if round_ == 0 else ("hosted", "bare"):
            seconds[which] += [_once(bare if which == "bare" else hosted) for _ in range(1 + setting.steps)][1:]
    busy: dict[str, Busy | None] = {"bare": None, "hosted": None}
    if setting.device.type == "cuda":
        busy = {"bare": busy_in(bare, setting.device), "hosted": busy_in(lambda: hosted(), setting.device)}
    clock, _ = timed_runs(hosted, setting.steps)
    rank_s, caller_s, stock_s = _pool(setting, name)
    boundary = caller_s - rank_s
    rows = [
        _row("stock ComfyUI's module, in a process of its own", stock_s, None),
        _row("bare, with the attention of ranks", median(seconds["bare"]), busy["bare"]),
        _row("as one rank calls it", median(seconds["hosted"]), busy["hosted"]),
        _row("a rank of a pool, its own step", rank_s, None),
        _row("what its caller waits", caller_s, None),
    ]
    head = ["| way | ms a step | kernels ms | largest gap ms | attention |", "| --- " * 5 + "|"]
    blocks = median(seconds["hosted"]) - median(seconds["bare"])
    much = 1e3 * boundary > WORTH_MS
    decided = (
        f"{name}: hooks and hand-over in the rank {1e3 * blocks:+.2f} ms a step, the boundary {1e3 * boundary:.2f} ms; "
        f"the loop {'belongs into the workers' if much else 'may stay in ComfyUI'} (limit {WORTH_MS} ms)"
    )
    return Result(table=[*head, *rows], decided=decided, constants={"boundary_s": boundary, "step_s": clock})


def _once(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _row(way: str, seconds: float, busy: Busy | None) -> str:
    more = (
        "| | | |"
        if busy is None
        else (f"| {1e3 * busy.seconds:.2f} | {1e3 * busy.largest_gap_s:.3f} | {busy.attention_kernel()[:60]} |")
    )
    return f"| {way} | {1e3 * seconds:.2f} {more}"


def _pool(setting: Setting, name: str) -> tuple[float, float, float]:
    """Median seconds of the rank's step, of its caller, and of stock ComfyUI's process."""
    size = setting.size(name)
    workload = Workload(width=size.width, height=size.height, text_tokens=size.text_tokens, frames=size.frames)
    told = "cpu:1" if setting.device.type == "cpu" else str(setting.device)
    devices = parse_devices(told, num_cuda=torch.cuda.device_count()).devices
    plan, found, stock_s = ParallelPlan(), list[tuple[float, float]](), list[float]()
    given = {"steps": 1, "comfyui": setting.comfyui.path, "device": devices[0]}
    with (
        closing(Trial(str(setting.file(name)), setting.dtype, workload, [plan], **given)) as trial,
        Pool(devices, threads_per_rank=1) as pool,
    ):
        runner = PlanRunner(pool, trial.spec, plan, options={"timed": False})
        for _ in range(2 + setting.steps):
            stock_s.append(_once(partial(trial.compute_once, 1)))
            began = time.perf_counter()
            runner.run(trial.calls)
            found.append((max(rank.step_s for rank in runner.ranks), time.perf_counter() - began))
    own, caller = zip(*found[2:], strict=True)
    return median(own), median(caller), median(stock_s[2:])
