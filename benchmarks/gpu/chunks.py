"""Experiment 7: how much of a slow link's exchange hides, by chunks of heads and around a ring.

One rank's share whose exchanges are there when the named link would have delivered them (benchmarks/share/exchange.py):
on a GPU a kernel on a stream of its own runs as long, while attention does. Beside each step stands what overlap.py
predicts. All of it twice: once with as many hardware queues as CUDA gives, and once with one (`ONE_QUEUE`), in which
kernels start in the order in which the host queued them, whatever their streams. What is chosen is of the first.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.share.attended import Attended, noting
from benchmarks.share.bound import link_named
from benchmarks.share.exchange import at_most, local_sequence
from benchmarks.share.rank import OneRank, timed_runs
from parallel_runtime.model_call import ModelCall
from parallel_runtime.planner.hardware import Interconnect

from .setting import ROOT, Result, Setting, find_setting

RATES = ("6", "10", "22")  # GB/s: PCIe 3.0, through host memory, PCIe 4.0 with peer access
MODELS = ("flux.1", "wan 14b")
MOST = (1, 2, 4, 8)
NEAR = 1.02  # what counts as the quickest
OF_THE_HOST = 1.1  # times as long a step may take by its chunks alone; above it, it waits for the host
RANKS = 2
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
HEAD = ("model", "link", "queues", "way", "ms a step", "of it exchange that shows", "predicted")


@dataclass(frozen=True)
class Timed:
    """Seconds of a step with so many chunks at most, or around a ring, and what of its exchange shows."""

    way: str
    link: Interconnect
    seconds: float
    shown_s: float
    predicted_s: float


def run(setting: Setting) -> Result:
    """Every model, link and way."""
    rows, quickest = measured(setting, "usual")
    failed = dict[str, str]()
    try:
        rows += in_one_queue(setting)
    except ValueError as error:  # what was measured before stays on the page
        if setting.small:
            raise
        failed["one hardware queue"] = str(error)
    lines = [f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|", *rows]
    if not quickest:
        decided = "steps wait for the host, the more the more chunks: nothing is chosen"
        return Result(table=lines, decided=decided, failed=failed)
    most = max(quickest)
    decided = f"fewest chunks within 2 % of the quickest, where the host does not: {min(quickest)} to {most}"
    choices = {"most_chunks": most} if setting.capability else {}
    return Result(table=lines, decided=decided, failed=failed, choices=choices)


def measured(setting: Setting, queues: str) -> tuple[list[str], list[int]]:
    """A row a model, link and way; and of each model and link that the host does not hold up, the fewest chunks that
    count as the quickest."""
    lines, quickest = list[str](), list[int]()
    for name in setting.model_names()[:1] if setting.small else MODELS:
        rank = setting.rank(name)
        call = rank.call(setting.size(name))
        for rate in RATES[:1] if setting.small else RATES:
            timed = by_chunks(rank, call, link_named(rate), (1, 2) if setting.small else MOST, setting.steps)
            least = min(each.seconds for each in timed.values())
            without = [each.seconds - each.shown_s for each in timed.values()]
            if max(without) <= OF_THE_HOST * min(without):
                quickest.append(min(most for most, each in timed.items() if each.seconds <= NEAR * least))
            for each in (*timed.values(), around_a_ring(rank, call, link_named(rate), setting.steps)):
                times = (f"{1e3 * seconds:.2f}" for seconds in (each.seconds, each.shown_s, each.predicted_s))
                lines.append(f"| {' | '.join((name, each.link.name, queues, each.way, *times))} |")
    return lines, quickest


def in_one_queue(setting: Setting) -> list[str]:
    """The rows by a process of its own: CUDA reads the number of its queues once. Raises `ValueError` where it fails.

    A process on a CPU has no queues: there it shows that the path runs.
    """
    given = {"models": str(setting.models), "comfyui": setting.comfyui.path, "small": setting.small}
    given |= {} if setting.small else {"device": str(setting.device)}
    command = [sys.executable, "-m", "benchmarks.gpu.chunks", json.dumps(given)]
    done = subprocess.run(  # noqa: S603  this module
        command, cwd=ROOT, env={**os.environ, **ONE_QUEUE}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"with one hardware queue the measurement ended with {done.returncode}; its text is above")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """What `in_one_queue` runs: prints the rows as a line of JSON."""
    given = json.loads(sys.argv[1])
    if given["small"]:
        torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # ComfyUI prints
        rows, _ = measured(find_setting(**{**given, "models": Path(given["models"])}), "one")
    sys.stdout.write(json.dumps(rows) + "\n")


def by_chunks(rank: OneRank, call: ModelCall, link: Interconnect, most: Sequence[int], steps: int) -> dict[int, Timed]:
    """With at most 1, 2, ... chunks."""
    found = {}
    for count in most:
        without, attended = _step(rank, call, None, steps, count)
        seconds, _ = _step(rank, call, link, steps, count)
        predicted = sum(each.shown_s(link, at_most(each.heads, count)) for each in attended)
        found[count] = Timed(f"{count} chunk(s)", link, seconds, seconds - without, predicted)
    return found


def around_a_ring(rank: OneRank, call: ModelCall, link: Interconnect, steps: int) -> Timed:
    """The same ranks around a ring."""
    alone, slow = (local_sequence(ring=RANKS, device=rank.device, link=each) for each in (None, link))
    times = [timed_runs(rank.step(call, each), steps)[0] for each in (alone, slow)]
    with noting(alone, rank.device) as attended:
        rank.step(call, alone)()
    predicted = sum(each.shown_s(link) for each in attended)
    return Timed(f"ring {RANKS}", link, times[1], times[1] - times[0], predicted)


def _step(
    rank: OneRank, call: ModelCall, link: Interconnect | None, steps: int, count: int
) -> tuple[float, list[Attended]]:
    sequence = local_sequence(ulysses=RANKS, device=rank.device, link=link, chunks=count)
    run = rank.step(call, sequence)
    seconds, _ = timed_runs(run, steps)
    with noting(sequence, rank.device) as attended:
        run()
    return seconds, attended


if __name__ == "__main__":
    main()
