"""Each rank of a pipeline holds its stage and nothing else, whole or in parts, patched or not; and what it sends."""

from dataclasses import replace

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.parallel.traffic import AttentionShape, predict_stage
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_patch import PRISTINE
from runtime.in_worker_runs import make_run
from runtime.loras import lora
from runtime.shard_sizes import named, ranges, weight_bytes

pytestmark = pytest.mark.slow

STEPS, CALLS = 3, 4
# fp32 sums in another order, four calls of the model after one another
TOLERANCE = 1e-5
CUTS = {
    2: ("double_blocks.0 double_blocks.1", "single_blocks.0 single_blocks.1"),
    3: ("double_blocks.0", "double_blocks.1", "single_blocks.0 single_blocks.1"),
    4: ("double_blocks.0", "double_blocks.1", "single_blocks.0", "single_blocks.1"),
}
EVERYWHERE = "time_in vector_in guidance_in"
# Of the first and the last block, and of what comes before them.
LORA_KEYS = ("double_blocks.0.img_attn.qkv.weight", "single_blocks.1.linear2.weight", "txt_in.weight")


def stage_weights(spec: ModelSpec, stages: int) -> list[dict[str, int]]:
    """What each stage is to hold, by weight its bytes."""
    ends = {0: "img_in txt_in", stages - 1: "final_layer"}
    weights = weight_bytes(spec.path)
    return [named(weights, cut, EVERYWHERE, ends.get(stage, "")) for stage, cut in enumerate(CUTS[stages])]


