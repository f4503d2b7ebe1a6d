"""`python -m faults.soak --minutes 10 --seed N`: faults, cancels, sizes, plans and LoRAs mixed at random, all for real.

Owns what is done and what must hold after it. Every result is compared with that of one rank; every error must name the
rank and the cause; no process may outlive it. Ends with 1 when anything did not hold.
"""

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from host.forked_ranks import fork_ranks
from parallel_runtime.devices import Device
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

from .soak_cases import Case, Cases
from .soak_ledger import Ledger

TOLERANCE = 1e-5
DEADLINE_S = 3.0  # a fresh rank's first whole run is silent for 0.02 s of processor time at most
PROMPTS_WITHOUT = 20  # a plan of one rank needs no other; so many of them in a row are no chance
CANCELS = 4  # one after the other: they are quick
LOOKS = 10  # at what is held, for one figure
WARM_UP_ROUNDS = 2
# Of the ranks. By itself malloc(3) raises the first two by what is freed, so that a rank keeps up to 45 MB of its
# 110 MB, or none, by what came last: 500 prompts that leak nothing grew by 9 %. With these they grow by 0.1 to 0.7 %.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
FAILURES_BEFORE_RELEASE = 2  # a third within a minute is a storm, and needs the user


class Cancelled(Exception):  # noqa: N818  stands for the caller's own
    """What a caller raises to cancel."""


