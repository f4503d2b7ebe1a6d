"""The ranks of a generation that run on further machines, as the pool sees them.

Owns which machines have a part in a generation and in a request, where all ranks meet, and the process beside us that
stands for the remote ranks (machines/relay.py). To the supervisor each of them is a channel like any other. Does not
own how a machine joined (machines/server.py) nor what passes between the relay and a machine.
"""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..daemon_futures import in_daemons
from ..devices import Device
from ..errors import PoolError
from ..machines.connection import join_address, split_address
from ..machines.files import content_sha256, identify
from ..machines.machine import Machine
from ..machines.messages import FoundFile, RelayedMachine, StartGeneration
from ..plan import MAX_RANKS
from ..process.environment import Meeting, RankSettings, interface_of, on_own_cuda, rank_environment
from ..process.rank_process import REAP_TIMEOUT_S, SEND_TIMEOUT_S, OwnedProcess, spawn_owned
from ..process.signs import Output
from ..wire.channel import Channel
from ..wire.protocol import Op
from ..wire.records import to_body

BACKLOG = 64
LOOK_S = 0.05  # how often the caller is asked whether to go on while machines look for a file

_log = logging.getLogger(__name__)


class NoComfyUIError(ValueError):
    """A machine has no ComfyUI, whose modules are to compute there."""


class RemoteRank:
    """One rank of a further machine. Its death is told by ERROR; its `pidfd` is the relay's, for all of them."""

    def __init__(self, rank: int, machine: Machine, device: str, channel: Channel, relay: OwnedProcess) -> None:
        self.rank, self.machine, self.channel = rank, machine, channel
        self.place = f"{device} of {machine}"
        self.output: Output = relay.output
        self.pidfd = os.dup(relay.pidfd)
        self.pid = relay.pid
        self._relay = relay
        self.last_beats = self.last_pulses = 0
        self.last_heard_s = self.last_pulse_s = time.monotonic()

    def is_process(self, pid: int) -> bool:
        """Whether that is the number of the rank's process, which is not known here."""
        return pid > 0

    def is_stopped(self) -> bool:
        """Whether a signal holds the process; it is not known here."""
        return False

    def gets_on(self) -> bool:
        """Whether the process has done anything; its machine looks, and passes on a pulse where it has."""
        return True

    def end_text(self) -> str:
        """How the process ended that stands for it."""
        return f"{self._relay.end_text()} (the process that passes on to other machines)"

    def kill(self) -> None:
        """Nothing: a machine ends its ranks together (RemoteRanks)."""

    def reap(self) -> bool:
        """Close what is ours."""
        self.channel.close()
        os.close(self.pidfd)
        return True


