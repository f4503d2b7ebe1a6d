"""How long a step takes: roofline, communication and launch overhead, added up block by block.

Owns the formulas. What constants mean is `hardware.py`'s, bytes are `parallel/traffic.py`'s. Letters: `s` tokens of
this rank, `S` of the sequence, `d` hidden width, `U`, `R` ulysses and ring degree, `N` stages, `M` patches of
PipeFusion.

The device's time of one block, on the slowest rank, is

    2 s token_params / matmul rate + weights / memory bandwidth     each matrix is read once
    4 (S / R) S (d / U) / attention rate                            scores and values (arXiv 2205.14135)
    passes s d e / memory bandwidth                                 norms, rotary, gates, activations
    all-to-all bytes / its bandwidth + latencies                    arXiv 2309.14509
    (R - 1) hops, less what attention hides (parallel/overlap.py)   arXiv 2310.01889
    (R - 1) merge passes s d 4 / memory bandwidth                   parts of the output merged in fp32
    gathered weights that compute does not hide                     ZeRO 3, arXiv 1910.02054

and a block lasts as long as the longer of that and the host's time to start it; on devices that do not run ahead of the
host, the two add up. PipeFusion (arXiv 2405.14430): M = N patches pass N stages of blocks / N blocks each, text is
computed again with every patch; the first step is synchronous.
"""

import math
from dataclasses import dataclass, replace

from ..parallel.overlap import ring_s
from ..parallel.shard import NEVER
from ..parallel.traffic import AttentionShape, predict
from ..plan import ParallelPlan
from .hardware import Calibration
from .shapes import ModelShape, Work

