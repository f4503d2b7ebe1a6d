"""Experiment 5: what the host pays for an exchange, and whether NCCL's exchanges may be captured in a graph.

Two ranks, on a GPU both on the one device: each says that it is a host of its own (NCCL_HOSTID), so NCCL goes over
sockets. What the host pays to queue is the same; how long an exchange takes says nothing. Started as a program, this is
one of the ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from parallel_runtime.models.hosted.cuda_graphs import CudaRecorder

from .setting import ROOT, Result, Setting

RANKS, CALLS, ROUNDS, REPLAYS = 2, 50, 5, 1000
LIMIT_S = 240
NUMBERS = 1 << 16
TAKES_ASYNC_OP = hasattr(dist.AllToAllOptions(), "asyncOp")


def run(setting: Setting) -> Result:
    """Microseconds of host an exchange, and what became of the graphs."""
    with tempfile.TemporaryDirectory() as folder:
        told = {"device": str(setting.device), "folder": folder, "small": setting.small}
        ranks = [_start(number, told) for number in range(RANKS)]
        try:
            outs = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
    for rank, (_, said) in zip(ranks, outs, strict=True):
        if rank.returncode:
            raise ValueError(f"a rank ended with status {rank.returncode}: {(said.strip().splitlines() or ['?'])[-1]}")
    found: dict[str, Any] = json.loads(outs[0][0].splitlines()[-1])
    lines = ["| exchange | us of host |", "| --- | --- |"]
    lines += [f"| {name} | {1e6 * seconds:.1f} |" for name, seconds in found["host_s"].items()]
    quickest = min(found["host_s"], key=lambda name: found["host_s"][name])
    decided = f"quickest to queue: {quickest}; graphs: {found['graphs']}"
    return Result(table=lines, decided=decided, constants={"exchange_host_s": found["host_s"][quickest]})


def variants(group: dist.ProcessGroup, device: torch.device) -> dict[str, Callable[[], object]]:
    """Ways to start an exchange; each returns what to wait for, or None."""
    send = torch.randn(NUMBERS, device=device)
    received = torch.empty_like(send)
    half = NUMBERS // RANKS
    lengths = [half] * RANKS

    def exchange(sizes: list[int], **set_to: bool) -> Callable[[], object]:
        def start() -> object:
            options = dist.AllToAllOptions()
            for name, value in set_to.items():
                setattr(options, name, value)
            return group.alltoall_base(received, send, sizes, sizes, options)

        return start

    found = {"split sizes, own stream": exchange(lengths), "no sizes, own stream": exchange([])}
    if device.type == "cuda" and TAKES_ASYNC_OP:
        found["split sizes, current stream"] = exchange(lengths, asyncOp=False)
        found["no sizes, current stream"] = exchange([], asyncOp=False)
    return found


def host_s(start: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of host a call, median of rounds; waiting for the device is not in it."""
    rounds = []
    for _ in range(ROUNDS):
        spent = 0.0
        for _ in range(calls):
            began = time.perf_counter()
            work: Any = start()
            if device.type == "cuda" and work is not None:
                work.wait()  # makes the current stream wait: the host's part of it
            spent += time.perf_counter() - began
            if device.type != "cuda":
                work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds.append(spent / calls)
    return median(rounds)


def graphs(group: dist.ProcessGroup, other: dist.ProcessGroup, device: torch.device) -> str:
    """A captured exchange replayed, eager gathers of a second group between: right each time, or what went wrong."""
    send = torch.arange(NUMBERS, device=device, dtype=torch.float32) + 1e6 * dist.get_rank()
    received, small = torch.empty_like(send), torch.ones(8, device=device)
    gathered = torch.empty(8 * RANKS, device=device)
    options = dist.AllToAllOptions()
    group.alltoall_base(received, send, [], [], options).wait()  # connects
    want = received.clone()
    replay = None
    try:
        replay = CudaRecorder(device).record(lambda: group.alltoall_base(received, send, [], [], options).wait())
        for _ in range(REPLAYS):
            received.zero_()
            replay()
            dist.all_gather_into_tensor(gathered, small, group=other)
            if not torch.equal(received, want):
                return "a replay gave other numbers"
    except RuntimeError as error:
        return f"refused: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.synchronize(device)
        del replay  # before its communicator
    return f"{REPLAYS} replays right, eager gathers of a second group between"


def main() -> None:
    """Be one rank."""
    number, told = int(sys.argv[1]), json.loads(sys.argv[2])
    device = torch.device(told["device"])
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(told["folder"]) / "meet"), RANKS)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=number, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    group, other = dist.group.WORLD, dist.new_group(list(range(RANKS)))
    calls = 5 if told["small"] else CALLS
    found: dict[str, Any] = {
        "host_s": {name: host_s(start, device, calls) for name, start in variants(group, device).items()},
        "graphs": graphs(group, other, device) if cuda else "a CPU has none",
    }
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


def _start(number: int, told: dict[str, Any]) -> "subprocess.Popen[str]":
    environment = {**os.environ, "NCCL_HOSTID": f"rank-{number}", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.exchange_cost", str(number), json.dumps(told)]
    return subprocess.Popen(  # noqa: S603  our own module
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


if __name__ == "__main__":
    main()