@pytest.mark.parametrize("name", ["pipefusion=2", "pipefusion=3", "pipefusion=4", "data=2,cfg=2,pipefusion=2"])
def test_each_rank_holds_its_stage_alone(eight_ranks: Pool, deep: ModelSpec, name: str) -> None:
    plan = ParallelPlan.parse(name)
    stages = [sum(weights.values()) for weights in stage_weights(deep, plan.pipefusion)]
    expected = stages * (plan.ranks // plan.pipefusion)
    eight_ranks.unload(deep, plan)  # a test before may have had these stages on more ranks
    assert eight_ranks.load(deep, plan).parameter_bytes == expected + [0] * (8 - plan.ranks)
    weights = weight_bytes(deep.path)
    shared = sum(named(weights, EVERYWHERE).values())
    assert sum(stages) == sum(weights.values()) + (plan.pipefusion - 1) * shared
    eight_ranks.unload(deep, plan)


@pytest.mark.parametrize(
    "name",
    [
        "pipefusion=2,ulysses=2,weights=sharded",
        pytest.param("pipefusion=2,cfg=2,weights=sharded", marks=pytest.mark.full),
        pytest.param("pipefusion=2,cfg=3,weights=sharded", marks=pytest.mark.full),
        pytest.param("data=2,pipefusion=2,ring=2,weights=sharded", marks=pytest.mark.full),
        "pipefusion=3,weights=offloaded",
    ],
)
def test_stages_in_parts_give_what_whole_stages_give(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig, name: str
) -> None:
    parts = ParallelPlan.parse(name)
    whole = ParallelPlan.parse(name.rpartition(",")[0])
    for sides in ((7,), (7, 12)):
        run = make_run(deep_config, batch=3, sides=sides)
        results = [eight_ranks.sample(deep, plan, run).out for plan in (whole, parts)]
        assert relative_error(*results) <= TOLERANCE, "weights in other memory may be added in another order, no more"
    shards = parts.cfg * parts.parts  # the ranks of a stage in all batch groups of a replica
    held = [sum(ranges(weights, shards).values()) for weights in stage_weights(deep, parts.pipefusion)]
    by_rank = [held[rank // parts.parts % parts.pipefusion] for rank in range(parts.ranks)]
    assert eight_ranks.load(deep, parts).parameter_bytes[: parts.ranks] == by_rank
    eight_ranks.unload(deep, parts)
    eight_ranks.unload(deep, whole)


@pytest.mark.parametrize("weights", [pytest.param("replicated", marks=pytest.mark.full), "sharded"])
def test_loras_reach_the_stages_that_have_their_weights(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig, weights: str
) -> None:
    run = make_run(deep_config)
    plan = ParallelPlan(pipefusion=2, ulysses=2, warmup_steps=STEPS, weights=weights)
    outs = []
    for patches in (
        PRISTINE,
        lora(deep, *LORA_KEYS, side_branch=False),
        lora(deep, *LORA_KEYS, side_branch=True),
        PRISTINE,
    ):
        expected = eight_ranks.sample(deep, ParallelPlan(), run, patches=patches).out
        outs.append(eight_ranks.sample(deep, plan, run, patches=patches).out)
        assert relative_error(outs[-1], expected) <= TOLERANCE
    assert relative_error(outs[1], outs[0]) > 0.01, "the LoRAs change nothing"
    assert torch.equal(outs[0], outs[3])


# by plan, blocks of each stage: 2; tokens of each part in each patch: 72 of the image and 7 of the text, which go with
# patch 0; of those, each part's of the latent
@pytest.mark.parametrize(
    ("name", "patches", "latents"),
    [
        ("pipefusion=2", [(40,), (39,)], [(33,), (39,)]),
        ("pipefusion=2,patches=3", [(27,), (26,), (26,)], [(20,), (26,), (26,)]),
        ("pipefusion=2,ulysses=2", [(20, 20), (19, 20)], [(16, 17), (19, 20)]),
        ("pipefusion=2,ring=2", [(20, 20), (19, 20)], [(16, 17), (19, 20)]),
        ("pipefusion=2,ring=2,ulysses=2", [(10, 10, 10, 10), (9, 10, 10, 10)], [(8, 8, 8, 9), (9, 10, 10, 10)]),
    ],
)
def test_stages_send_what_the_formula_says(
    eight_ranks: Pool,
    deep: ModelSpec,
    deep_config: FluxConfig,
    name: str,
    patches: list[tuple[int, ...]],
    latents: list[tuple[int, ...]],
) -> None:
    plan = ParallelPlan.parse(name)
    ranks = eight_ranks.sample(deep, plan, make_run(deep_config)).ran
    shape = AttentionShape(
        blocks=2, heads=deep_config.num_heads, head_dim=deep_config.head_dim, element_bytes=4, batch=1
    )

    def of_run(by_patch: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The first call goes through whole."""
        return [tuple(map(sum, zip(*by_patch, strict=True))), *(by_patch * (CALLS - 1))]

    expected = [
        predict_stage(
            shape,
            of_run(patches),
            part=part,
            ring=plan.ring,
            ulysses=plan.ulysses,
            latents=[4 * rows[part] * deep_config.out_channels for rows in of_run(latents)] if stage else None,
        )
        for stage in range(2)
        for part in range(plan.parts)
    ]
    assert [(rank.collectives, rank.sent_bytes) for rank in ranks] == expected


def test_a_timeline_has_every_patch_of_every_stage_in_the_order_of_the_pipeline(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig
) -> None:
    run = replace(make_run(deep_config, sides=(7, 7)), timeline=True)
    plan = ParallelPlan(pipefusion=2, patches=3)
    ranks = eight_ranks.sample(deep, plan, run).ran
    chunks = [(0, 0, 3), *((call, patch, patch + 1) for call in range(1, CALLS) for patch in range(3))]
    by_stage = []
    for stage, rank in enumerate(ranks):
        assert (rank.timeline.stage, rank.timeline.left_out) == (stage, 0)
        spans = rank.timeline.spans
        assert [tuple(span[:4]) for span in spans] == [(*chunk, cond) for chunk in chunks for cond in range(2)]
        moments = [moment for span in spans for moment in span[4:]]
        assert moments == sorted(moments)
        by_stage.append(spans)
    assert all(there[5] > here[5] for here, there in zip(*by_stage, strict=True)), "a stage was ahead of the one before"
    assert eight_ranks.sample(deep, plan, make_run(deep_config)).ran[0].timeline is None