class Soak:
    """One pool, and what is done to it."""

    def __init__(self, cases: Cases, *, num_ranks: int, seed: int, deadline_s: float = DEADLINE_S) -> None:
        self.cases, self.deadline_s = cases, deadline_s
        self.chance = random.Random(seed)  # noqa: S311  no secret
        self.ledger = Ledger()
        self.pool = Pool(
            tuple(Device("cpu", index) for index in range(num_ranks)),
            threads_per_rank=1,
            deadline_s=deadline_s,
            engine="soak_engine:Failing",
            python_path=(str(Path(__file__).parent),),
            segment_bytes=1 << 19,  # so that bigger requests need further segments
        )
        self.failures = 0
        self.faults: dict[str, Callable[[], None]] = {
            "killed while idle": lambda: self.signalled("killed while idle", "SIGKILL", after_s=0.0),
            "killed in a prompt": lambda: self.signalled("killed in a prompt", "SIGKILL", after_s=0.02),
            "killed while loading": lambda: self.signalled("killed while loading", "SIGKILL", after_s=0.01, load=True),
            "stopped (SIGSTOP)": lambda: self.signalled("stopped (SIGSTOP)", "SIGSTOP", after_s=0.02),
            "crashed (SIGSEGV)": lambda: self.signalled("crashed (SIGSEGV)", "SIGSEGV", after_s=0.02),
            "raises": lambda: self.fails("raises", "raise", "RuntimeError: asked to raise"),
            "out of memory": lambda: self.fails("out of memory", "memory", "OutOfMemoryError: asked to memory"),
            "cancelled step": lambda: self.cancels("cancelled step"),
            "cancelled load": lambda: self.cancels("cancelled load", load=True),
            "cancelled start": lambda: self.cancels("cancelled start", start=True),
            "two prompts at once": lambda: self.at_once("two prompts at once", self.prompt),
            "prompt and release": lambda: self.at_once("prompt and release", self.pool.close),
            "prompt and free": lambda: self.at_once("prompt and free", self.free),
        }

    def run(self, seconds: float, *, steady_prompts: int, at_least: int = 0) -> Ledger:
        """Mix for that long, `at_least` so many faults, after `steady_prompts` without one (and more, to warm up)."""
        began = time.monotonic()
        there = psutil.Process().children(recursive=True)  # others' servers, where tests share a process
        if steady_prompts:
            self.no_failure("steady", lambda: self.steady(steady_prompts))
            print(self.ledger.table(), flush=True)  # noqa: T201
        bag: list[str] = []
        while sum(self.ledger.injected.values()) < at_least or time.monotonic() - began < seconds:
            bag = bag or self.shuffled()
            fault = bag.pop()
            self.ledger.injected[fault] += 1
            self.no_failure(fault, self.faults[fault])
            for _ in range(self.chance.randrange(4)):
                self.no_failure(f"after {fault}", self.prompt)
        self.pool.close()
        left = [each for each in psutil.Process().children(recursive=True) if each not in there]
        if left:
            self.wrong(f"processes left at the end: {left}")
        return self.ledger

    def no_failure(self, what: str, act: Callable[[], None]) -> None:
        """A failure that nobody caused is counted as wrong, and the soak goes on with fresh workers."""
        try:
            act()
        except PoolError as error:
            self.wrong(f"{what}: failed by itself: {str(error).partition(chr(10))[0]}")
            self.pool.close()

    def shuffled(self) -> list[str]:
        """All faults in a random order, so that none is left to chance."""
        return self.chance.sample(sorted(self.faults), k=len(self.faults))

    def prompt(self, *, options: dict | None = None, check: Callable[[], None] | None = None) -> None:
        """One call, compared with the reference. Raises PoolError and what `check` raises."""
        self.compare(*self.cases.pick(self.chance), options=options, check=check)

    def compare(
        self, case: Case, plan: ParallelPlan, *, options: dict | None = None, check: Callable[[], None] | None = None
    ) -> None:
        """As `prompt`, of that case and plan."""
        error = relative_error(case.ask(self.pool, plan, options or {}, check), case.reference)
        self.ledger.worst_error = max(self.ledger.worst_error, error)
        if error <= TOLERANCE:
            self.ledger.right += 1
        else:
            self.wrong(f"relative error {error:.1e} with {plan.name}, LoRA {case.deltas.name!r}")

    def wrong(self, what: str) -> None:
        self.ledger.wrong.append(f"WRONG after {sum(self.ledger.injected.values())} faults: {what}")

    def refused(self, fault: str, since: float, pids: list[int], ask: Callable[[], None], expected: str) -> bool:
        """Whether `ask` failed with PoolError, which must be well worded, and leave no process.

        How soon it came is told and not judged: that says how busy the machine is. What it names tells what noticed
        the fault, and a rank that is silent must be found by the pool's deadline, whatever it was asked.
        """
        try:
            ask()
        except PoolError as error:
            seconds, first = time.monotonic() - since, str(error).partition("\n")[0]
            self.ledger.refused += 1
            self.ledger.noticed(fault, seconds)
            if expected not in first or not first.startswith("rank "):
                self.wrong(f"{fault}: {first}")
            if "SIGSTOP" in fault and f"the deadline is {self.deadline_s:g} s" not in first:
                self.wrong(f"{fault}: not found by the pool's deadline: {first}")
            self.ended(fault, pids)
            self.failures += 1
            return True
        return False

    def ended(self, fault: str, pids: list[int]) -> None:
        """None of these ranks may be left."""
        if alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
            self.wrong(f"{fault}: processes {alive} live on")

    def recover(self, fault: str, since: float) -> None:
        """The next prompt is right."""
        if self.failures >= FAILURES_BEFORE_RELEASE:
            self.failures = 0
            self.pool.close()  # as the user's Release
        self.prompt()
        self.ledger.recovered(fault, time.monotonic() - since)

    def signalled(self, fault: str, name: str, *, after_s: float, load: bool = False) -> None:
        """A signal reaches a rank at a random moment of a prompt, or before it.

        Where the pool looks at its idle ranks before the next prompt does, that one has fresh workers and no error.
        """
        self.prompt()
        generation = self.pool.generation
        pids = self.pool.status()["pids"]
        victim, sent = self.chance.choice(pids), []

        def send() -> None:
            sent.append(time.monotonic())
            with suppress(ProcessLookupError):
                os.kill(victim, getattr(signal, name))

        timer = threading.Timer(self.chance.random() * after_s, send)
        expected = "held by a signal" if name == "SIGSTOP" else f"killed by {name}"
        if load:
            self.pool.unload(self.chance.choice(self.cases.models))
        timer.start()
        if after_s == 0.0:
            timer.join()
        began = time.monotonic()
        noticed = self.refused(fault, began, pids, self.prompt, expected)
        timer.join()
        for _ in range(PROMPTS_WITHOUT):  # it had answered before, or no plan since has asked it
            if not noticed and self.pool.generation == generation:
                noticed = self.refused(fault, sent[0], pids, self.prompt, expected)
        if self.pool.generation != generation:
            self.failures += 1
            self.ended(fault, pids)
        elif not noticed:
            self.wrong(f"{fault}: not noticed in {PROMPTS_WITHOUT} prompts")
        self.recover(fault, sent[0])

    def fails(self, fault: str, kind: str, expected: str) -> None:
        """A rank raises in a step."""
        self.prompt()
        rank, pids = 0, self.pool.status()["pids"]  # rank 0 is in every plan
        began = time.monotonic()
        asked = {"fault": {"rank": rank, "kind": kind}}
        if not self.refused(fault, began, pids, lambda: self.prompt(options=asked), expected):
            self.wrong(f"{fault}: no error")
        self.recover(fault, began)

    def cancels(self, fault: str, *, load: bool = False, start: bool = False) -> None:
        """The caller cancels at a random moment and is let go; ranks stay, and the next result is right."""
        if start:
            self.pool.close()
        else:
            self.pool.start()  # as the first fault of all it would find no workers that could live on
        generation = self.pool.generation + start
        for _ in range(1 if start else CANCELS):
            if load:
                self.free()
            until = time.monotonic() + self.chance.random() * (0.5 if start else 0.1)
            try:
                self.sample_until(until)
            except Cancelled:
                self.ledger.cancelled += 1
            self.ledger.noticed(fault, time.monotonic() - until)
            began = time.monotonic()
            self.prompt()
            self.ledger.recovered(fault, time.monotonic() - began)
        if self.pool.generation != generation:
            self.wrong(f"{fault}: the workers did not live on")

    def sample_until(self, until: float) -> None:
        """Prompts with all their changes of weights and plans, and steps of 0.1 s among them, until cancelled then."""

        def check() -> None:
            if time.monotonic() >= until:
                raise Cancelled

        while True:
            self.prompt(check=check, options={"fault": "slow"} if self.chance.random() < 0.2 else None)

    def at_once(self, fault: str, other: Callable[[], None]) -> None:
        """Another thread does something else at the same time; neither may hang or fail."""
        self.prompt()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                other()
            except (PoolError, RuntimeError, ValueError) as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        began = time.monotonic()
        thread.start()
        time.sleep(self.chance.random() * 0.02)
        self.prompt()
        thread.join(60)
        self.ledger.recovered(fault, time.monotonic() - began)
        if thread.is_alive() or failed:
            self.wrong(f"{fault}: {failed or 'it hangs'}")

    def free(self) -> None:
        """What ComfyUI's memory manager does."""
        for spec in self.cases.models:
            self.pool.unload(spec)

    def steady(self, prompts: int) -> None:
        """Prompts of all kinds without a fault: after a warm-up, nothing may grow by more than 2 %.

        The warm-up is every case under every plan, twice: what is kept for a model, size or plan is there after it.
        """
        for _ in range(WARM_UP_ROUNDS):
            for case, plan in self.cases.all(self.chance):
                self.compare(case, plan)
        before = self.least_held()
        for _ in range(prompts):
            self.prompt()
        self.ledger.grew(before, after := self.least_held(), prompts)
        for name, value in after.items():
            if value > before[name] * 1.02:
                self.wrong(f"{name} grew from {before[name]:,.0f} to {value:,.0f} in {prompts} prompts")

    def least_held(self) -> dict[str, float]:
        """The least of what is held after each of some prompts: one look depends on what came last."""
        looks: list[dict[str, float]] = []
        for _ in range(LOOKS):
            self.prompt()
            looks.append(self.held())
        return {name: min(look[name] for look in looks) for name in looks[0]}

    def held(self) -> dict[str, float]:
        """Of this process and all ranks together: private bytes, threads, descriptors, processes."""
        processes = [psutil.Process(), *map(psutil.Process, self.pool.status()["pids"])]
        return {
            "private bytes": sum(process.memory_full_info().uss for process in processes),
            "threads": sum(process.num_threads() for process in processes),
            "descriptors": sum(process.num_fds() for process in processes),
            "processes": len(psutil.Process().children(recursive=True)),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults.soak", description="Mix faults at random.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steady-prompts", type=int, default=500)
    parser.add_argument("--faults", type=int, default=0, help="at least so many; with --minutes 0 exactly")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.ranks} ranks, {options.minutes:g} minutes", flush=True)  # noqa: T201
    torch.set_num_threads(1)  # two are slower where others want the cores too
    os.environ.update(MALLOC)  # this process has begun without, and is steady
    fork_ranks()  # or most of the time goes to ComfyUI's imports in fresh ranks
    with tempfile.TemporaryDirectory() as folder:
        cases = Cases(Path(folder), num_ranks=options.ranks)
        soak = Soak(cases, num_ranks=options.ranks, seed=options.seed)
        ledger = soak.run(options.minutes * 60, steady_prompts=options.steady_prompts, at_least=options.faults)
    print(ledger.table())  # noqa: T201
    return 1 if ledger.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
