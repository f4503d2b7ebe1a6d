"""`python -m benchmarks.peers`: ours and the peers on one model in one run, interleaved; prints one table.

Owns what is compared, the order of the runs and the command line. Does not own a peer (`diffusers_peer.py`,
`xfuser_peer.py`), nor the table (`table.py`).

Every round runs every candidate once, each round beginning with another candidate, so that whatever else the machine
does hits all alike. A turn is some steps one after another, as a sampler takes them: the first, after the others'
turns, finds cold caches and is not counted. Ours is timed by the caller of the pool, the hand-over included; a peer by
its own rank 0, from a barrier on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import choose_devices, relative_error
from parallel_runtime.models.flux.sample import write_sample
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

from .ranks import ROOT, Peer, PeerRanks
from .shapes import SHAPES, Shape
from .table import Candidate, print_table, show

PLANS = {"one rank": ParallelPlan(), "ulysses 2": ParallelPlan(ulysses=2), "ring 2": ParallelPlan(ring=2)}
ONE_PROCESS = Peer(module="diffusers_peer")
OWN_LOOP = "one rank, without a pool"
PEERS = {
    "diffusers, ulysses 2": Peer(module="diffusers_peer", ulysses=2),
    "diffusers, ring 2": Peer(module="diffusers_peer", ring=2),
    "xfuser, ulysses 2": Peer(module="xfuser_peer", ulysses=2),
    "xfuser, ring 2": Peer(module="xfuser_peer", ring=2),
}


def main() -> None:
    """Runs the shapes asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=main.__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--runs", type=int, default=9, help="timed rounds (default 9)")
    parser.add_argument("--steps", type=int, default=3, help="steps that count of a turn, after one (default 3)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them (default 3)")
    parser.add_argument("--python", default=str(ROOT / "build/peers/bin/python"), help="an interpreter with the peers")
    arguments = parser.parse_args()
    for shape in SHAPES.values():
        if arguments.shape in (shape.name, "all"):
            compare(shape, arguments)


def compare(shape: Shape, arguments: argparse.Namespace) -> None:
    """One shape: start everything, run the rounds, print the table."""
    gpus = torch.cuda.device_count()
    kind, dtype = ("cuda", "bfloat16") if gpus >= 2 else ("cpu", "float32")
    if gpus == 1:
        show("One GPU: two ranks would share it, which times nothing. Ours and the peers run on the CPU.")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        model, inputs = str(folder / "model.safetensors"), str(folder / "inputs.safetensors")
        write_sample(model, shape.config)
        tensors = shape.workload.tensors(shape.config)
        save_file(tensors, inputs)
        start = {"python": arguments.python, "kind": kind, "dtype": dtype, "model": model, "inputs": inputs}
        peers = {name: stack.enter_context(PeerRanks(peer, **start)) for name, peer in PEERS.items()}
        single = stack.enter_context(PeerRanks(ONE_PROCESS, **start))
        own = stack.enter_context(PeerRanks(Peer(module="own_loop"), **start))
        for ranks in (*peers.values(), single, own):
            ranks.wait_ready()
        pool = stack.enter_context(Pool(choose_devices(None, ParallelPlan(ulysses=2)).devices, threads_per_rank=1))
        spec = ModelSpec.of(model, dtype)
        pool.load(spec)
        ours = {name: PlanRunner(pool, spec, plan, options={}) for name, plan in PLANS.items()}
        outputs: dict[str, torch.Tensor] = {}
        candidates = [Candidate(name, "ours", timed(runner, tensors, outputs, name)) for name, runner in ours.items()]
        candidates.insert(0, Candidate(OWN_LOOP, "ours", lambda: own.run(1)))
        candidates.append(Candidate("one process, 1 thread", "baseline", lambda: single.run(1)))
        if kind == "cpu":  # on a GPU, threads play no part
            candidates.append(Candidate("one process, 2 threads", "baseline", lambda: single.run(2)))
        candidates += [Candidate(name, "peer", lambda ranks=ranks: ranks.run(1)) for name, ranks in peers.items()]
        rounds(candidates, arguments)
        reference = single.output()
        outputs |= {name: ranks.output() for name, ranks in {**peers, OWN_LOOP: own}.items()}
    errors = {name: relative_error(out, reference) for name, out in outputs.items()}
    print_table(f"{shape.name}: {shape.text}, {dtype} on {kind}", candidates, errors)


def timed(
    runner: PlanRunner, tensors: Mapping[str, torch.Tensor], outputs: dict[str, torch.Tensor], name: str
) -> Callable[[], float]:
    """Seconds of one call of the pool; its output is kept."""

    def run() -> float:
        began = time.perf_counter()
        outputs[name] = runner(tensors)
        return time.perf_counter() - began

    return run


def rounds(candidates: list[Candidate], arguments: argparse.Namespace) -> None:
    """Warm-up, then the timed rounds; each begins with the candidate after the one that the last began with."""
    for number in range(arguments.warmup + arguments.runs):
        first = number % len(candidates)
        for candidate in candidates[first:] + candidates[:first]:
            _, *seconds = [candidate.run() for _ in range(1 + arguments.steps)]
            if number >= arguments.warmup:
                candidate.seconds.append(median(seconds))


if __name__ == "__main__":
    main()
