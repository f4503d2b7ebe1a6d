"""How long a step takes: roofline, communication and launch overhead, added up block by block.

Owns the formulas. What constants mean is `hardware.py`'s, bytes are `strategies/traffic.py`'s. Letters: `s` tokens of
this rank, `S` of the sequence, `d` hidden width, `U`, `R` ulysses and ring degree, `N` stages, `M` patches of
PipeFusion.

The device's time of one block, on the slowest rank, is

    2 s token_params / matmul rate + weights / memory bandwidth     each matrix is read once
    4 (S / R) S (d / U) / attention rate                            scores and values (arXiv 2205.14135)
    passes s d e / memory bandwidth                                 norms, rotary, gates, activations
    all-to-all bytes / its bandwidth + latencies                    arXiv 2309.14509
    (R - 1) max(0, hop - overlap * attention / R)                   what attention does not hide, arXiv 2310.01889
    (R - 1) merge passes s d 4 / memory bandwidth                   parts of the output merged in fp32
    gathered weights that compute does not hide                     ZeRO 3, arXiv 1910.02054

and a block lasts as long as the longer of that and the host's time to start it; on devices that do not run ahead of the
host, the two add up. PipeFusion (arXiv 2405.14430): M = N patches pass N stages of blocks / N blocks each, text is
computed again with every patch; the first step is synchronous.
"""

import math
from dataclasses import dataclass, replace

from ..strategies.traffic import NEVER, AttentionShape, predict
from .candidates import Candidate
from .hardware import Calibration
from .shapes import ModelShape, Work

