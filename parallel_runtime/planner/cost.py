"""How long a step takes: roofline, communication and launch overhead, of what was counted of the model.

Owns the formulas. Amounts are counted.py's, what constants mean is hardware.py's. Letters: `U`, `R` ulysses and ring
degree, `N = U R` ranks that share the tokens, `H` heads of keys, `S` stages, `M` patches of PipeFusion.

The device's time of a row of a call, on the slowest rank, is

    matmul FLOPs / matmul rate + attention FLOPs / attention rate + bytes of what is between / memory bandwidth

where of what is counted outside of shared attention a part is every rank's and the rest 1 / N of it; shared attention
is ceil(H / U) / H of the heads (1 / U where H < U, with keys gathered) and 1 / R of the rows. Ranks send

    (q, k, v and output) / N (U - 1) / U in all-to-alls (arXiv 2309.14509), (R - 1) times (k, v) / N around the ring
    (arXiv 2310.01889), and what is gathered

of which the first two hide behind shared attention by parallel/overlap.py, heads in as many chunks as ranks choose, and
the host takes its time to start each operation: in parallel with the device where that runs ahead, after it on a CPU.
Weights are read once a call. What lies in host memory comes to the device in every step, behind what is computed.
Blocks that stay whole come in the first step of a run alone.

In a pipeline (PipeFusion, arXiv 2405.14430) that stays full between steps, M patches pass a stage in M turns, each with
blocks / S. A patch has its part of the picture and the whole text, and attends to all keys; stages hand on one tensor
of the width of the queries. What is outside of the blocks counts as part of them. The first step is synchronous.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

from ..parallel.overlap import OverlapRates, SharedHeads, choose_chunks, chunked_s, possible_chunks, ring_s
from ..plan import TOKEN_AXES, ParallelPlan
from .counted import Amounts, CountedModel, amounts_of, kept_bytes_of
from .hardware import Calibration
from .work import Work

WARMUP_STEPS = 1
# The part of a step's operations that the host still starts where each block is a CUDA graph: those outside of blocks
# were 5 to 6 of 55 ms of Flux.1 in 15 blocks on an H200 whose host takes 26.7 us for one (benchmarks/gpu.md).
STARTED_BY_GRAPHS = 0.1
PCIE = 32e9  # bytes a second each way over 16 lanes of PCIe 4.0
RELAYED_MESSAGES = 4  # of a step, one after another: data and request there, results and reply back


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


def step_cost(
    model: CountedModel,
    work: Work,
    plan: ParallelPlan,
    calibration: Calibration,
    *,
    by_graphs: bool = False,
    staying: float = 0.0,
) -> Cost:
    """The time of one step of this plan; `by_graphs`: with a CUDA graph of each block, for plans that take them.

    `staying`: the part of the blocks that the first step leaves whole on each device, of weights that are spread.
    """
    if by_graphs:
        software = calibration.software
        software = replace(software, operation_s=STARTED_BY_GRAPHS * software.operation_s)
        calibration = replace(calibration, software=software)
    first = model.in_first_step
    model = first if work.kept_on == "off" else model
    parts = _pass_s(model, work, plan, calibration, patches=1, staying=staying)
    alike = model is first and not staying
    warmup_step_s = sum(parts if alike else _pass_s(first, work, plan, calibration, patches=1))
    if plan.pipefusion > 1:
        handed = partial(_handed_s, model, work, plan, calibration)
        warmup_step_s += (plan.pipefusion - 1) * handed(patches=1)
        compute, communication, launch = _pass_s(model, work, plan, calibration, patches=plan.num_patches)
        turns = plan.num_patches  # of a pipeline that stays full between steps
        factor = turns * math.ceil(model.staged_blocks / plan.pipefusion) / model.staged_blocks
        hand_over = handed(patches=plan.num_patches)
        turn = (compute + communication + launch) * factor / turns
        waited = turns * max(0.0, hand_over - turn)
        parts = (compute * factor, communication * factor + waited, launch * factor)
    compute, communication, launch = parts
    relayed = relayed_s(plan, calibration)
    return Cost(
        step_s=compute + communication + launch + relayed,
        compute_s=compute,
        communication_s=communication + relayed,
        launch_s=launch,
        warmup_step_s=warmup_step_s + relayed,
    )


def relayed_s(plan: ParallelPlan, calibration: Calibration) -> float:
    """Seconds of the messages of a step, there and back, where ranks of further machines have a part in it."""
    between = calibration.between
    if between is None or plan.ranks <= calibration.machines[0]:
        return 0.0
    return RELAYED_MESSAGES * between.latency_s


def rows_per_group(work: Work, plan: ParallelPlan) -> int:
    """Rows of the batch one batch group runs a step, the longest batch group's. Where cfg does not part prompt and
    negative, a group has both of its images: so the loop in the workers shares them out (pool/calls.py)."""
    if work.guided:
        return -(-work.batch // plan.data) * (1 if plan.cfg > 1 else 2)
    return -(-work.rows // plan.batch_groups)


def _pass_s(
    model: CountedModel,
    work: Work,
    plan: ParallelPlan,
    calibration: Calibration,
    *,
    patches: int,
    staying: float = 0.0,
) -> tuple[float, float, float]:
    """Seconds of compute, communication and launch of a patch of every call of a step through all blocks."""
    rates, software = calibration.rates, calibration.software
    amounts = amounts_of(model, work, plan, merge_passes=software.merge_passes, patches=patches)
    rows = rows_per_group(work, plan)
    compute = amounts.matmul_flops / rates.matmul_flops
    compute += rates.attention_s(amounts.attention_flops, amounts.scores) + rates.moving_s(amounts.moved_bytes)
    calls = _calls(work, plan)  # each reads the weights
    compute = (rows * compute + calls * model.weight_bytes / rates.memory_bandwidth) * calibration.slowed(plan)
    around = calibration.link_of(plan.parts, plan.ranks)
    gathered = rows * amounts.gathered_bytes / around.bandwidth + calls * amounts.gathers * around.latency_s
    communication = gathered + _exchanges_s(model, work, plan, calibration, amounts, calls=calls)
    loaded, joined = (calls * (1 - staying) * seconds for seconds in _weights_s(model, plan, calibration))
    if work.kept_on == "cpu" and rates.asynchronous:
        loaded += rows * kept_bytes_of(model, work) / rates.host_bandwidth
    fetched = loaded + joined
    if joined:  # over the link that exchanges take, whether those hide or not
        shown = replace(calibration, rates=replace(rates, asynchronous=False))
        sent = gathered + _exchanges_s(model, work, plan, shown, amounts, calls=calls)
        fetched = max(fetched, joined + sent)
    communication += max(0.0, fetched - compute - communication)
    launch = calls * amounts.operations * software.operation_s
    if rates.asynchronous:  # the step ends when the device has done the last operation that the host starts
        device = compute + communication
        launch = max(0.0, launch - device) + min(launch, device) / max(1.0, calls * amounts.operations)
    return compute, communication, launch


def _exchanges_s(
    model: CountedModel, work: Work, plan: ParallelPlan, calibration: Calibration, amounts: Amounts, *, calls: int
) -> float:
    """Seconds of a step for which ranks wait for each other, beyond what attention hides.

    Raises `KeyError` for an axis whose exchange has no price: its plans would seem to send nothing.
    """
    times = calls * amounts.exchanges
    if not times:
        return 0.0
    shared = _Attention(model, work, plan, calibration, amounts, times)
    return times * sum(WAITED_S[axis](shared) for axis in TOKEN_AXES if getattr(plan, axis) > 1)


def shown_heads_s(model: CountedModel, work: Work, plan: ParallelPlan, calibration: Calibration) -> float:
    """Seconds of a step for which devices wait for heads over PCIe that cannot go in chunks; 0 over a faster link, and
    in a pipeline."""
    rates, link = calibration.rates, calibration.link
    if plan.ulysses == 1 or plan.pipefusion > 1 or link.bandwidth > PCIE or not rates.asynchronous:
        return 0.0
    if model.heads < plan.ulysses or possible_chunks(model.heads, plan.ulysses, rates.most_chunks) != [1]:
        return 0.0
    amounts = amounts_of(model, work, plan, merge_passes=calibration.software.merge_passes)
    times = _calls(work, plan) * amounts.exchanges
    return times * _waited_for_heads_s(_Attention(model, work, plan, calibration, amounts, times)) if times else 0.0


def _calls(work: Work, plan: ParallelPlan) -> int:
    """Calls of a batch group in a step, one after another: prompt and negative, where cfg does not part them."""
    return 2 if work.guided and plan.cfg == 1 else 1


@dataclass(frozen=True)
class _Attention:
    """One attention that ranks share, of so many in a step (`times`), and what it sends."""

    model: CountedModel
    work: Work
    plan: ParallelPlan
    calibration: Calibration
    amounts: Amounts
    times: float

    @property
    def rows(self) -> float:
        """By how much a row's amounts, which are of all attentions, are to be taken."""
        return rows_per_group(self.work, self.plan) / self.times

    @property
    def seconds(self) -> float:
        """Of attending."""
        amounts = self.amounts
        return self.rows * self.calibration.rates.attention_s(amounts.attended_flops, amounts.attended_scores)

    @property
    def chunks(self) -> int:
        """Into how many heads are sent, as ranks choose. A pipeline's stages send all at once."""
        model, plan, amounts, calibration = self.model, self.plan, self.amounts, self.calibration
        if plan.pipefusion > 1 or not calibration.rates.asynchronous or model.heads < plan.ulysses:
            return 1
        heads = SharedHeads(
            groups=model.heads,
            ranks=plan.ulysses,
            keys=self.work.tokens,
            head_dim=model.head_dim(self.work),
            flops=self.rows * amounts.attended_flops,
            arriving_bytes=self.rows * amounts.arriving_bytes,
            returning_bytes=self.rows * amounts.returning_bytes,
        )
        given = OverlapRates(
            attention_flops=calibration.rates.attention_flops,
            bandwidth=calibration.link.all_to_all_bandwidth(plan.ulysses),
            latency_s=calibration.link.latency_s,
            most_chunks=calibration.rates.most_chunks,
        )
        return choose_chunks(heads, given)

    def waited_s(self, *, sent_s: float, both_s: float) -> float:
        """Of what takes so long by itself, and so long together with attention."""
        return self.calibration.rates.waited_s(sent_s=sent_s, attend_s=self.seconds, both_s=both_s)


