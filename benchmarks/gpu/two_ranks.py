"""Experiment 9: two real ranks beside the formula: one rank's share, and what shows of the exchange.

On CPU ranks the formula must come near. On one GPU two ranks take turns on the device, through NCCL over sockets: that
shows that they are right together, and their time is no speed of two GPUs.
"""

from contextlib import closing
from statistics import median

import torch

from benchmarks.share.bound import bound_s
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.hardware import Interconnect
from parallel_runtime.planner.known import known_link
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error
from parallel_runtime.trials.calibrate import calibrate
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

from .setting import Result, Setting

RANKS = 2


def run(setting: Setting) -> Result:
    """Two ranks and the share of one."""
    cuda = setting.device.type == "cuda"
    name = setting.model_names()[0]
    rank = setting.rank(name)
    call, small = rank.call(setting.size(name)), rank.small_call(setting.size(name))
    share = rank.measure(call, small, ulysses=RANKS, steps=setting.steps)
    real, error, sent, link = real_step(setting, name)
    if sent != share.num_bytes:
        raise ValueError(f"the first rank sent {sent} bytes, its share counts {share.num_bytes}; they must be equal")
    formula = bound_s(share, link)
    lines = ["| what | ms a step |", "| --- | --- |", f"| one rank's share | {1e3 * share.computing_s:.2f} |"]
    lines += [f"| formula, link {link.name} | {1e3 * formula:.2f} |", f"| {_what(cuda)} | {1e3 * real:.2f} |"]
    decided = f"{name}: {sent} bytes as counted, difference from one process {error:.1e}"
    if not cuda:
        decided += f", formula / real {formula / real:.3f}"
    return Result(table=lines, decided=decided)


def real_step(setting: Setting, name: str) -> tuple[float, float, int, Interconnect]:
    """Median seconds of two ranks' step, their difference from one process, bytes of the first, and their link."""
    cuda = setting.device.type == "cuda"
    if cuda:
        from gpu.real_cuda.sharing import share

        share("nccl")
    told = ",".join([str(setting.device)] * RANKS) if cuda else f"cpu:{RANKS}"
    devices = parse_devices(told, num_cuda=torch.cuda.device_count()).devices
    size, plan = setting.size(name), ParallelPlan(ulysses=RANKS)
    workload = Workload(width=size.width, height=size.height, text_tokens=size.text_tokens, frames=size.frames)
    given = {"steps": 1, "comfyui": setting.comfyui.path, "device": devices[0]}
    with (
        closing(Trial(str(setting.file(name)), setting.dtype, workload, [plan], **given)) as trial,
        Pool(devices, threads_per_rank=1) as pool,
    ):
        link = known_link("memory") if setting.small or cuda else calibrate(pool).link
        runner = PlanRunner(pool, trial.spec, plan, options={"timed": False})
        seconds = []
        for _ in range(1 + setting.steps):
            (out,) = runner.run(trial.calls)
            seconds.append(max(each.step_s for each in runner.ranks))
        dtype = getattr(torch, trial.spec.dtype)
        (want,) = trial.references(dtype, dtype)
        return median(seconds[1:]), relative_error(out, want), runner.ranks[0].sent_bytes, link


def _what(cuda: bool) -> str:
    return "two ranks in turn on the one GPU: right, and no speed" if cuda else "two CPU ranks"
