"""A model as the planner knows it: what was counted of ComfyUI's class (models/hosted/count.py), as amounts of a plan.

Every count is a polynomial of the tokens of picture and text, of one row of a call. Owns reading the counts, and what
the slowest rank computes, moves and sends. Seconds are cost.py's, memory is memory.py's. Letters: `n` tokens of the
picture, `t` of the text.

A class that keeps something from call to call is counted in a call that finds it, and in the one that fills it, which
the first step makes of each side.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..exchange_formats import CODED_BYTES, DECODED_BYTES, FP8, wire_bytes
from ..parallel.overlap import FEWER
from ..parallel.shard import split_lengths
from ..plan import ParallelPlan
from .hardware import Rates
from .work import STORED_AS, Work

Polynomial = tuple[float, ...]  # of 1, n, n n, t, n t, t t
HOP_OPERATIONS = 18  # that the host starts for a hop around the ring, with what merges its part of the output
EXCHANGED = 2.0  # copies of what goes out and comes in are counted on one of two ranks


@dataclass(frozen=True, kw_only=True)
class CountedModel:
    """A model as it was counted, at activations and weights of the bytes that it was counted with.

    `numbers_per_token`: numbers of a row's latent that make a token. `key_heads`: fewest heads of keys of attention
    that ranks share, 0 where they share none. `block_bytes`: of each block that ranks with sharded weights share;
    `staged_blocks`: of how many stages may have a part, 0 where none may.
    `whole_batches`: all rows of a call are one rank's. `small_numbers`: most of its file's are of a byte or less.
    `from_real_calls`: its forward reads values, so it was computed.
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
    small_numbers: bool = False
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
                small_numbers=bool(counted.get("small_numbers", False)),
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
        """Tokens of a latent of `numbers` numbers a row."""
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
    few_queries, few_keys = count("few_keys.query_bytes"), count("few_keys.key_bytes")
    as_heads = (few_queries + few_keys) * (1 - 1 / ulysses) + few_keys * (ring - 1)
    few_are_gathered = 1 < ulysses <= heads and plan.pipefusion == 1 and FEWER * few_keys * (parts - 1) < as_heads
    if few_are_gathered:  # as `SequenceParallelAttention.sends_less_as_keys`
        queries, keys = queries - few_queries, keys - few_keys
    moved = count("module.moved_bytes") + attended * count("attended.moved_bytes")
    arriving = returning = 0.0
    outputs = queries / 2
    if work.exchange == FP8 and parts > 1:
        hops = CODED_BYTES + DECODED_BYTES * (ring - 1) if ring > 1 else 0
        heads_moved = (CODED_BYTES + DECODED_BYTES) * (queries + keys) if ulysses > 1 else 0
        moved += (hops * keys + heads_moved) / parts / work.element_bytes
        on_wire = wire_bytes(model.head_dim(work), work.element_bytes, FP8) / work.element_bytes
        queries, keys, few_keys = on_wire * queries, on_wire * keys, on_wire * few_keys
    if ring > 1:
        moved += merge_passes * (ring - 1) * outputs / parts * 4 / work.element_bytes  # outputs, in fp32
    if ulysses > 1:
        moved += EXCHANGED / parts * count("exchange.moved_bytes")
        given = (1 - 1 / ulysses) / parts
        arriving = keys / parts * (ulysses - 1) if heads < ulysses else (queries / 2 + keys) * given
        returning = 0.0 if heads < ulysses else queries / 2 * given
        arriving += few_keys / parts * (parts - 1) if few_are_gathered else 0.0
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
        + (count("exchange.operations") if parts > 1 else 0.0)
        + HOP_OPERATIONS * (ring - 1) * count("exchanges"),
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


def kept_by_step_cache(model: CountedModel, work: Work, plan: ParallelPlan) -> float:
    """Bytes a row on one rank between calls; 0 without a step cache."""
    return model.count("residual_bytes", work, plan.parts) if work.step_cache else 0.0


def kept_bytes_of(model: CountedModel, work: Work) -> float:
    """Bytes a row that the model's class keeps on each rank from call to call, wherever."""
    if not model.kept_bytes or work.kept_on == "off":
        return 0.0
    return max(0.0, _value(model.kept_bytes, work.kept_as if work.kept_as in model.kept_bytes else STORED_AS, work))


def kept_by_class(model: CountedModel, work: Work, rates: Rates) -> tuple[float, float]:
    """Bytes a row that the model's class keeps from call to call, on each rank's device and in host memory for it."""
    found = kept_bytes_of(model, work)
    return (0.0, found) if work.kept_on == "cpu" and rates.asynchronous else (found, 0.0)
