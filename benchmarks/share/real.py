"""The formula beside what two CPU ranks really take, in pairs.

Both ranks' shares run at once, each in a process and a session of its own, as ranks do: they share the memory's
bandwidth, and the scheduler treats them alike. The slower one counts. The link is what `doctor --calibrate` measures
between the ranks. Beside the clock stand the seconds for which the slowest process had a core, by the kernel's books:
what a step takes where nobody else wants the cores, but for waiting. Started as a program, this is one of those
processes: a line on standard input is a step, its seconds a line on standard output.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.hosted.random_calls import Size
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.hardware import Interconnect
from parallel_runtime.pool.pool import Pool
from parallel_runtime.trials.calibrate import calibrate
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

from ..before_after import core_s
from .exchange import local_sequence
from .rank import OneRank, timed_runs

if TYPE_CHECKING:
    from .__main__ import Asked

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2


class RankProcess:
    """One rank's share in a process of its own, until `close`."""

    def __init__(self, asked: "Asked", index: int) -> None:
        told = {"path": asked.path, "dtype": asked.dtype, "comfyui": asdict(asked.comfyui), "size": asdict(asked.size)}
        command = [sys.executable, "-m", "benchmarks.share.real", str(index), json.dumps(told)]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(  # noqa: S603  our own module
            command,
            cwd=ROOT,
            env=one_thread,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as the pool's ranks: the scheduler shares cores out by session first
        )
        self.told: dict[str, float] = self.answer()  # what one step sends

    def start(self) -> None:
        """Begin a step."""
        assert self._process.stdin is not None  # noqa: S101  a pipe
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        """What it says next. Raises `ValueError` where it has ended."""
        assert self._process.stdout is not None  # noqa: S101  a pipe
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"the process of one rank's share ended with status {self._process.wait()}; see above")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def compare(asked: "Asked", *, pairs: int) -> list[str]:
    """Each pair, and the median of what the formula says over what ranks took. Raises `ValueError` for other bytes."""
    size = asked.size
    workload = Workload(width=size.width, height=size.height, text_tokens=size.text_tokens, frames=size.frames)
    plan, devices = ParallelPlan(ulysses=RANKS), parse_devices(f"cpu:{RANKS}").devices
    given = {"steps": 1, "comfyui": asked.comfyui.path, "device": devices[0]}
    pairs_found = []
    with contextlib.ExitStack() as until:
        pool = until.enter_context(Pool(devices, threads_per_rank=1))
        link = calibrate(pool).link
        trial = until.enter_context(closing(Trial(asked.path, asked.dtype, workload, [plan], **given)))
        runner = PlanRunner(pool, trial.spec, plan, options={"timed": False})
        shares = [until.enter_context(closing(RankProcess(asked, index))) for index in range(RANKS)]
        told = max((each.told for each in shares), key=lambda each: each["bytes"])
        exchange = told["bytes"] / link.bandwidth + told["messages"] * link.latency_s
        pids = pool.status()["pids"]
        for number in range(pairs + 1):
            before = [core_s(pid) for pid in pids]
            runner.run(trial.calls)
            on_core = max(core_s(pid) - was for pid, was in zip(pids, before, strict=True))
            real = max(rank.step_s for rank in runner.ranks)
            _refuse_other_bytes([rank.sent_bytes for rank in runner.ranks], [each.told["bytes"] for each in shares])
            for each in shares:
                each.start()
            answers = [each.answer() for each in shares]
            clock, core = (max(each[name] for each in answers) for name in ("seconds", "core_s"))
            if number:  # the first warms up
                pairs_found.append(Pair(clock, core, real, on_core))
    return _told(asked, pairs_found, exchange, link)


@dataclass(frozen=True)
class Pair:
    """Seconds of a share and of a real step: by the clock, and on a core."""

    clock_s: float
    core_s: float
    real_clock_s: float
    real_core_s: float


def _told(asked: "Asked", pairs: Sequence[Pair], exchange: float, link: Interconnect) -> list[str]:
    names = ("pair", "share ms, clock, core", "exchange ms", "formula ms", "real ms", "formula / real")
    lines = [f"| {' | '.join(names)} |", "| --- " * 6 + "|"]
    ratios = [
        ((each.clock_s + exchange) / each.real_clock_s, (each.core_s + exchange) / each.real_core_s) for each in pairs
    ]
    for number, (each, ratio) in enumerate(zip(pairs, ratios, strict=True), start=1):
        two = (each.clock_s, each.core_s), (each.clock_s + exchange, each.core_s + exchange)
        share, formula, real = (
            f"{1e3 * clock:.1f}, {1e3 * core:.1f}" for clock, core in (*two, (each.real_clock_s, each.real_core_s))
        )
        lines.append(
            f"| {number} | {share} | {1e3 * exchange:.1f} | {formula} | {real} | {ratio[0]:.3f}, {ratio[1]:.3f} |"
        )
    clock, core = (median(each) for each in zip(*ratios, strict=True))
    said = (
        f"{asked.name}, {RANKS} CPU ranks, link {link.bandwidth / 1e9:.2f} GB/s and {1e6 * link.latency_s:.0f} us as "
        f"calibrated, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: formula / real, median of {len(pairs)} "
        f"pairs: {clock:.3f} by the clock, {core:.3f} on a core"
    )
    return [*lines, "", said]


def _refuse_other_bytes(real: list[int], local: list[float]) -> None:
    if real != local:
        raise ValueError(f"real ranks sent {real} bytes, one rank's share counts {local}; the share is not the ranks'")


def main() -> None:
    """Be one rank's share, a step for each line, until nobody asks any more."""
    from parallel_runtime.models.hosted.comfyui import import_comfyui

    parser = argparse.ArgumentParser(prog="benchmarks.share.real", description=__doc__)
    parser.add_argument("index", type=int)
    parser.add_argument("told")
    arguments = parser.parse_args()
    told = json.loads(arguments.told)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # ComfyUI prints
    torch.set_num_threads(1)
    comfyui = ComfyUI(told["comfyui"]["path"], tuple(told["comfyui"]["options"]))
    device = torch.device("cpu")
    import_comfyui(comfyui, device)
    rank = OneRank(told["path"], dtype=told["dtype"], comfyui=comfyui, device=device)
    call = rank.call(Size(**told["size"]))
    sequence = local_sequence(ulysses=RANKS, index=arguments.index, device=device)
    run = rank.step(call, sequence)
    timed_runs(run, 1)
    traffic = sequence.ulysses.traffic

    def say(**what: float) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    say(bytes=traffic.num_bytes, messages=traffic.calls)
    for _ in sys.stdin:
        before = core_s(os.getpid())
        took = timed_runs(run, 1, warm_up=0)[0]
        say(seconds=took, core_s=core_s(os.getpid()) - before)


if __name__ == "__main__":
    main()
