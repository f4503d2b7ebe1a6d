"""How much memory a plan takes on one rank: weights, activations, exchange buffers, and what torch itself takes.

Owns the formulas, and where a class that keeps something from call to call has it.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ..exchange_groups import ExchangeGroup, groups_of
from ..plan import AXES, WEIGHTS, ParallelPlan
from .cost import rows_per_group
from .counted import CountedModel, amounts_of, kept_by_class, kept_by_step_cache, kept_bytes_of
from .hardware import Rates
from .work import Work

ROOM = 4  # times what a call keeps has to be free on the device, or it lies in host memory
BLOCKS_AT_HAND = 2  # the block that runs and the one fetched ahead
CUDA_CONTEXT_BYTES = 700 * 2**20
# Of NCCL, estimated and not yet measured on our own: what it takes once, a communicator besides its connections, and a
# connection to one peer. That is two channels each way of about 9 MB: buffers of 4 MiB (NCCL_BUFFSIZE) and those of its
# protocols for small messages, as /dev/shm shows them segment by segment.
NCCL_BYTES = 128 * 2**20
COMMUNICATOR_BYTES = 16 * 2**20
CONNECTION_BYTES = 4 * 9 * 2**20
# Of a device, for previews and other processes while blocks stay whole; chosen, not measured.
LEFT_PART, LEFT_BYTES = 1 / 16, 3 << 29
CPU_RUNTIME_BYTES = 350 * 2**20
# Of a CUDA graph of each block, by design and not yet measured on our own.
GRAPH_NODE_BYTES = 10 * 2**10  # the driver's, of an operation
GRAPH_BUFFERS = 4  # as large as the stream: of arguments (tokens, rotations, text) and of what blocks return


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Bytes on one rank's device, the fullest rank's.

    `host_bytes` lie in host memory instead; `shared` of the weights are this rank's part of what ranks hold together.
    `graphs` come on top where blocks run as CUDA graphs; 0 where they cannot.
    """

    weights: int
    activations: int
    buffers: int
    runtime: int
    host_bytes: int = 0
    shared: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        """All on the device, without graphs."""
        return self.weights + self.activations + self.buffers + self.runtime


def fits_by_shares(memory: PlannedMemory, plan: ParallelPlan, free: Sequence[float]) -> bool:
    """Whether each rank has room for its share, `free` bytes on each: `memory` is a rank's where all are equal. Weights
    lie as they were loaded: of what ranks hold together it has its share or an equal part, whichever is more."""
    needs = zip(bytes_by_rank(memory, plan), bytes_by_rank(memory, plan, held=plan.with_shares(())), strict=True)
    return all(max(each) <= room for each, room in zip(needs, free, strict=False))


def bytes_by_rank(memory: PlannedMemory, plan: ParallelPlan, *, held: ParallelPlan | None = None) -> tuple[float, ...]:
    """Bytes that each rank of `plan` takes of its device, where `memory` is a rank's with equal shares.

    What a rank computes with is in proportion to what it computes, of a stage to its blocks. `held`: the plan by which
    weights lie, by default `plan` itself.
    """
    layout, found = (held or plan).layout, []
    for rank in range(plan.ranks):
        part = layout.part_of(rank) * layout.stages * layout.shards  # times an equal one
        computes = plan.computed_part(rank)
        moved = memory.activations * computes + memory.buffers * (part if plan.pipefusion > 1 else computes)
        found.append(memory.weights + memory.runtime + memory.shared * (part - 1) + moved)
    return tuple(found)