WARMUP_STEPS = 1


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
        parts = {
            "compute": self.compute_s,
            "communication": self.communication_s,
            "launch overhead": self.launch_s,
        }
        return max(parts, key=lambda name: parts[name])

    def image_s(self, steps: int) -> float:
        """Seconds of all steps of one run."""
        warmup = min(steps, WARMUP_STEPS) if self.warmup_step_s != self.step_s else 0
        return warmup * self.warmup_step_s + (steps - warmup) * self.step_s


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Seconds of one block: what the device computes, what it waits for, and what the host needs."""

    compute_s: float
    communication_s: float
    launch_s: float

    def total(self, *, asynchronous: bool) -> tuple[float, float, float]:
        """(compute, communication, launch), of which launch is only what shows."""
        busy = self.compute_s + self.communication_s
        shown = max(0.0, self.launch_s - busy) if asynchronous else self.launch_s
        return self.compute_s, self.communication_s, shown


def step_cost(shape: ModelShape, work: Work, candidate: Candidate, calibration: Calibration) -> Cost:
    """The time of one step of this plan. Time grows with tokens and rows, and never with a faster device or link."""
    rows = rows_per_lane(work, candidate)
    whole = _pass(shape, work, candidate, calibration, rows=rows, fraction=1.0)
    parts, warmup = whole, sum(whole)
    if candidate.pipefusion > 1:
        parts = _piped(shape, work, candidate, calibration, rows)
    outside = _outside(shape, work, candidate, calibration, rows)
    compute, communication, launch = (inner + outer for inner, outer in zip(parts, outside, strict=True))
    step = compute + communication + launch
    return Cost(
        step_s=step,
        compute_s=compute,
        communication_s=communication,
        launch_s=launch,
        warmup_step_s=warmup + sum(outside) if candidate.pipefusion > 1 else step,
    )


def rows_per_lane(work: Work, candidate: Candidate) -> int:
    """Rows of the batch one lane runs a step, the longest lane's."""
    lanes = candidate.data * candidate.cfg
    return -(-work.rows // lanes)


def _pass(
    shape: ModelShape, work: Work, candidate: Candidate, calibration: Calibration, *, rows: int, fraction: float
) -> tuple[float, float, float]:
    """All blocks once, for the text and `fraction` of the image's tokens."""
    block = _block(shape, work, candidate, calibration, rows=rows, fraction=fraction)
    compute, communication, launch = block.total(asynchronous=calibration.rates.asynchronous)
    return shape.blocks * compute, shape.blocks * communication, shape.blocks * launch


def _piped(
    shape: ModelShape, work: Work, candidate: Candidate, calibration: Calibration, rows: int
) -> tuple[float, float, float]:
    """A step once the pipeline is full: every stage runs its share of the blocks for each of the M = N patches."""
    stages = candidate.pipefusion
    one = _pass(shape, work, candidate, calibration, rows=rows, fraction=1 / stages)
    # N patches, each through the blocks of the fullest stage: N ceil(blocks / N) blocks instead of all.
    uneven = stages * math.ceil(shape.blocks / stages) / shape.blocks
    compute, communication, launch = (uneven * part for part in one)
    tokens = work.text_tokens + work.image_tokens / stages
    sent = rows * tokens / candidate.parts * shape.hidden * work.element_bytes
    link = calibration.link_over(candidate.parts * stages)
    hand_over = stages * (sent / link.bandwidth + link.latency_s)
    return compute, communication + max(0.0, hand_over - uneven * sum(one)), launch


def _block(
    shape: ModelShape, work: Work, candidate: Candidate, calibration: Calibration, *, rows: int, fraction: float
) -> _Block:
    rates, software = calibration.rates, calibration.software
    patch = replace(work, image_tokens=math.ceil(fraction * work.image_tokens))  # the text goes with every patch
    mine = rows * max(patch.lengths(candidate.parts))
    weights = shape.block_params / shape.blocks * work.weight_bytes
    attention = 4 * mine * work.tokens * shape.hidden / rates.attention_flops
    merges = software.merge_passes * (candidate.ring - 1) * mine * shape.hidden * 4  # fp32
    moved = weights + software.passes * mine * shape.hidden * work.element_bytes + merges
    compute = 2 * mine * shape.token_params / rates.matmul_flops + attention + moved / rates.memory_bandwidth
    exchange = _exchange_s(shape, work, candidate, calibration, rows=rows, fraction=fraction, attention_s=attention)
    gather = _weights_s(candidate, calibration, weights)
    exchange_launch = software.exchange_s if candidate.parts > 1 else 0.0
    return _Block(
        compute_s=compute,
        communication_s=exchange + max(0.0, gather - compute - exchange),
        launch_s=software.block_s + exchange_launch + (candidate.ring - 1) * software.hop_s,
    )


def _exchange_s(
    shape: ModelShape,
    work: Work,
    candidate: Candidate,
    calibration: Calibration,
    *,
    rows: int,
    fraction: float,
    attention_s: float,
) -> float:
    """Seconds one block waits for tokens of other ranks."""
    ring, ulysses = candidate.ring, candidate.ulysses
    swapped, hop = _bytes_a_block(shape, work, candidate, rows)
    waiting = 0.0
    if ulysses > 1:
        link = calibration.link_over(ulysses)
        waiting += fraction * swapped / link.all_to_all_bandwidth(ulysses)
        waiting += calibration.software.swap_calls * link.latency_s
    if ring > 1:
        link = calibration.link_over(ring * ulysses)
        hop_s = fraction * hop / link.bandwidth + link.latency_s
        hidden = calibration.software.ring_overlap * attention_s / ring
        waiting += (ring - 1) * max(0.0, hop_s - hidden)
    return waiting


def _bytes_a_block(shape: ModelShape, work: Work, candidate: Candidate, rows: int) -> tuple[float, float]:
    """(bytes the busiest rank sends in all-to-alls, in one hop of the ring), by the formulas of traffic.py."""
    attention = AttentionShape(
        blocks=1,
        heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        element_bytes=work.element_bytes,
        batch=rows,
    )
    lengths = work.lengths(candidate.parts)
    ring, ulysses = candidate.ring, candidate.ulysses
    group = max(
        (lengths[start : start + ulysses] for start in range(0, len(lengths), ulysses)), key=lambda part: sum(part)
    )
    swapped = max(sent for _, sent in predict(attention, lengths=group, ring=1, ulysses=ulysses, limit=NEVER))
    hop = 2 * sum(group) * rows * (shape.heads // ulysses) * attention.head_dim * work.element_bytes
    return swapped, hop if ring > 1 else 0.0


def _weights_s(candidate: Candidate, calibration: Calibration, weights: float) -> float:
    """Seconds to bring one block's weights to the device, where it does not hold them all."""
    shards = candidate.ranks // candidate.data
    seconds = 0.0
    if candidate.weights == "offloaded":
        seconds += weights / shards / calibration.rates.host_bandwidth
    if candidate.weights != "replicated" and shards > 1:
        link = calibration.link_over(shards)
        seconds += weights * (shards - 1) / shards / link.bandwidth + link.latency_s
    return seconds


def _outside(
    shape: ModelShape, work: Work, candidate: Candidate, calibration: Calibration, rows: int
) -> tuple[float, float, float]:
    """Once a step: embedders and head, the result gathered over the sequence, the two lanes of cfg put together."""
    rates = calibration.rates
    mine = rows * max(work.lengths(candidate.parts))
    compute = 2 * mine * 2 * shape.channels * shape.hidden / rates.matmul_flops
    compute += shape.other_params * work.weight_bytes / rates.memory_bandwidth
    latent = rows * work.image_tokens * shape.channels * work.element_bytes
    communication = 0.0
    for parts, span in ((candidate.parts, candidate.parts), (candidate.cfg, candidate.ranks // candidate.data)):
        if parts > 1:
            link = calibration.link_over(span)
            communication += latent * (parts - 1) / parts / link.bandwidth + link.latency_s
    return compute, communication, calibration.software.block_s
