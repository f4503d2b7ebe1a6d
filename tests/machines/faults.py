"""What goes wrong between machines, while a plan runs over all of them and while nothing does.

Each fault is to end in one error that names the machine, in time, with nothing left on it; then what is there goes on,
and when the machine comes back it takes part again.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from host.workers import command
from machines.hosts import Hosts
from machines.world import SILENCE_S, Joined, World, until
from machines.worlds import FILE, Model, tiny_model
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

Case = tuple[str, Callable[[], str]]
REQUEST_S = 6.0  # the pool's patience with ranks that are silent
SLACK_S = 4.0  # on a loaded machine
HERE_S = 120.0
ALL, REST = ParallelPlan(ring=3), ParallelPlan(ring=2)
TOLERANCE = 1e-5
LOST = r"machine host2 \(10\.77\.0\.2:\d+\) is lost: "


@dataclass(frozen=True)
class Fault:
    """`act` on a host of which `join` is given; `undo` it. The machine is lost, unless `stays`.

    `error` is a pattern of the first line, which comes within `within_s`.
    """

    name: str
    act: Callable[[World, Joined], None]
    undo: Callable[[World, Joined], None]
    error: str
    within_s: float
    stays: bool = False


def _signal(which: signal.Signals, *, who: str) -> Callable[[World, Joined], None]:
    """Send it to `join`, to the launcher, to the rank, or to all."""

    def send(_: World, joined: Joined) -> None:
        for pid in _pids(joined, who):
            with suppress(ProcessLookupError):
                os.kill(pid, which)

    return send


def _pids(joined: Joined, who: str) -> list[int]:
    if who == "join":
        return [joined.process.pid]
    commands = {each.pid: words for each in joined.processes() if (words := command(each))}
    launchers = [pid for pid, words in commands.items() if "parallel_runtime.machines.launch" in words]
    if who == "launcher":
        return launchers
    if who == "rank":
        return [pid for pid in commands if pid not in launchers]
    return [joined.process.pid, *commands]


def _cut(world: World, joined: Joined) -> None:
    world.hosts.cut(joined.host)


def _mend(world: World, joined: Joined) -> None:
    world.hosts.mend(joined.host)


def _power_off(world: World, joined: Joined) -> None:
    _cut(world, joined)  # first: nobody hears of the end
    _signal(signal.SIGKILL, who="all")(world, joined)


def _nothing(_: World, __: Joined) -> None:
    return


KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
SILENT_S = 1.5 * SILENCE_S
FAULTS = (
    Fault("join is killed", _signal(KILL, who="join"), _nothing, "machine host2 |" + LOST, 2.0),
    Fault("join is stopped", _signal(STOP, who="join"), _signal(GO_ON, who="join"), LOST + "nothing was", SILENT_S),
    Fault("all of it is stopped", _signal(STOP, who="all"), _signal(GO_ON, who="all"), LOST + "nothing was", SILENT_S),
    Fault("its cable is pulled", _cut, _mend, LOST + "nothing was heard of it for 3 s", SILENT_S),
    Fault("its power is cut", _power_off, _mend, LOST + "nothing was heard of it for 3 s", SILENT_S),
    Fault("a rank is killed", _signal(KILL, who="rank"), _nothing, "host2.*killed by SIGKILL", 2.0, stays=True),
    Fault("its launcher is killed", _signal(KILL, who="launcher"), _nothing, "machine host2", 3.0, stays=True),
    Fault("a rank is stopped", _signal(STOP, who="rank"), _nothing, "of machine host2", REQUEST_S, stays=True),
)


class Running:
    """A pool over three hosts of one rank each, whose plan is asked for again and again."""

    def __init__(self, world: World, model: Model) -> None:
        self.world, self.model = world, model
        devices = parse_devices("cpu:1").devices
        self.joined = {host: world.join(host, "cpu:1")[0] for host in (2, 3)}
        self.pool = Pool(devices, threads_per_rank=1, deadline_s=REQUEST_S, machines=lambda _: world.server.machines())

    def close(self) -> None:
        self.pool.close()

    def exact(self, plan: ParallelPlan) -> str:
        """What is wrong with a step under a plan; "" for nothing."""
        error = self.model.error(self.pool, plan)
        return "" if error <= TOLERANCE else f"relative error {error:.1e} under {plan.name}"

    def all_there(self) -> None:
        """Have both machines joined, starting `join` again where it has ended."""
        for host, joined in self.joined.items():
            if joined.process.poll() is not None:
                self.joined[host] = self.world.start_join(host, "cpu:1")
        self.world.server.wait_for(2, HERE_S)

    def while_it_runs(self, fault: Fault) -> str:
        """The fault in the middle of steps."""
        self.all_there()
        self.pool.close()  # three failures within a minute would want a user to do this
        if problem := self.exact(ALL):
            return f"before: {problem}"
        acted: list[float] = []

        def act() -> None:
            acted.append(time.monotonic())
            fault.act(self.world, self.joined[2])

        timer = threading.Timer(0.3, act)
        timer.start()
        try:
            while not acted or time.monotonic() < acted[0] + fault.within_s + SLACK_S:
                self.exact(ALL)
            return f"no error within {fault.within_s + SLACK_S:.1f} s"
        except (PoolError, ValueError) as error:
            taken, said = time.monotonic() - acted[0], str(error).partition("\n")[0]
        finally:
            timer.join()
        problem = self.afterwards(fault)
        if taken > fault.within_s + SLACK_S:
            problem = f"the error came after {taken:.1f} s; {problem}"
        if not re.search(fault.error, said):
            problem = f"the error says nothing of {fault.error!r}; {problem}"
        print(f"    {taken:.1f} s: {said}")  # noqa: T201
        return problem

    def while_idle(self, fault: Fault) -> str:
        """The fault while ranks wait."""
        self.all_there()
        if problem := self.exact(ALL):
            return f"before: {problem}"
        fault.act(self.world, self.joined[2])
        if not until(lambda: len(self.world.server.machines()) == 1, fault.within_s + SLACK_S):
            return "the machine is not lost"
        return self.afterwards(fault)

    def afterwards(self, fault: Fault) -> str:
        """Who is there goes on; the machine comes back and takes part; nothing is left meanwhile."""
        problems = []
        if not fault.stays and (problem := self.exact(REST)):
            problems.append(f"with who is there: {problem}")
        if fault.name != "all of it is stopped" and not self._nothing_left():
            problems.append(f"left on host2: {self.joined[2].processes()}, {self.world.listening(2)}")
        fault.undo(self.world, self.joined[2])
        if not fault.stays and not self._nothing_left():
            problems.append(
                f"left on host2 after it came back: {self.joined[2].processes()}, {self.world.listening(2)}"
            )
        self.all_there()
        if problem := self.exact(ALL):
            problems.append(f"when it is back: {problem}")
        return "; ".join(problems)

    def _nothing_left(self) -> bool:
        def nothing() -> bool:
            if (
                self.joined[2].process.poll() is None
                and psutil.Process(self.joined[2].process.pid).status() == "stopped"
            ):
                return True  # its own silence ends them once it goes on
            return not self.joined[2].processes() and not self.world.listening(2)

        return until(nothing, SILENT_S + SLACK_S)


def faults(hosts: Hosts, folder: Path) -> Iterator[Case]:
    """Every fault, running and idle."""
    with hosts, World(hosts, folder) as world:
        model = tiny_model(world.models(1))
        world.copy(FILE)
        with closing(Running(world, model)) as running:
            for fault in FAULTS:
                yield f"{fault.name} while it runs", lambda fault=fault: running.while_it_runs(fault)
                if not fault.stays:
                    yield f"{fault.name} while idle", lambda fault=fault: running.while_idle(fault)
            yield "a slow cable", lambda: slow(running)
        yield "no port is left", lambda: no_port(world)


def no_port(world: World) -> str:
    """Of ours but where machines join, once the pool is closed."""
    left = world.listening(1) - {world.server.port} | world.listening(2) | world.listening(3)
    return f"something listens on {sorted(left)}" if left else ""


def slow(running: Running) -> str:
    """2 Mbit/s: right, late, and no error."""
    running.all_there()
    running.pool.close()
    running.world.hosts.rate("2mbit")
    try:
        return running.exact(ALL)
    finally:
        running.world.hosts.rate(None)
