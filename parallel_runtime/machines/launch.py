"""Starts the ranks of one generation on this machine, and passes on between them and ComfyUI's side.

`python -m parallel_runtime.machines.launch --lifeline=FD --parent=PID` with a `Launch` as JSON on standard
input; `join` starts it (joined.py). Processes start and are watched as torchrun does it: its agent, with static
rendezvous and no restarts. Ranks get what they need besides torchrun's variables, descriptors above all, as a message
on their standard input (worker/by_torchrun.py). Owns that start. Does not own what is passed on (ranks_here.py) nor the
end of a generation: `join` kills this process and what it started.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.launcher.api import ChildFailedError, DefaultLogsSpecs, LaunchConfig, elastic_launch

from ..devices import Device
from ..process import nccl_files
from ..process.environment import Meeting, RankSettings, interface_of, on_own_cuda, rank_environment
from ..process.signs import Output
from ..wire.channel import Channel
from ..wire.protocol import Op
from ..wire.records import from_body
from ..wire.replies import RankError
from .connection import join_address
from .fatal import run_process, thread
from .joined import MARK, adopt_orphans
from .link import PATIENCE, RUN, RelayLink, join_relays
from .messages import BUNDLE_BYTES, Launch, StartGeneration
from .ranks_here import RankHere, RanksHere, end_text

ENGINES = "parallel_runtime.worker."  # nothing else is imported because ComfyUI's side names it
MONITOR_S = 0.5  # how often torchrun's agent looks after its processes; what ends a generation does not wait for it
REACH_S = 20.0
KILL_AFTER_S = "1"  # how long its other processes get when one has failed


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line that joined.py writes."""
    parser = argparse.ArgumentParser(prog="parallel_runtime.machines.launch", description="Started by `join`.")
    for name in ("lifeline", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args(arguments)


def settings_of(launch: Launch) -> RankSettings:
    """What each rank here is started with: at most as many threads as this machine has CPUs for it."""
    start = launch.start
    if not start.engine.startswith(ENGINES):
        raise ValueError(f"engine {start.engine!r} is none of this pack's; update this pack on both machines")
    devices = tuple(Device.of_machine(text, "") for text in start.devices)
    meeting = Meeting(
        address=join_address(start.master_addr, start.master_port),
        interface=interface_of(launch.address),
        ranks=start.world_size,
        on_cuda=start.backend == "nccl",
    )
    if start.seen_as != launch.address:
        raise ValueError(
            f"ComfyUI sees this machine at {start.seen_as}, which is {launch.address} here: through a container's "
            "bridge, NAT or a tunnel no worker is reached; use `docker run --network host`, or WireGuard"
        )
    if (
        meeting.on_cuda
        and (refused := nccl_files.refusal(nccl_files.present_files(), meet="beside ComfyUI")) is not None
    ):
        raise ValueError(f"{refused}; {nccl_files.REMEDY}")
    if meeting.on_cuda and not on_own_cuda(devices):
        raise ValueError(f"ranks on {', '.join(start.devices)} cannot exchange by NCCL; name each GPU once")
    return RankSettings(
        devices=devices,
        threads=min(start.threads, max(1, len(os.sched_getaffinity(0)) // len(devices))),
        engine=start.engine,
        peer_access=start.peer_access,
        meeting=meeting,
    )


def reach(start: StartGeneration) -> None:
    """See that the store where all meet, which listens already, can be reached. Raises ValueError.

    torch's store and gloo would try for as long as ranks may take to start.
    """
    try:
        socket.create_connection((start.master_addr, start.master_port), timeout=REACH_S).close()
    except OSError as error:
        raise ValueError(
            f"{join_address(start.master_addr, start.master_port)} beside ComfyUI, where workers meet, does not answer "
            f"({error.strerror or error}); let the machines reach each other at every TCP port"
        ) from error


class Start:
    """The ranks of this machine before their processes are there: a channel, a lifeline and an output for each.

    `linked`: what they say is passed on to ComfyUI's side.
    """

    linked = False

    def __init__(self, start: StartGeneration, settings: RankSettings) -> None:
        self.ranks: list[RankHere] = []
        self._lifelines: list[int] = []  # write ends: a rank dies when its one is closed
        self._theirs: list[int] = []
        self._arguments: list[list[str]] = []
        for index, device in enumerate(settings.devices):
            rank = start.first_rank + index
            channel, far_end = Channel.pair()
            (lifeline_read, lifeline_write), (output_read, output_write) = (os.pipe2(os.O_CLOEXEC) for _ in range(2))
            self.ranks.append(RankHere(rank, channel, Output(output_read)))
            self._lifelines.append(lifeline_write)
            self._theirs += [os.dup(far_end.fileno()), lifeline_read, output_write]
            far_end.close()
            numbers = {"rank": rank, "ranks": start.world_size, "generation": start.number, "threads": settings.threads}
            words = {"device": device, "backend": start.backend, "engine": start.engine, "parent": os.getpid()}
            meet = join_address(start.master_addr, start.master_port)
            given = {**numbers, **words, "meet": meet}
            self._arguments.append([f"--{name}={value}" for name, value in given.items()])

    def hand_out(self) -> None:
        """Have the message to each process on the standard input that they inherit from this one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data = json.dumps(self._arguments).encode()
        if len(data) > BUNDLE_BYTES:
            raise ValueError(f"the ranks' arguments take {len(data)} bytes, at most {BUNDLE_BYTES}")
        for _ in self.ranks:  # the same to each, which takes what is its own: the order is not known
            socket.send_fds(ours, [data], self._theirs)
        os.dup2(theirs.fileno(), 0)
        theirs.close()
        ours.close()
        for fd in self._theirs:
            os.close(fd)

    def why_failed(self, failed: ChildFailedError) -> str:
        """Of the rank that failed first: why it says that it ends, else how it ended, or what it printed last."""
        number, failure = failed.get_first_failure()
        rank = self.ranks[failure.local_rank]
        words = end_text(failure.exitcode, rank.kills_before)
        rank.output.drain()
        if failure.exitcode > 0 and (printed := rank.output.text()):
            words = printed.splitlines()[-1]
        while not self.linked and rank.channel.has_message() and (received := rank.channel.recv()) is not None:
            if received[0].op is Op.ERROR:
                error = from_body(RankError, received[0].body, "ERROR")
                words = f"{error.kind}: {error.text}".splitlines()[0]
        return f"rank {number}: {words}"


def run_ranks(start: StartGeneration) -> None:
    """Start the processes by torchrun's agent, and watch them until all have ended. Raises what it raises."""
    config = LaunchConfig(
        min_nodes=start.machines,
        max_nodes=start.machines,
        nproc_per_node=len(start.devices),
        run_id=RUN,
        rdzv_backend="static",
        rdzv_endpoint=join_address(start.master_addr, start.master_port),
        rdzv_configs={"rank": start.machine, "timeout": int(start.deadline_s) + 1},
        max_restarts=0,
        monitor_interval=MONITOR_S,
        local_addr=start.master_addr,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    elastic_launch(config, sys.executable)("-u", "-m", "parallel_runtime.worker.by_torchrun")


def serve() -> None:
    """Start what standard input asks for, and pass on until all ranks have ended."""
    launch = from_body(Launch, json.loads(sys.stdin.buffer.read()), "Launch")
    settings = settings_of(launch)
    reach(launch.start)
    environment = rank_environment(os.environ, settings)
    os.environ.clear()  # torchrun's agent hands its own on to ranks, and gloo reads it here
    os.environ.update({**environment, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": KILL_AFTER_S, MARK: str(os.getppid())})
    ours = Start(launch.start, settings)
    ours.hand_out()
    thread(lambda: _pass_on(launch, ours))
    try:
        run_ranks(launch.start)
    except ChildFailedError as failed:  # its text ends in a line of "="; the last line is what people are shown
        sys.stderr.write(f"{ours.why_failed(failed)}\n")
        os._exit(1)


def _pass_on(launch: Launch, ours: Start) -> None:
    """Join ComfyUI's side, and pass on in two threads, of which this is one."""
    start = launch.start
    store = dist.TCPStore(start.master_addr, start.master_port, is_master=False, timeout=PATIENCE)
    link = RelayLink(join_relays(store, place=start.machine, machines=start.machines), 0)
    ours.linked = True
    here = RanksHere(ours.ranks, link, generation=start.number, comfyui=launch.comfyui)
    thread(here.down)
    here.up()
    if here.dismissed:  # torchrun's agent would wait for an agent on ComfyUI's side, which has none
        os._exit(0)


def main() -> NoReturn:
    """Run one generation's ranks here."""
    options = parse(sys.argv[1:])
    adopt_orphans()  # so that what torchrun's agent leaves is ours to end
    run_process(serve, lifeline_fd=options.lifeline, parent_pid=options.parent)


if __name__ == "__main__":
    main()