def _waited_for_hops_s(shared: _Attention) -> float:
    """Seconds that a ring shows. A pipeline's stages gather what others have around the ring: nothing hides."""
    plan, attend_s = shared.plan, shared.seconds
    around = shared.calibration.link_of(plan.parts, plan.ranks)
    hop_s = shared.rows * shared.amounts.hop_bytes / around.bandwidth + around.latency_s
    sent = (plan.ring - 1) * hop_s
    both = sent + attend_s if plan.pipefusion > 1 else ring_s(attend_s=attend_s, hop_s=hop_s, ring=plan.ring)
    return shared.waited_s(sent_s=sent, both_s=both)


def _waited_for_heads_s(shared: _Attention) -> float:
    """Seconds that all-to-alls show, in as many chunks as ranks choose."""
    plan, rows, amounts, chunks = shared.plan, shared.rows, shared.amounts, shared.chunks
    link = shared.calibration.link
    bandwidth = link.all_to_all_bandwidth(plan.ulysses)
    there, back = rows * amounts.arriving_bytes, rows * amounts.returning_bytes
    both = chunked_s(
        attend_s=shared.seconds,
        arriving_s=there / bandwidth,
        returning_s=back / bandwidth,
        latency_s=link.latency_s,
        chunks=chunks,
    )
    sent = (there + back) / bandwidth + 2 * chunks * link.latency_s
    return shared.waited_s(sent_s=sent, both_s=both)