def memory_of(
    model: CountedModel, work: Work, plan: ParallelPlan, rates: Rates, *, num_ranks: int | None = None
) -> PlannedMemory:
    """What one rank needs, of a pool of `num_ranks` ranks: by default as many as the plan has."""
    rows, blocks, host = rows_per_group(work, plan), sum(model.block_bytes), 0.0
    shared = blocks / plan.pipefusion if plan.pipefusion > 1 else 0.0
    weights = model.weight_bytes - blocks * (1 - 1 / plan.pipefusion)
    if plan.weights != "replicated":
        at_hand = min(blocks / plan.pipefusion, BLOCKS_AT_HAND * model.largest_block)
        kept = blocks / (plan.ranks // plan.data)
        weights = model.weight_bytes - blocks + at_hand + (kept if plan.weights == "sharded" else 0.0)
        host = kept if plan.weights == "offloaded" else 0.0
        shared = kept if plan.weights == "sharded" else 0.0
    buffers = rows * model.count("key_bytes", work) / plan.pipefusion / plan.parts if plan.pipefusion > 1 else 0.0
    held = max(each.count("held_bytes", work, plan.parts) for each in (model, model.in_first_step))
    on_device, on_host = kept_by_class(model, work, rates)
    held += kept_by_step_cache(model, work, plan) + on_device
    host += rows * on_host
    return PlannedMemory(
        weights=round(weights),
        activations=round(rows * held),
        buffers=round(buffers + rows * exchanged_bytes(model, work, plan, rates)),
        runtime=runtime_bytes(plan, rates, num_ranks or plan.ranks),
        host_bytes=round(host),
        shared=round(shared),
        graphs=graph_bytes(model, work, plan) if rates.asynchronous and plan.takes_graphs else 0,
    )


def exchanged_bytes(model: CountedModel, work: Work, plan: ParallelPlan, rates: Rates) -> float:
    """Bytes a row that the exchange of an attention holds at most, besides what was counted of it, on the fullest rank.

    `held_bytes` was counted through an all-to-all of two ranks, all heads at once (models/hosted/count.py): what is
    sent and what arrives, of queries, keys and values. The others are those of `parallel/attention.py`, as
    tests/planner/test_memory.py measures them; a pipeline's is an estimate.
    """
    if plan.parts == 1:
        return 0.0
    exchanges = max(1.0, model.count("exchanges", work))
    queries, keys = (model.count(f"{name}_bytes", work) / 2 / exchanges / plan.parts for name in ("query", "key"))
    heads, ulysses = model.heads, plan.ulysses
    counted = 2 * (queries + 2 * keys)
    if plan.pipefusion > 1:
        return 2 * counted
    if heads < ulysses:  # all ranks get all keys, which lie twice where parts are uneven
        copies = 1 if work.tokens % plan.parts == 0 else 2
        gathered, sent = 2 * copies * plan.parts * keys, 2 * (1 + copies) * keys  # as given, side by side, packed
        return max(0.0, queries + gathered + max(queries, sent) - (counted if heads > 1 else 0.0))
    most = ulysses * math.ceil(heads / ulysses) / heads  # times an equal part, where heads do not come out even
    two = ulysses > 1 and rates.asynchronous and heads >= 2 * ulysses
    larger = ulysses * math.ceil(heads / 2 / ulysses) / heads if two else 0.0  # part of the heads, of two chunks
    in_chunks = larger * queries  # the output of one with the heads of the other
    if plan.ring > 1:
        around = _around_a_ring(model, work, plan, queries, keys)
        return max(0.0, (most + max(0.0, larger - 1 / 2)) * around + in_chunks - counted)
    return (most - 1) * (queries + 2 * keys) + in_chunks


def _around_a_ring(model: CountedModel, work: Work, plan: ParallelPlan, queries: float, keys: float) -> float:
    """Bytes of a row that a ring's attention holds at most. `queries`, `keys`: of one rank, without values."""
    summed = 4 / work.element_bytes  # outputs are summed up in fp32
    sums = 4 * summed / model.head_dim(work)  # four numbers a head and token, of the softmax
    repeated = 2 if keys < queries else 0  # keys and values, with as many heads as queries
    attending = 2 + repeated  # a hop's output and the one before
    merging = 1 + summed
    lying = 1 + (plan.ring > 2)  # keys and values of this hop, and of the next but for the last
    return queries * (1 + summed + max(attending, merging) + sums) + 2 * keys * lying


def left_to_others(total: float) -> int:
    """Bytes of a device's `total` that are not for blocks which stay whole, of sharded or offloaded weights."""
    return round(max(LEFT_PART * total, LEFT_BYTES))


def staying_part(model: CountedModel, plan: ParallelPlan, memory: PlannedMemory, rates: Rates, *, free: float) -> float:
    """Which part of the blocks, by bytes, stays whole on each device after a run's first step, where a plan spreads
    weights and takes `memory` of `free` bytes (weights/whole_blocks.py)."""
    if plan.weights == WEIGHTS[0] or plan.pipefusion > 1 or model.kept_bytes or not rates.asynchronous:
        return 0.0
    more = sum(model.block_bytes) * (1.0 if plan.weights == "offloaded" else 1 - 1 / plan.replica_ranks)
    return min(1.0, max(0.0, free - left_to_others(free) - memory.total) / more) if more else 0.0


def graph_bytes(model: CountedModel, work: Work, plan: ParallelPlan) -> int:
    """What a CUDA graph of each block takes on one rank on top: buffers of arguments and results, which blocks
    have in common, the pool of memory that graphs compute in, and the nodes. Texts of two lengths, which run one
    after the other, have two sets of graphs."""
    rows, sets = rows_per_group(work, plan), 2 if work.guided and plan.cfg == 1 else 1
    stream = model.count("query_bytes", work) / 2 / max(1.0, model.count("exchanges", work)) / plan.parts
    pool = model.count("held_bytes", work, plan.parts)
    nodes = amounts_of(model, work, plan).operations
    return round(rows * (sets * GRAPH_BUFFERS * stream + pool) + sets * nodes * GRAPH_NODE_BYTES)


def where_kept(model: CountedModel, work: Work, plan: ParallelPlan, memory: PlannedMemory, *, free: int) -> Work:
    """The work with the place where its class keeps things, `memory` being what the plan needs with them on the device.

    As Qwen-Image 2.1: on the device, where what is free is more than `ROOM` times what one call keeps.
    """
    if work.kept_on != "auto" or not model.kept_bytes:
        return work
    rows = rows_per_group(work, plan)
    of_call = kept_bytes_of(model, work) * (rows // 2 if work.guided and plan.cfg == 1 else rows)
    spare = free - memory.weights - memory.runtime
    return replace(work, kept_on="gpu" if spare > ROOM * of_call else "cpu")


def runtime_bytes(plan: ParallelPlan, rates: Rates, num_ranks: int) -> int:
    """What torch, the driver and NCCL take on one rank of a pool of `num_ranks`."""
    if not rates.asynchronous:
        return CPU_RUNTIME_BYTES
    if num_ranks == 1:
        return CUDA_CONTEXT_BYTES
    return CUDA_CONTEXT_BYTES + NCCL_BYTES + bytes_of(communicators(plan, num_ranks)) + kept_groups_bytes(num_ranks)


def communicators(plan: ParallelPlan, num_ranks: int) -> tuple[int, ...]:
    """The sizes of all communicators that a rank of the plan is in, as the fullest of `num_ranks` ranks has them.

    One is over all ranks, which also serves an axis of that size.
    """
    if num_ranks == 1:
        return ()
    return (num_ranks, *max(_sizes(groups_of(plan, num_ranks), num_ranks), key=bytes_of))


def extra_bytes(groups: Iterable[ExchangeGroup], num_ranks: int) -> int:
    """What these groups take on the rank that is in most of them."""
    return max(bytes_of(sizes) for sizes in _sizes(groups, num_ranks))


@functools.cache
def kept_groups_bytes(num_ranks: int) -> int:
    """What groups of plans used before may take besides those of the plan that runs: as much as any one plan's.

    So two plans that take turns never make a group twice. The pool frees what is beyond that (`pool/worker_group.py`).
    """
    return max(extra_bytes(groups_of(plan, num_ranks), num_ranks) for plan in _plans(num_ranks))


def bytes_of(sizes: Iterable[int]) -> int:
    """What one rank needs for its communicators, each of so many (`sizes`) ranks."""
    return sum(COMMUNICATOR_BYTES + (size - 1) * CONNECTION_BYTES for size in sizes)


def _sizes(groups: Iterable[ExchangeGroup], num_ranks: int) -> list[list[int]]:
    """The sizes of the groups that each rank is in."""
    groups = list(groups)
    return [[len(group.ranks) for group in groups if rank in group.ranks] for rank in range(num_ranks)]


def _plans(num_ranks: int) -> Iterator[ParallelPlan]:
    """Every plan on so many ranks or fewer, with sharded weights where there is something to share out."""
    for degrees in product(range(1, num_ranks + 1), repeat=len(AXES)):
        if prod(degrees) <= num_ranks:
            plan = ParallelPlan.from_dict(dict(zip(AXES, degrees, strict=True)))
            sharing = plan.replica_ranks > plan.pipefusion
            yield replace(plan, weights="sharded") if sharing else plan
