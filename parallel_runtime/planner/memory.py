"""How much memory a plan takes on one rank: weights, activations, exchange buffers, and what torch itself takes.

Owns the formulas. Letters: `s` tokens of this rank, `d` hidden width, `m` width of the MLP, `e` bytes an element.
"""

from dataclasses import dataclass

from ..plan import ParallelPlan
from .cost import rows_per_lane
from .hardware import Rates
from .shapes import ModelShape, Work

BLOCKS_AT_HAND = 2  # the block that runs and the one fetched ahead
CUDA_CONTEXT_BYTES = 700 * 2**20
# Of NCCL, estimated and not yet measured on our own: what it takes once, a communicator besides its connections, and a
# connection to one peer. That is two channels each way of about 9 MB: buffers of 4 MiB (NCCL_BUFFSIZE) and those of its
# protocols for small messages, as /dev/shm shows them segment by segment.
NCCL_BYTES = 128 * 2**20
COMMUNICATOR_BYTES = 16 * 2**20
CONNECTION_BYTES = 4 * 9 * 2**20
CPU_RUNTIME_BYTES = 350 * 2**20


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank's device, the fullest rank's. `host_bytes` lie in host memory instead."""

    weights: int
    activations: int
    buffers: int
    runtime: int
    host_bytes: int = 0

    @property
    def total(self) -> int:
        """All on the device."""
        return self.weights + self.activations + self.buffers + self.runtime


def memory_of(shape: ModelShape, work: Work, plan: ParallelPlan, rates: Rates) -> Memory:
    """What one rank needs."""
    rows = rows_per_lane(work, plan)
    mine = rows * max(work.lengths(plan.parts)) * shape.hidden * work.element_bytes
    weights, host = _weights(shape, work, plan)
    # The widest moment is a single block: residual, normed input, q, k, v, output, and the MLP before and after its
    # activation and beside the attention it is joined with: 6 d + 3 m a token.
    activations = mine * (6 + 3 * shape.mlp_hidden / shape.hidden)
    return Memory(
        weights=round(weights),
        activations=round(activations),
        buffers=round(_buffers(shape, work, plan, rows, mine)),
        runtime=_runtime(plan, rates),
        host_bytes=round(host),
    )


def _weights(shape: ModelShape, work: Work, plan: ParallelPlan) -> tuple[float, float]:
    """(bytes on the device, bytes in host memory)."""
    blocks = shape.block_params * work.weight_bytes / plan.pipefusion
    other = shape.other_params * work.weight_bytes
    if plan.weights == "replicated":
        return blocks + other, 0.0
    shards = plan.ranks // plan.data // plan.pipefusion
    at_hand = min(blocks, BLOCKS_AT_HAND * shape.largest_block_params * work.weight_bytes)
    if plan.weights == "offloaded":
        return at_hand + other, blocks / shards
    return blocks / shards + at_hand + other, 0.0


def _buffers(shape: ModelShape, work: Work, plan: ParallelPlan, rows: int, mine: float) -> float:
    total = 0.0
    if plan.ulysses > 1:
        total += 8 * mine  # q, k, v sent and received, the output sent back and received
    if plan.ring > 1:
        # Tokens of the ulysses group, a share of the heads each: as much as one rank's tokens with all heads.
        total += 4 * mine + 2 * mine * 4 / work.element_bytes  # two pairs of k, v; two outputs in fp32
    if plan.pipefusion > 1:
        whole = rows * work.image_tokens * shape.hidden * work.element_bytes / plan.ulysses
        total += 2 * whole * shape.blocks / plan.pipefusion  # k and v of the step before, for its own blocks
    return total


def _runtime(plan: ParallelPlan, rates: Rates) -> int:
    if not rates.asynchronous:
        return CPU_RUNTIME_BYTES
    sizes = communicators(plan)
    each = sum(COMMUNICATOR_BYTES + (size - 1) * CONNECTION_BYTES for size in sizes)
    return CUDA_CONTEXT_BYTES + (NCCL_BYTES + each if sizes else 0)


def communicators(plan: ParallelPlan) -> tuple[int, ...]:
    """The ranks of each communicator that a rank of the plan is in, as `rank/mesh.py` makes them.

    One is over all ranks, which also serves an axis of that size. Weights travel in one of their own, and a stage has a
    link from the stage before and one to the stage after.
    """
    if plan.ranks == 1:
        return ()
    axes = [plan.cfg, plan.ring, plan.ulysses]
    if plan.pipefusion == 1 and min(plan.ring, plan.ulysses) > 1:
        axes.append(plan.parts)  # all that share a sequence
    sizes = [plan.ranks, *(size for size in axes if 1 < size < plan.ranks)]
    sizes += [2, 2] if plan.pipefusion > 1 else []
    return (*sizes, plan.layout.shards) if plan.layout.shards > 1 else tuple(sizes)
