"""A model without hand-written sizes: what was counted of ComfyUI's class (models/hosted/count.py), and its cost.

Every count is a polynomial of the tokens of picture and text, of one row of a call. Owns reading the counts and the
formulas. What constants mean is `hardware.py`'s. Letters: `n` tokens of the picture, `t` of the text, `U`, `R` ulysses
and ring degree, `N = U R` ranks that share the tokens, `H` heads of keys.

The device's time of a row of a call, on the slowest rank, is

    matmul FLOPs / matmul rate + attention FLOPs / attention rate + bytes of what is between / memory bandwidth

where of what is counted outside of shared attention a part is every rank's and the rest 1 / N of it; shared attention
is ceil(H / U) / H of the heads (1 / U where H < U, with keys gathered) and 1 / R of the rows. Ranks send

    (q, k, v and output) / N (U - 1) / U in all-to-alls, (R - 1) times (k, v) / N around the ring, and what is gathered

of which the first two hide behind shared attention by parallel/overlap.py, heads in as many chunks as ranks choose, and
the host takes its time to start each operation. Weights are read once a call.

A class that keeps something from call to call is counted in a call that finds it, and in the one that fills it, which
the first step makes of each side. What lies in host memory comes to the device in every step, behind what is computed.

In a pipeline each call begins and ends with the pipeline empty: M patches pass S stages in M + S - 1 turns, each with
blocks / S. A patch has its part of the picture and the whole text, and attends to all keys; stages hand on one tensor
of the width of the queries. What is outside of the blocks counts as part of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..parallel.overlap import OverlapRates, SharedHeads, choose_chunks, chunked_s, ring_s
from ..parallel.shard import split_lengths
from ..plan import ParallelPlan
from .cost import Cost, relayed_s, rows_per_group
from .hardware import Calibration, Rates
from .memory import BLOCKS_AT_HAND, Memory, runtime_bytes
from .work import STORED_AS, Work

Polynomial = tuple[float, ...]  # of 1, n, n n, t, n t, t t
ROOM = 4  # times what a call keeps has to be free on the device, or it lies in host memory
EXCHANGED = 2.0  # copies of what goes out and comes in are counted on one of two ranks


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A model as it was counted, at activations and weights of the bytes that it was counted with.

    `numbers_per_token`: numbers of a row's latent that make a token. `key_heads`: fewest heads of keys of attention
    that ranks share, 0 where they share none. `block_bytes`: of each block that ranks with sharded weights share;
    `staged_blocks`: of how many stages may have a part, 0 where none may.
    `whole_batches`: all rows of a call are one rank's. `from_real_calls`: its forward reads values, so it was computed.
    `kept_bytes`: what a class keeps from call to call, by the format; `filling`: `whole` and `shared` of the call that
    fills it, where those of the model are of one that finds it.
    """

    name: str
    whole: Mapping[str, Polynomial]
    shared: Mapping[str, Polynomial]
    numbers_per_token: float
    key_heads: int
    weight_bytes: int
    block_bytes: tuple[int, ...]
    staged_blocks: int = 0
    whole_batches: bool = False
    from_real_calls: bool = False
    kept_bytes: Mapping[str, Polynomial] = field(default_factory=dict)
    filling: tuple[Mapping[str, Polynomial], Mapping[str, Polynomial]] | None = None

    @classmethod
    def of(cls, name: str, counted: Mapping[str, Any]) -> "CountedModel":
        """The answer of the process that counts. Raises `ValueError` for one that lacks something."""
        try:
            filling = counted["filling"]
            return cls(
                name=name,
                whole=_table(counted["whole"]),
                shared=_table(counted["shared"]),
                numbers_per_token=float(counted["numbers_per_token"]),
                key_heads=int(counted["key_heads"]),
                weight_bytes=int(counted["weight_bytes"]),
                block_bytes=tuple(counted["block_bytes"]),
                staged_blocks=int(counted["staged_blocks"]),
                whole_batches=bool(counted["whole_batches"]),
                from_real_calls=bool(counted["from_real_calls"]),
                kept_bytes=_table(counted["kept_bytes"]),
                filling=None if filling is None else (_table(filling[0]), _table(filling[1])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"what was counted of {name} cannot be read ({error!r}); count it again") from error

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks can share the tokens of a row."""
        return self.key_heads > 0

    @property
    def heads(self) -> int:
        """Heads that ranks can share out."""
        return max(1, self.key_heads)

    def head_dim(self, work: Work) -> int:
        """Size of a head of keys, of attention that ranks share."""
        numbers = self.count("key_bytes", work) / 2 / work.element_bytes
        return max(1, round(numbers / max(1.0, self.count("exchanges", work)) / work.tokens / self.heads))

    @property
    def largest_block(self) -> int:
        """Bytes of the block that has the most."""
        return max(self.block_bytes, default=self.weight_bytes)

    @property
    def in_first_step(self) -> "CountedModel":
        """The model in calls that find nothing that was kept."""
        if self.filling is None:
            return self
        whole, shared = self.filling
        return replace(self, whole=whole, shared=shared, filling=None, kept_bytes={})

    def image_tokens(self, numbers: float) -> int:
        """Tokens of a latent of so many numbers a row."""
        return max(1, round(numbers / self.numbers_per_token))

    def may_run(self, plan: ParallelPlan) -> bool:
        """Whether its ranks can share calls so."""
        if plan.pipefusion > max(1, self.staged_blocks) or (plan.parts > 1 and not self.shares_tokens):
            return False
        return not self.whole_batches or (plan.batch_groups == 1 or plan.weights == "sharded")

    def count(self, name: str, work: Work, parts: int = 1) -> float:
        """An amount a row on the slowest of `parts` ranks; `name` as the counter writes it."""
        lengths = split_lengths(work.tokens, parts)
        part = lengths[0] / work.tokens
        return max(0.0, _value(self.whole, name, work) + part * _value(self.shared, name, work))


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What the slowest rank computes, moves and sends in one row of a call."""

    matmul_flops: float
    attention_flops: float
    attended_flops: float  # those of attention that ranks share
    attended_scores: float
    scores: float  # of queries and keys, each of which the softmax takes an exponential of
    moved_bytes: float
    operations: float
    arriving_bytes: float  # in all-to-alls: q, k and v, then the output
    returning_bytes: float
    hop_bytes: float  # of one hop around the ring
    gathered_bytes: float
    exchanges: float
    gathers: float


def amounts_of(
    model: CountedModel, whole: Work, plan: ParallelPlan, *, merge_passes: float = 0.0, patches: int = 1
) -> Amounts:
    """Of a row under a plan, in all blocks; `merge_passes` as `Software` has them; of the largest of `patches`."""
    parts, ulysses, ring = plan.parts, plan.ulysses, plan.ring
    work = replace(whole, image_tokens=math.ceil(whole.image_tokens / patches))

    def count(name: str) -> float:
        if name.startswith("attended.") and patches > 1:  # its queries, and the keys of all
            return model.count(name, whole, parts) * work.tokens / whole.tokens
        return model.count(name, work, parts)

    heads = model.heads
    attended = (math.ceil(heads / ulysses) / heads if heads >= ulysses else 1 / ulysses) / ring
    queries, keys = count("query_bytes"), count("key_bytes")
    moved = count("module.moved_bytes") + attended * count("attended.moved_bytes")
    arriving = returning = 0.0
    if ring > 1:
        moved += merge_passes * (ring - 1) * queries / 2 / parts * 4 / work.element_bytes  # outputs, in fp32
    if ulysses > 1:
        moved += EXCHANGED / parts * count("exchange.moved_bytes")
        given = (1 - 1 / ulysses) / parts
        arriving = keys / parts * (ulysses - 1) if heads < ulysses else (queries / 2 + keys) * given
        returning = 0.0 if heads < ulysses else queries / 2 * given
    flops, scores = attended * count("attended.attention_flops"), attended * count("attended.scores")
    return Amounts(
        matmul_flops=count("module.matmul_flops"),
        attention_flops=count("module.attention_flops") + flops,
        attended_flops=flops,
        attended_scores=scores,
        scores=count("module.scores") + scores,
        moved_bytes=moved,
        operations=count("module.operations")
        + count("attended.operations")
        + (count("exchange.operations") if parts > 1 else 0.0),
        arriving_bytes=arriving,
        returning_bytes=returning,
        hop_bytes=keys / parts if ring > 1 else 0.0,
        gathered_bytes=count("gathered_bytes") * (parts - 1) / parts,
        exchanges=count("exchanges") if parts > 1 else 0.0,
        gathers=count("gathers") if parts > 1 else 0.0,
    )


def _value(polynomials: Mapping[str, Polynomial], name: str, work: Work) -> float:
    image, text = float(work.image_tokens), float(work.text_tokens)
    powers = (1.0, image, image * image, text, image * text, text * text)
    return sum(factor * power for factor, power in zip(polynomials.get(name, ()), powers, strict=False))


def _table(counted: Mapping[str, Any]) -> dict[str, Polynomial]:
    return {name: tuple(each) for name, each in counted.items()}


def counted_cost(model: CountedModel, work: Work, plan: ParallelPlan, calibration: Calibration) -> Cost:
    """The time of one step of this plan."""
    first = model.in_first_step
    model = first if work.kept_on == "off" else model
    parts = _pass_s(model, work, plan, calibration, patches=1)
    warmup_step_s = sum(parts if model is first else _pass_s(first, work, plan, calibration, patches=1))
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
    relayed = relayed_s(plan, calibration, 0.0)
    return Cost(
        step_s=compute + communication + launch + relayed,
        compute_s=compute,
        communication_s=communication + relayed,
        launch_s=launch,
        warmup_step_s=warmup_step_s + relayed,
    )


def _pass_s(
    model: CountedModel, work: Work, plan: ParallelPlan, calibration: Calibration, *, patches: int
) -> tuple[float, float, float]:
    """Seconds of compute, communication and launch of a patch of every call of a step through all blocks."""
    rates, software = calibration.rates, calibration.software
    amounts = amounts_of(model, work, plan, merge_passes=software.merge_passes, patches=patches)
    rows = rows_per_group(work, plan)
    compute = amounts.matmul_flops / rates.matmul_flops
    compute += rates.attention_s(amounts.attention_flops, amounts.scores) + rates.moving_s(amounts.moved_bytes)
    calls = 2 if work.guided and plan.cfg == 1 else 1  # prompt and negative read the weights one after another
    compute = rows * compute + calls * model.weight_bytes / rates.memory_bandwidth
    around = calibration.link_of(plan.parts, plan.ranks)
    communication = rows * amounts.gathered_bytes / around.bandwidth + calls * amounts.gathers * around.latency_s
    communication += _exchanges_s(model, work, plan, calibration, amounts, calls=calls)
    fetched = _weights_s(model, plan, calibration)
    if work.kept_on == "cpu" and rates.asynchronous:
        fetched += rows * _kept_bytes(model, work) / rates.host_bandwidth
    communication += max(0.0, fetched - compute - communication)
    launch = calls * amounts.operations * software.operation_s
    if rates.asynchronous:
        launch = max(0.0, launch - compute - communication)
    return compute, communication, launch


def _exchanges_s(
    model: CountedModel, work: Work, plan: ParallelPlan, calibration: Calibration, amounts: Amounts, *, calls: int
) -> float:
    """Seconds of a step for which ranks wait for heads and for hops, beside the attention that they share.

    A pipeline's stages send all heads at once, and gather what others have around the ring: nothing hides.
    """
    times = calls * amounts.exchanges
    if not times:
        return 0.0
    rates, link, around = calibration.rates, calibration.link, calibration.link_of(plan.parts, plan.ranks)
    rows = rows_per_group(work, plan) / times  # a row's amounts are of all attentions: what one of them has of these
    attend_s = rows * rates.attention_s(amounts.attended_flops, amounts.attended_scores)
    waited = 0.0
    if plan.ring > 1:
        hop_s = rows * amounts.hop_bytes / around.bandwidth + around.latency_s
        sent = (plan.ring - 1) * hop_s
        both = sent + attend_s if plan.pipefusion > 1 else ring_s(attend_s=attend_s, hop_s=hop_s, ring=plan.ring)
        waited += rates.waited_s(sent_s=sent, attend_s=attend_s, both_s=both)
    if plan.ulysses > 1:
        bandwidth = link.all_to_all_bandwidth(plan.ulysses)
        there, back = rows * amounts.arriving_bytes, rows * amounts.returning_bytes
        chunks = 1
        if plan.pipefusion == 1 and rates.asynchronous and model.heads >= plan.ulysses:
            shared = SharedHeads(
                groups=model.heads,
                ranks=plan.ulysses,
                keys=work.tokens,
                head_dim=model.head_dim(work),
                flops=rows * amounts.attended_flops,
                arriving_bytes=there,
                returning_bytes=back,
            )
            given = OverlapRates(
                attention_flops=rates.attention_flops,
                bandwidth=bandwidth,
                latency_s=link.latency_s,
                most_chunks=rates.most_chunks,
            )
            chunks = choose_chunks(shared, given)
        both = chunked_s(
            attend_s=attend_s,
            arriving_s=there / bandwidth,
            returning_s=back / bandwidth,
            latency_s=link.latency_s,
            chunks=chunks,
        )
        sent = (there + back) / bandwidth + 2 * chunks * link.latency_s
        waited += rates.waited_s(sent_s=sent, attend_s=attend_s, both_s=both)
    return times * waited


def _handed_s(model: CountedModel, work: Work, plan: ParallelPlan, calibration: Calibration, *, patches: int) -> float:
    """Seconds until the next stage has a patch of every call of a step."""
    patch = replace(work, image_tokens=math.ceil(work.image_tokens / patches))
    handed = model.count("query_bytes", patch) / 2 / max(1.0, model.count("exchanges", patch)) / plan.parts
    calls = 2 if work.guided and plan.cfg == 1 else 1
    link = calibration.link_of(plan.pipefusion * plan.parts, plan.ranks)
    return rows_per_group(work, plan) * handed / link.bandwidth + calls * link.latency_s


def _weights_s(model: CountedModel, plan: ParallelPlan, calibration: Calibration) -> float:
    """Seconds to bring all blocks' weights to the device, where it does not hold them all."""
    shards, num_bytes = plan.replica_ranks // plan.pipefusion, sum(model.block_bytes) / plan.pipefusion
    link = calibration.link_of(plan.replica_ranks, plan.ranks)
    seconds = 0.0
    if plan.weights == "offloaded":
        seconds += num_bytes / shards / calibration.rates.host_bandwidth
    if plan.weights != "replicated" and shards > 1:
        seconds += (
            num_bytes * (shards - 1) / shards / link.bandwidth
            + len(model.block_bytes) / plan.pipefusion * link.latency_s
        )
    return seconds


def kept_by_step_cache(model: CountedModel, work: Work, plan: ParallelPlan) -> float:
    """Bytes a row on one rank between calls; 0 without a step cache."""
    return model.count("residual_bytes", work, plan.parts) if work.step_cache else 0.0


def _kept_bytes(model: CountedModel, work: Work) -> float:
    """Bytes a row that the model's class keeps on each rank from call to call, wherever."""
    if not model.kept_bytes or work.kept_on == "off":
        return 0.0
    return max(0.0, _value(model.kept_bytes, work.kept_as if work.kept_as in model.kept_bytes else STORED_AS, work))


def kept_by_class(model: CountedModel, work: Work, rates: Rates) -> tuple[float, float]:
    """Bytes a row that the model's class keeps from call to call, on each rank's device and in host memory for it."""
    found = _kept_bytes(model, work)
    return (0.0, found) if work.kept_on == "cpu" and rates.asynchronous else (found, 0.0)


def where_kept(model: CountedModel, work: Work, plan: ParallelPlan, memory: Memory, *, free: int) -> Work:
    """The work with the place where its class keeps things, `memory` being what the plan needs with them on the device.

    As Qwen-Image 2.1: on the device, where what is free is more than `ROOM` times what one call keeps.
    """
    if work.kept_on != "auto" or not model.kept_bytes:
        return work
    rows = rows_per_group(work, plan)
    of_call = _kept_bytes(model, work) * (rows // 2 if work.guided and plan.cfg == 1 else rows)
    spare = free - memory.weights - memory.runtime
    return replace(work, kept_on="gpu" if spare > ROOM * of_call else "cpu")


def counted_memory(
    model: CountedModel, work: Work, plan: ParallelPlan, rates: Rates, *, num_ranks: int | None = None
) -> Memory:
    """What one rank needs, of a pool of `num_ranks` ranks: by default as many as the plan has."""
    rows, blocks, host = rows_per_group(work, plan), sum(model.block_bytes), 0.0
    weights = model.weight_bytes - blocks * (1 - 1 / plan.pipefusion)
    if plan.weights != "replicated":
        at_hand = min(blocks / plan.pipefusion, BLOCKS_AT_HAND * model.largest_block)
        kept = blocks / (plan.ranks // plan.data)
        weights = model.weight_bytes - blocks + at_hand + (kept if plan.weights == "sharded" else 0.0)
        host = kept if plan.weights == "offloaded" else 0.0
    buffers = rows * model.count("key_bytes", work) / plan.pipefusion / plan.parts if plan.pipefusion > 1 else 0.0
    exchanges = max(1.0, model.count("exchanges", work))
    an_exchange = (model.count("query_bytes", work) + 2 * model.count("key_bytes", work)) / exchanges / plan.parts
    held = max(each.count("held_bytes", work, plan.parts) for each in (model, model.in_first_step))
    on_device, on_host = kept_by_class(model, work, rates)
    held += kept_by_step_cache(model, work, plan) + on_device
    host += rows * on_host
    return Memory(
        weights=round(weights),
        activations=round(rows * held),
        buffers=round(buffers + (2 * rows * an_exchange if plan.parts > 1 else 0.0)),
        runtime=runtime_bytes(plan, rates, num_ranks or plan.ranks),
        host_bytes=round(host),
    )
