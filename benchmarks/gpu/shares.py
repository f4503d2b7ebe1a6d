"""Experiment 3: one rank's share for 1, 2, 4 and 8 ranks; the host's time for an operation; what timers cost."""

from statistics import median

from benchmarks.share import cases
from benchmarks.share.bound import bounds_table, link_named, shares_table
from benchmarks.share.exchange import local_sequence
from benchmarks.share.rank import OneRank, Share, timed_runs
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.count import OperationCounter

from .setting import Result, Setting

LINKS = ("nvlink4", "pcie4", "10")
CHEAP = 0.01  # of a step that timers of every step may cost
NOISE_RUNS = 7


def operations_in(rank: OneRank, call: ModelCall, ranks: int) -> float:
    """Operations of one call as one rank of several."""
    run = rank.step(call, local_sequence(ulysses=ranks, device=rank.device))
    with OperationCounter() as counter:
        run()
    return sum(amount for name, amount in counter.counts.items() if name.endswith("operations"))


def timers(rank: OneRank, call: ModelCall, runs: int) -> float:
    """How much longer a step with timers takes, as a part of it: the median of pairs."""
    sequence = local_sequence(ulysses=2, device=rank.device)
    plain, timed = rank.step(call, sequence), rank.step(call, sequence, timed=True)
    ratios = [timed_runs(timed, 1)[0] / timed_runs(plain, 1)[0] for _ in range(runs)]
    return median(ratios) - 1


def run(setting: Setting) -> Result:
    """Every model."""
    lines: list[str] = []
    operation_s, costs = [], []
    degrees = (1, 2) if setting.small else (1, 2, 4, 8)

    def measure(name: str, rank: OneRank) -> None:
        call, small = rank.call(setting.size(name)), rank.small_call(setting.size(name))
        shares = [rank.measure(call, small, ulysses=each, steps=setting.steps) for each in degrees]
        operation_s.extend(each.host_s / operations_in(rank, small, each.ranks) for each in shares)
        costs.append(timers(rank, small, 1 if setting.small else NOISE_RUNS))
        lines.extend(["", f"**{name}**, one rank's share, measured:", "", *shares_table(shares)])
        lines.extend(_bounds(name, shares))

    failed = setting.each_model(measure)
    host, cost = median(operation_s), max(costs)
    every = 1 if cost < CHEAP else 10
    decided = (
        f"{1e6 * host:.1f} us of host an operation; timers cost {100 * cost:.1f} % of a step in which the device has "
        f"next to nothing to do: one step in {every} has them"
    )
    choices = {"timed_every": every} if setting.capability else {}
    # The host's time is printed and no constant: it is the machine's as much as the device's, and auto would change.
    return Result(table=lines[1:], decided=decided, failed=failed, choices=choices)


def _bounds(name: str, shares: list[Share]) -> list[str]:
    links = [link_named(each) for each in LINKS]
    case = cases.CASES.get(name)
    if case is None:
        return ["", "bound:", "", *bounds_table(shares, links)]
    whole = [share.at_depth(case.depth) for share in shares]
    return ["", f"bound, {case.depth} blocks, from one measured GPU:", "", *bounds_table(whole, links)]