WAITED_S = {"ring": _waited_for_hops_s, "ulysses": _waited_for_heads_s}  # by axis, of one attention


def _handed_s(model: CountedModel, work: Work, plan: ParallelPlan, calibration: Calibration, *, patches: int) -> float:
    """Seconds until the next stage has a patch of every call of a step."""
    patch = replace(work, image_tokens=math.ceil(work.image_tokens / patches))
    handed = model.count("query_bytes", patch) / 2 / max(1.0, model.count("exchanges", patch)) / plan.parts
    link = calibration.link_of(plan.pipefusion * plan.parts, plan.ranks)
    return rows_per_group(work, plan) * handed / link.bandwidth + _calls(work, plan) * link.latency_s


def _weights_s(model: CountedModel, plan: ParallelPlan, calibration: Calibration) -> tuple[float, float]:
    """Seconds to bring a call all blocks' weights, where the device does not hold them all: from host memory, and from
    other ranks."""
    shards, num_bytes = plan.replica_ranks // plan.pipefusion, sum(model.block_bytes) / plan.pipefusion
    link = calibration.link_of(plan.replica_ranks, plan.ranks)
    loaded = num_bytes / shards / calibration.rates.host_bandwidth if plan.weights == "offloaded" else 0.0
    if plan.weights == "replicated" or shards == 1:
        return loaded, 0.0
    joined = num_bytes * (shards - 1) / shards / link.bandwidth
    return loaded, joined + len(model.block_bytes) / plan.pipefusion * link.latency_s