WARMUP_STEPS = 1
RELAYED_MESSAGES = 4  # of a step, one after another: data and request there, results and reply back
Parts = tuple[float, float, float]  # seconds of compute, communication and launch


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step on the slowest rank. `compute_s`, `communication_s` and `launch_s` add up to `step_s`."""

    step_s: float
    compute_s: float
    communication_s: float
    launch_s: float
    warmup_step_s: float

    @property
    def bound(self) -> str:
        """What takes the most of the step: compute, communication or launch overhead."""
        parts = {"compute": self.compute_s, "communication": self.communication_s, "launch overhead": self.launch_s}
        return max(parts, key=lambda name: parts[name])

    def image_s(self, steps: int) -> float:
        """Seconds of all steps of one run."""
        warmup = min(steps, WARMUP_STEPS) if self.warmup_step_s != self.step_s else 0
        return warmup * self.warmup_step_s + (steps - warmup) * self.step_s


def step_cost(shape: ModelShape, work: Work, plan: ParallelPlan, calibration: Calibration) -> Cost:
    """The time of one step of this plan. Time grows with tokens and rows, and never with a faster device or link."""
    model = _CostModel(shape, work, plan, calibration, rows_per_group(work, plan))
    outside, whole = model.outside(), model.blocks(fraction=1.0)
    parts = model.piped() if plan.pipefusion > 1 else whole
    compute, communication, launch = (inner + outer for inner, outer in zip(parts, outside, strict=True))
    step = compute + communication + launch
    return Cost(
        step_s=step,
        compute_s=compute,
        communication_s=communication,
        launch_s=launch,
        warmup_step_s=sum(whole) + sum(outside) if plan.pipefusion > 1 else step,
    )


def relayed_s(plan: ParallelPlan, calibration: Calibration, num_bytes: float) -> float:
    """Seconds for the tensors of a step, there and back, where ranks of further machines have a part in it."""
    between = calibration.between
    if between is None or plan.ranks <= calibration.machines[0]:
        return 0.0
    return num_bytes / between.bandwidth + RELAYED_MESSAGES * between.latency_s


def rows_per_group(work: Work, plan: ParallelPlan) -> int:
    """Rows of the batch one batch group runs a step, the longest batch group's."""
    return -(-work.rows // plan.batch_groups)


@dataclass(frozen=True)
class _CostModel:
    """The formulas, of one model, work, plan and machine. `rows` of the batch are one batch group's."""

    shape: ModelShape
    work: Work
    plan: ParallelPlan
    calibration: Calibration
    rows: int

    def blocks(self, *, fraction: float) -> Parts:
        """All blocks once, for the text and `fraction` of the image's tokens. Of the launch, what shows."""
        shape, plan, work = self.shape, self.plan, self.work
        rates, software = self.calibration.rates, self.calibration.software
        patch = replace(work, image_tokens=math.ceil(fraction * work.image_tokens))  # the text goes with every patch
        mine = self.rows * max(patch.lengths(plan.parts))
        weights = shape.block_params / shape.blocks * work.weight_bytes
        merges = software.merge_passes * (plan.ring - 1) * mine * shape.hidden * 4  # fp32
        moved = weights + software.passes * mine * shape.hidden * work.element_bytes + merges
        attend_s = 4 * mine * work.tokens * shape.hidden / rates.attention_flops
        compute = 2 * mine * shape.token_params / rates.matmul_flops + attend_s + moved / rates.memory_bandwidth
        exchange = self._exchange_s(fraction, attend_s)
        communication = exchange + max(0.0, self._weights_s(weights) - compute - exchange)
        launch = software.block_s + (software.exchange_s if plan.parts > 1 else 0.0) + (plan.ring - 1) * software.hop_s
        if rates.asynchronous:
            launch = max(0.0, launch - compute - communication)
        return shape.blocks * compute, shape.blocks * communication, shape.blocks * launch

    def piped(self) -> Parts:
        """A step once the pipeline is full: every stage runs its share of the blocks for each of the M = N patches."""
        shape, plan, work = self.shape, self.plan, self.work
        stages = plan.pipefusion
        one = self.blocks(fraction=1 / stages)
        # N patches, each through the blocks of the fullest stage: N ceil(blocks / N) blocks instead of all.
        uneven = stages * math.ceil(shape.blocks / stages) / shape.blocks
        compute, communication, launch = (uneven * part for part in one)
        tokens = work.text_tokens + work.image_tokens / stages
        sent = self.rows * tokens / plan.parts * shape.hidden * work.element_bytes
        link = self.calibration.link_of(stages * plan.parts, plan.ranks)
        hand_over = stages * (sent / link.bandwidth + link.latency_s)
        return compute, communication + max(0.0, hand_over - uneven * sum(one)), launch

    def outside(self) -> Parts:
        """Once a step: embedders and head, the result gathered over the sequence, the two batch groups of cfg put
        together."""
        shape, plan, work = self.shape, self.plan, self.work
        rates, link_of = self.calibration.rates, self.calibration.link_of
        mine = self.rows * max(work.lengths(plan.parts))
        compute = 2 * mine * 2 * shape.channels * shape.hidden / rates.matmul_flops
        compute += shape.other_params * work.weight_bytes / rates.memory_bandwidth
        latent = self.rows * work.image_tokens * shape.channels * work.element_bytes
        communication = sum(
            latent * (parts - 1) / parts / link.bandwidth + link.latency_s
            for parts, link in (
                (plan.parts, link_of(plan.parts, plan.ranks)),
                (plan.cfg, link_of(plan.replica_ranks, plan.ranks)),
            )
            if parts > 1
        )
        communication += relayed_s(plan, self.calibration, 2 * work.rows * work.image_tokens * shape.channels * 4)
        return compute, communication, self.calibration.software.block_s

    def _exchange_s(self, fraction: float, attend_s: float) -> float:
        """Seconds one block waits for tokens of other ranks; blocks of our own exchange all heads at once."""
        plan, link = self.plan, self.calibration.link
        around = self.calibration.link_of(plan.parts, plan.ranks)
        swapped, hop = self._bytes_a_block()
        waiting = 0.0
        if plan.ulysses > 1:
            waiting += fraction * swapped / link.all_to_all_bandwidth(plan.ulysses)
            waiting += self.calibration.software.swap_calls * link.latency_s
        if plan.ring > 1:
            hop_s = fraction * hop / around.bandwidth + around.latency_s
            both_s = ring_s(attend_s=attend_s, hop_s=hop_s, ring=plan.ring)
            hops_s = (plan.ring - 1) * hop_s
            waiting += self.calibration.rates.waited_s(sent_s=hops_s, attend_s=attend_s, both_s=both_s)
        return waiting

    def _bytes_a_block(self) -> tuple[float, float]:
        """(bytes the busiest rank sends in all-to-alls, in one hop of the ring), by the formulas of traffic.py."""
        shape, work, ulysses = self.shape, self.work, self.plan.ulysses
        attention = AttentionShape(
            blocks=1,
            heads=shape.heads,
            head_dim=shape.hidden // shape.heads,
            element_bytes=work.element_bytes,
            batch=self.rows,
        )
        lengths = work.lengths(self.plan.parts)
        group = max((lengths[start : start + ulysses] for start in range(0, len(lengths), ulysses)), key=sum)
        swapped = max(sent for _, sent in predict(attention, lengths=group, ring=1, ulysses=ulysses, limit=NEVER))
        hop = 2 * sum(group) * self.rows * (shape.heads // ulysses) * attention.head_dim * work.element_bytes
        return swapped, hop

    def _weights_s(self, weights: float) -> float:
        """Seconds to bring one block's weights to the device, where it does not hold them all."""
        shards, link = self.plan.replica_ranks, self.calibration.link_of(self.plan.replica_ranks, self.plan.ranks)
        seconds = 0.0
        if self.plan.weights == "offloaded":
            seconds += weights / shards / self.calibration.rates.host_bandwidth
        if self.plan.weights != "replicated" and shards > 1:
            seconds += weights * (shards - 1) / shards / link.bandwidth + link.latency_s
        return seconds
