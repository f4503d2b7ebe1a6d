"""What a device, a link and a way of running kernels can do: the constants of the cost model.

Owns what the constants mean. Their values come from `known.py`'s table, or from a calibration on the machine itself.
"""

from dataclasses import dataclass

from ..plan import ParallelPlan, crossing
from ..shares import shares_by_speed

GIB = 2**30
NARROW, WIDE = 16, 64  # sizes of heads with which attention is measured on a CPU
# The part of what could hide behind attention that does: a transfer takes multiprocessors and memory from the kernel
# beside it. Read off published runs of rings (benchmarks/planner.md).
HIDDEN = 0.5


# Of a step by which unlike devices are held against each other: FLOPs of matrices and of attention, and bytes through
# memory, weights included. Those of Flux.1 in bf16 for 1024 x 1024 pixels (usual.json).
MATMUL_FLOPS, ATTENTION_FLOPS, MOVED_BYTES = 59.5e12, 14.9e12, 166e9


@dataclass(frozen=True, kw_only=True)
class Rates:
    """One device. `asynchronous` devices run kernels while the host prepares the next ones.

    Rates are in operations and bytes a second; `memory_bytes` is what a rank may use, `host_bandwidth` its way to host
    memory. `elementwise_bandwidth` is what is reached between
    matrices, 0 where it is the memory's; `score_s` what an exponential of the softmax takes, besides the FLOPs that
    `attention_flops` reaches with heads of `WIDE`. `most_chunks`: into how many chunks ranks send heads of attention at
    most, 0 where no figure of the device limits them.
    """

    name: str
    matmul_flops: float
    attention_flops: float
    memory_bandwidth: float
    memory_bytes: int
    host_bandwidth: float = 20e9
    asynchronous: bool = True
    elementwise_bandwidth: float = 0.0
    score_s: float = 0.0
    most_chunks: int = 0

    @property
    def usual_s(self) -> float:
        """Seconds of a usual step on one device, without its host: what tells how fast it is compared with others."""
        attending = ATTENTION_FLOPS / self.attention_flops
        return MATMUL_FLOPS / self.matmul_flops + attending + MOVED_BYTES / self.memory_bandwidth

    def attention_s(self, flops: float, scores: float) -> float:
        """Seconds of attention of so many FLOPs and scores, whatever the size of its heads."""
        return flops / self.attention_flops + self.score_s * (scores - flops / (4 * WIDE))

    def waited_s(self, *, sent_s: float, attend_s: float, both_s: float) -> float:
        """Seconds for which attention of `attend_s` waits for transfers of `sent_s`.

        `both_s`: of both together by parallel/overlap.py, where neither slows the other. Nothing hides on a CPU, whose
        cores copy.
        """
        return sent_s - (HIDDEN * (sent_s + attend_s - both_s) if self.asynchronous else 0.0)

    def moving_s(self, num_bytes: float) -> float:
        """Seconds of operations between matrices that read and write so many bytes."""
        return num_bytes / (self.elementwise_bandwidth or self.memory_bandwidth)


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """How ranks reach each other. `bandwidth` is of one rank, one way; `latency_s` of one collective call.

    An all-to-all of n ranks reaches bandwidth * (2 / n) ** contention: 0 where a switch serves all pairs at once
    (NVLink), above where they share a host bridge.
    """

    name: str
    bandwidth: float
    latency_s: float
    contention: float = 0.0

    def all_to_all_bandwidth(self, ranks: int) -> float:
        """Bytes a second that one rank sends in an all-to-all of `ranks`."""
        return self.bandwidth * (2 / max(ranks, 2)) ** self.contention


@dataclass(frozen=True, kw_only=True)
class Software:
    """How ranks run operations.

    `operation_s` is the host's time to start one; `merge_passes` how often one fp32 output crosses memory at each hop
    of the ring.
    """

    name: str
    merge_passes: float
    operation_s: float = 10e-6


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All constants of one set of devices. `source` says where they come from.

    `machines`: how many consecutive ranks each of several machines has; `between`: how their ranks reach each other.
    `speeds`: each device's compared with that of the constants, by a usual step (`Rates.usual_s`), () where all are
    alike; `kinds`: the own rates of each kind of device, by its name, where several were measured; `shares`: what each
    computes of what is shared out, None as its speed has it.
    """

    rates: Rates
    link: Interconnect
    software: Software
    source: str
    between: Interconnect | None = None
    machines: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    kinds: tuple[tuple[str, Rates], ...] = ()
    shares: tuple[int, ...] | None = None

    def slowed(self, plan: ParallelPlan) -> float:
        """How many times as long as by the constants the slowest rank of a plan computes.

        Ranks of one side share its tokens, or its blocks, out by their shares; sides and replicas are taken for equal.
        """
        speeds = self.speeds[: plan.ranks]
        if not speeds:
            return 1.0
        each, found = plan.pipefusion * plan.parts, 0.0
        for first in range(0, plan.ranks, each):
            its = speeds[first : first + each]
            shares = self.shares[first : first + each] if self.shares else ()
            if self.shares is None:
                shares = shares_by_speed([str(rank) for rank in range(each)], its)
            shares = shares or (1,) * each
            parts = [each * share / sum(shares) / speed for share, speed in zip(shares, its, strict=True)]
            found = max(found, *parts)
        return found

    def link_of(self, run: int, num_ranks: int) -> Interconnect:
        """How ranks of one run of so many consecutive ones, of `num_ranks`, reach each other."""
        if self.between is not None and crossing(run, num_ranks, self.machines):
            return self.between
        return self.link
