"""One machine and two, under each plan that may go between them, by the link between them.

    make machines-table MACHINES_FLAGS="--runs 5"

The machines are network namespaces of this one, with one CPU rank each; links are limited by the kernel (tbf), 20 ms by
a hub of ours. A step is two calls of the model, as cond and uncond, of unequal text: 256 x 256 pixels, 13 frames, a Wan
of four small blocks. Plans take turns, and one machine among them; medians. Writes benchmarks/machines.md. What
namespaces cannot show: GPUs, NCCL, real cards and switches.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from machines.hosts import Hosts, enter_namespaces

TARGET = Path(__file__).with_name("machines.md")
LINKS = (("as fast as it goes", None, 0.0), ("10 Gbit/s", "10gbit", 0.0), ("1 Gbit/s", "1gbit", 0.0))
FAR = ("20 ms each way", None, 0.02)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=TARGET)
    options = parser.parse_args()
    enter_namespaces()
    from torch import __version__

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for hosts, links in ((Hosts(2), LINKS), (Hosts(2, delay_s=FAR[2]), (FAR,))):
            rows += list(measured(hosts, links, Path(folder), runs=options.runs))
    load = "/".join(f"{each:.0f}" for each in os.getloadavg())
    about = f"torch {__version__}, {platform.machine()}, {os.cpu_count()} CPUs, load {load}, {options.runs} runs each"
    columns = "| link | plan | one machine | two machines | times as fast | exchanged a step |"
    head = (columns, "|" + " --- |" * 6)
    text = "\n".join((f"# Several machines\n\n{__doc__}\n{about}.\n", *head, *rows, ""))
    options.output.write_text(text, encoding="utf-8")


def measured(hosts: Hosts, links: tuple, folder: Path, *, runs: int) -> Iterator[str]:
    """A row a link and plan."""
    from machines.world import World
    from machines.worlds import FILE, tiny_model

    from parallel_runtime.devices import parse_devices
    from parallel_runtime.plan import ParallelPlan
    from parallel_runtime.pool.pool import Pool
    from parallel_runtime.trials.plan_runner import PlanRunner

    plans = [ParallelPlan(), ParallelPlan(cfg=2), ParallelPlan(ring=2), ParallelPlan(pipefusion=2)]
    devices = parse_devices("cpu:1").devices
    with hosts, World(hosts, folder) as world:
        model = tiny_model(world.models(1), width=256, height=256, frames=13, batch=1)
        world.copy(FILE)
        world.join(2, "cpu:1")
        with closing(Pool(devices, threads_per_rank=1, machines=lambda _: world.server.machines())) as pool:
            runners = {plan: PlanRunner(pool, model.spec, plan, options={}) for plan in plans}
            for plan, runner in runners.items():
                runner.sampling_run = plan.name  # of which all but a pipeline's first step are timed
            for link, rate, _ in links:
                hosts.rate(rate)
                seconds = {plan: [] for plan in plans}
                for turn in range(runs + 1):
                    for plan, runner in runners.items():
                        began = time.perf_counter()
                        runner.run(model.calls)
                        if turn:
                            seconds[plan].append(time.perf_counter() - began)
                one = statistics.median(seconds[plans[0]])
                for plan in plans[1:]:
                    two = statistics.median(seconds[plan])
                    sent = max(rank.sent_bytes for rank in runners[plan].ranks)
                    figures = f"{one:.2f} s | {two:.2f} s | {one / two:.2f} | {sent / 1e6:.2f} MB"
                    yield f"| {link} | {plan.name} | {figures} |"
            hosts.rate(None)


if __name__ == "__main__":
    main()
