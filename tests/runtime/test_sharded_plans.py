"""Plans with sharded and offloaded weights give what they give with all weights on every rank."""

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_patch import PRISTINE
from runtime.loras import lora
from runtime.shard_sizes import ranges, sent, weight_bytes

pytestmark = pytest.mark.slow

# The same weights in other memory: some kernels add in another order by where a matrix begins.
ELSEWHERE = 1e-6
LORA_KEY = "double_blocks.0.img_attn.qkv.weight"
# data, cfg, ring, ulysses: each axis alone, pairs, all, three ranks, batch groups that idle; and how often each replica
# goes through the blocks for the calls below: as often as its batch group with the most pieces has
SHAPES = {
    (1, 1, 1, 2): [2],
    (1, 1, 3, 1): [2],
    (1, 2, 1, 1): [2],
    (1, 3, 1, 1): [1],
    (2, 2, 1, 1): [1, 1],
    (2, 1, 1, 2): [1, 2],
    (1, 2, 2, 2): [2],
    (2, 2, 2, 1): [1, 1],
}
# Every other shape with one kind of weights, in turn; the rest in the full tier. Alone, a rank gathers nothing.
PLANS = [
    pytest.param(plan, passes, id=plan.name, marks=[] if number % 4 == 2 * second else [pytest.mark.full])
    for number, ((data, cfg, ring, ulysses), passes) in enumerate(SHAPES.items())
    for second, weights in enumerate(("sharded", "offloaded"))
    for plan in [ParallelPlan(data=data, cfg=cfg, ring=ring, ulysses=ulysses, weights=weights)]
] + [
    pytest.param(ParallelPlan(data=data, weights="offloaded"), [0] * data, id=f"data {data}, offloaded")
    for data in (1, 2)
]


def calls_of(spec: ModelSpec) -> list[ModelCall]:
    """Two calls of unequal lengths, three rows: some batch groups have more pieces than others, some have none."""
    config = FluxConfig.from_header(read_header(spec.path))
    inputs = [
        Workload(width=64, height=48, text_tokens=tokens, batch=batch, seed=tokens).tensors(config)
        for tokens, batch in ((13, 2), (5, 1))
    ]
    return [
        ModelCall(
            tensors=tensors,
            out_shape=(*tensors["img"].shape[:2], config.out_channels),
            out_dtype=torch.float32,
        )
        for tensors in inputs
    ]


@pytest.mark.parametrize(("plan", "passes"), PLANS)
def test_a_plan_gives_the_same_with_parts_of_the_weights_as_with_all(
    eight_ranks: Pool, sample: ModelSpec, plan: ParallelPlan, passes: list[int]
) -> None:
    """And each rank holds its range of every unit, and sends it as often as its replica goes through them."""
    calls = calls_of(sample)
    whole = ParallelPlan(data=plan.data, cfg=plan.cfg, ring=plan.ring, ulysses=plan.ulysses)
    outs = []
    for patches in (
        PRISTINE,
        lora(sample, LORA_KEY, side_branch=False),
        lora(sample, LORA_KEY, side_branch=True),
        PRISTINE,
    ):
        expected = eight_ranks.run(sample, whole, calls, patches=patches)
        result = eight_ranks.run(sample, plan, calls, patches=patches)
        pairs = zip(result.outs, expected.outs, strict=True)
        assert max(relative_error(ours, all_of) for ours, all_of in pairs) <= ELSEWHERE
        outs.append(result.outs[0])
    assert (outs[1] - outs[0]).abs().max() > 0.01, "the LoRA changes nothing"
    assert torch.equal(outs[0], outs[3])

    units = ranges(weight_bytes(sample.path), plan.replica_ranks)
    assert eight_ranks.load(sample, plan).parameter_bytes[: plan.ranks] == [sum(units.values())] * plan.ranks
    assert len(result.ran) == plan.ranks
    for rank, ran in enumerate(result.ran):
        gathered = sent(units, plan.replica_ranks, passes=passes[rank // plan.replica_ranks])
        assert (ran.weight_collectives, ran.weight_bytes) == gathered, f"rank {rank}"
    eight_ranks.unload(sample, plan)