class RemoteRanks:
    """All remote ranks of a generation. `end` once it is over, whatever else was done.

    `machines` in order of joining; those whose ranks would be more than MAX_RANKS have no part.
    """

    def __init__(self, machines: Sequence[Machine], settings: RankSettings) -> None:
        self.machines: list[Machine] = []
        self._ends = [len(settings.devices)]  # by machine, ours first: the rank after its last one
        for machine in machines:
            if machine.lost is None and self._ends[-1] + len(machine.devices) <= MAX_RANKS:
                self.machines.append(machine)
                self._ends.append(self._ends[-1] + len(machine.devices))
        self._number = secrets.randbits(31)  # several pools may use a machine, each counting its own generations
        self._relay: OwnedProcess | None = None
        self._listener: socket.socket | None = None
        self._started: list[Machine] = []
        # By our file, then by machine: also of a load that was given up, so that nothing is read twice at once.
        self._looks: dict[tuple[str, int, int], dict[str, Future[FoundFile]]] = {}
        self.num_ranks = self._reachable = self._ends[-1]

    def reach(self, num_ranks: int) -> int:
        """How many ranks the machines have that any of the first `num_ranks` are on; none of one that was left out."""
        return min(self._reachable, next((end for end in self._ends if end >= num_ranks), self.num_ranks))

    def does_without(self, rank: int, cause: str, num_asked: int) -> bool:
        """Whether that rank, which failed, is none of the `num_asked` that are asked.

        Its machine, and those behind it, are left out until ranks start anew.
        """
        if rank < num_asked:
            return False
        place = sum(end <= rank for end in self._ends)
        if self._ends[place - 1] < self._reachable:
            self._reachable = self._ends[place - 1]
            _log.warning("%s is not used by this plan, which goes on without it: %s", self.machines[place - 1], cause)
        return True

    def meet(self, settings: RankSettings) -> RankSettings:
        """The settings with a place to meet on the address that machines know: its socket is open from now on.

        Raises OSError, PoolError for an address that ranks would not listen on.
        """
        host = self.machines[0].here
        try:
            interface = interface_of(host)
        except ValueError as error:
            cause, _, remedy = str(error).partition("; ")
            raise PoolError(cause, remedy=remedy) from error
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(BACKLOG)
        port = self._listener.getsockname()[1]
        theirs = [[Device.of_machine(text, machine.name) for text in machine.devices] for machine in self.machines]
        meeting = Meeting(
            address=join_address(host, port),
            interface=interface,
            ranks=self.num_ranks,
            on_cuda=all(on_own_cuda(devices) for devices in (settings.devices, *theirs)),
        )
        return replace(settings, meeting=meeting)

    def start(self, settings: RankSettings, *, generation: int, deadline_s: float) -> list[RemoteRank]:
        """Start the relay and have each machine start its ranks.

        Raises OSError, PoolError for a machine that is lost.
        """
        meeting = settings.meeting
        if meeting is None or self._listener is None:
            return []
        first_rank, relayed, channels = len(settings.devices), [], []
        with self._listener, ExitStack() as undo, ExitStack() as theirs:
            for machine in self.machines:
                far_ends = []
                for _ in machine.devices:
                    channel, far_end = Channel.pair()
                    channel.set_timeout(SEND_TIMEOUT_S)
                    undo.callback(channel.close)
                    theirs.callback(far_end.close)
                    channels.append(channel)
                    far_ends.append(far_end.fileno())
                relayed.append(RelayedMachine(name=machine.name, first_rank=first_rank, sockets=tuple(far_ends)))
                first_rank += len(machine.devices)
            arguments = {
                "generation": generation,
                "ranks": self.num_ranks,
                "meet": meeting.address,
                "listen": self._listener.fileno(),
                "machines": json.dumps([to_body(each) for each in relayed]),
            }
            fds = [self._listener.fileno(), *(fd for each in relayed for fd in each.sockets)]
            environment = rank_environment(os.environ, settings)
            self._relay = spawn_owned("parallel_runtime.machines.relay", arguments, fds, environment)
            undo.pop_all()
        numbered = [(machine, device) for machine in self.machines for device in machine.devices]
        ranks = [
            RemoteRank(rank, machine, device, channel, self._relay)
            for rank, ((machine, device), channel) in enumerate(
                zip(numbered, channels, strict=True), start=len(settings.devices)
            )
        ]
        with ExitStack() as undo:
            for rank in ranks:
                undo.callback(rank.reap)
            for place, (machine, each) in enumerate(zip(self.machines, relayed, strict=True), start=1):
                self._started.append(machine)
                machine.start(self._order(settings, meeting, machine, each.first_rank, place, generation, deadline_s))
            undo.pop_all()
        return ranks

    def _order(
        self,
        settings: RankSettings,
        meeting: Meeting,
        machine: Machine,
        first_rank: int,
        place: int,
        generation: int,
        deadline_s: float,
    ) -> StartGeneration:
        host, port = split_address(meeting.address)
        return StartGeneration(
            generation=self._number,
            number=generation,
            master_addr=host,
            master_port=port,
            world_size=self.num_ranks,
            first_rank=first_rank,
            devices=machine.devices,
            threads=settings.threads,
            deadline_s=deadline_s,
            backend=settings.backend,
            engine=settings.engine,
            machine=place,
            machines=1 + len(self.machines),
            peer_access=settings.peer_access,
            seen_as=machine.address.rpartition(":")[0].strip("[]"),
        )

    def body_for(
        self, rank: object, op: Op, body: dict[str, Any], check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """What to ask of a rank: of one elsewhere, to load the copy of the file that its machine has.

        Raises ValueError for a machine that has none and for a file here that cannot be read, NoComfyUIError for a
        machine without where ComfyUI's modules compute, PoolError for one that does not say, and what `check` raises,
        called while they look.
        """
        if op in (Op.LOAD, Op.VAE) and isinstance(rank, RemoteRank):
            asked = body["spec"] if op is Op.LOAD else body
            if asked.get("comfyui") and not rank.machine.versions.comfyui:
                raise NoComfyUIError(
                    f"{rank.machine} has no ComfyUI, whose own modules compute this model; start `join` there with "
                    "--comfyui PATH"
                )
        if op is not Op.LOAD or not isinstance(rank, RemoteRank) or rank.rank >= body["layout"]["ranks"]:
            return body
        spec = body["spec"]
        found = self._copies(spec, body["layout"]["ranks"], check)[rank.machine.name]
        own = {"path": found.path, "size_bytes": found.size_bytes, "mtime_ns": found.mtime_ns}
        return {**body, "spec": {**spec, **own}}

    def _copies(self, spec: dict[str, Any], num_ranks: int, check: Callable[[], None]) -> dict[str, FoundFile]:
        """The copy of each machine that has one of so many ranks. All look at once, and we read our file meanwhile."""
        path = spec["path"]
        looks = self._looks.setdefault((path, spec["size_bytes"], spec["mtime_ns"]), {})
        needed = [each for each, first in zip(self.machines, self._ends, strict=False) if first < num_ranks]
        failed = {name for name, look in looks.items() if look.done() and look.exception() is not None}
        try:
            if asked := [each for each in needed if each.name not in looks.keys() - failed]:
                identity = identify(path, Path(path).name)
                (content,) = in_daemons([partial(content_sha256, path)], at_once=1)
                # an error is said before our own file is read to its end
                finds = [partial(each.find_file, identity, content.result) for each in asked]
                looks.update(zip((each.name for each in asked), in_daemons(finds, at_once=len(finds)), strict=True))
            left = {looks[each.name] for each in needed}
            while left:
                done, left = wait(left, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
                for look in done:
                    look.result()
                check()
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"{path} cannot be read: {why}; put the file back, or choose another") from error
        return {each.name: looks[each.name].result() for each in needed}

    def ended_early(self, ranks: Iterable[object]) -> dict[int, str]:
        """Why, of machines that are lost or whose launcher has ended: by the first rank of each."""
        found: dict[int, str] = {}
        for rank in ranks:
            if isinstance(rank, RemoteRank) and (cause := self._why_ended(rank.machine)) not in {"", *found.values()}:
                found[rank.rank] = cause
        return found

    def _why_ended(self, machine: Machine) -> str:
        if machine.lost is not None:
            return f"{machine} is lost: {machine.lost.reason}"
        ended = machine.ended(self._number)
        if ended is None:
            return ""
        last = ended.last_lines.strip().splitlines()[-1:] or [f"exit code {ended.code}"]
        return f"{machine} has ended its ranks: {last[0]}"

    def kill(self) -> None:
        """Have every machine end its ranks, and end the relay."""
        for machine in self._started:
            machine.kill(self._number)
        if self._relay is not None:
            self._relay.kill()

    def reap(self) -> list[Machine]:
        """Wait until all have ended; the machines that did not say so in time."""
        if self._listener is not None:
            self._listener.close()
        if self._relay is not None:
            self._relay.reap()
            self._relay = None
        until = time.monotonic() + REAP_TIMEOUT_S
        started, self._started = self._started, []
        return [each for each in started if not each.wait_ended(self._number, max(0.0, until - time.monotonic()))]
