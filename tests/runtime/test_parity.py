"""Every plan equals one process of the unmodified diffusers model, at any size; without the exchange, none does."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from host.tiny_models import TinyModels
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload, relative_error, worst
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.parallel.shard import SequenceShard
from parallel_runtime.parallel.traffic import AttentionShape, predict
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from runtime.zero_timestep_model import ZeroTimestepModel

# what the design allows any plan: in fp32 sums in another order, in bf16 a tenth more than one process loses
FP32_TOLERANCE = 1e-5
HALF_ALLOWANCE = 1.1

PLANS = [
    ParallelPlan(ring=ring, ulysses=ulysses)
    for ring in range(1, 9)
    for ulysses in (1, 2, 3, 4, 6, 8)
    if ring * ulysses <= 8
]
# By workload its tensors, and what one process makes of them.
Judged = Callable[[Workload], tuple[dict[str, torch.Tensor], torch.Tensor]]
# width, height, text tokens, batch: square, odd, fewer tokens than ranks, one row
WORKLOADS = [
    Workload(width=256, height=256, text_tokens=77, batch=1),
    Workload(width=232, height=136, text_tokens=5, batch=3),
    Workload(width=32, height=16, text_tokens=1, batch=2),
    Workload(width=16, height=16, text_tokens=1, batch=1),
]


def named(workload: Workload) -> str:
    return f"{workload.image_tokens}+{workload.text_tokens}x{workload.batch}"


# The first is square and large enough for every rank; the quick tier runs it alone.
BY_NAME = [
    pytest.param(workload, id=named(workload), marks=[pytest.mark.slow] if index else [])
    for index, workload in enumerate(WORKLOADS)
]


def run(pool: Pool, spec: ModelSpec, plan: ParallelPlan, workload: Workload, **options: object) -> PlanRunner:
    return PlanRunner(pool, spec, plan, options=options)


@pytest.fixture(scope="module")
def judged(sample: ModelSpec, reference_model: ReferenceModel) -> Judged:
    """Each workload's tensors and the reference model's result, computed once."""
    config = FluxConfig.from_header(read_header(sample.path))

    @cache
    def of(workload: Workload) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors = workload.tensors(config)
        return tensors, reference_model(tensors)

    return of


def worst_rank(result: torch.Tensor, expected: torch.Tensor, *, plan: ParallelPlan, workload: Workload) -> float:
    """The largest error over the rows of one rank: those of a wrong one must not hide among right ones."""
    rows = [SequenceShard(workload.text_tokens, result.shape[1], plan.ranks, rank).image for rank in range(plan.ranks)]
    return worst([relative_error(result[:, own], expected[:, own]) for own in rows])


@pytest.mark.parametrize("workload", BY_NAME)
def test_every_plan_equals_one_process(
    eight_ranks: Pool, sample: ModelSpec, judged: Judged, workload: Workload
) -> None:
    """And sends what the formula says."""
    config = FluxConfig.from_header(read_header(sample.path))
    tensors, expected = judged(workload)
    shape = AttentionShape(
        blocks=config.depth + config.depth_single,
        heads=config.num_heads,
        head_dim=config.head_dim,
        element_bytes=4,
        batch=workload.batch,
    )
    errors = {}
    for plan in PLANS:
        runner = run(eight_ranks, sample, plan, workload)
        errors[plan.name] = worst_rank(runner(tensors), expected, plan=plan, workload=workload)
        lengths = SequenceShard(workload.text_tokens, workload.image_tokens, plan.ranks, 0).lengths
        predicted = predict(shape, lengths=lengths, ring=plan.ring, ulysses=plan.ulysses)
        assert [(rank.collectives, rank.sent_bytes) for rank in runner.ranks] == predicted, plan.name
    bad = {name: error for name, error in errors.items() if not error <= FP32_TOLERANCE}
    assert not bad, f"worst of all {max(errors.values()):.1e}"


CONTROLS = [
    pytest.param(plan, id=plan.name, marks=[pytest.mark.slow] if plan.ranks > 2 else [])
    for plan in PLANS
    if plan.ranks > 1
]


@pytest.mark.parametrize("plan", CONTROLS)
def test_without_the_exchange_every_plan_is_wrong(
    eight_ranks: Pool, sample: ModelSpec, judged: Judged, plan: ParallelPlan
) -> None:
    workload = WORKLOADS[0]
    tensors, expected = judged(workload)
    result = run(eight_ranks, sample, plan, workload, local_attention=True)(tensors)
    assert relative_error(result, expected) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(workload, id=named(workload), marks=[pytest.mark.full] if index % 2 else [])
        for index, workload in enumerate(WORKLOADS)
    ],
)
def test_heads_exchanged_and_hops_equal_one_process_however_few_the_tokens(
    eight_ranks: Pool, sample: ModelSpec, judged: Judged, workload: Workload
) -> None:
    """By themselves ranks gather few tokens, so parts of no token at all would be neither exchanged nor hop."""
    tensors, expected = judged(workload)
    for plan in [plan for plan in PLANS if plan.ranks > 1]:
        runner = run(eight_ranks, sample, plan, workload, ungathered=True)
        assert relative_error(runner(tensors), expected) <= FP32_TOLERANCE, plan.name
        blocks = 2  # the sample's
        assert runner.ranks[0].collectives == blocks * (plan.ring - 1 + 2 * (plan.ulysses > 1)), plan.name


@pytest.mark.slow
def test_an_attention_mask_is_followed_by_every_plan(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel
) -> None:
    """Values to add, True and False, and whole parts of the ring that a query may not see."""
    workload = WORKLOADS[1]
    tensors = workload.tensors(FluxConfig.from_header(read_header(sample.path)))
    tokens = workload.text_tokens + workload.image_tokens
    added = torch.randn(workload.batch, tokens, tokens, generator=torch.Generator().manual_seed(3))
    seen = torch.rand(1, tokens, tokens, generator=torch.Generator().manual_seed(4)) > 0.5
    seen[:, :, : tokens // 2] = False
    seen[:, :, -1] = True
    plain = reference_model(tensors)
    for mask in (added, seen, torch.zeros(1, tokens, tokens).masked_fill(~seen, -torch.inf)):
        expected = reference_model({**tensors, "mask": mask})
        assert relative_error(plain, expected) > 0.01
        for plan in (ParallelPlan(), ParallelPlan(ulysses=2), ParallelPlan(ring=3), ParallelPlan(ring=2, ulysses=4)):
            result = run(eight_ranks, sample, plan, workload)({**tensors, "mask": mask})
            assert relative_error(result, expected) <= FP32_TOLERANCE


@pytest.mark.slow
def test_rows_at_timestep_zero_are_modulated_so_on_every_plan(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel
) -> None:
    workload = WORKLOADS[0]
    tensors = workload.tensors(FluxConfig.from_header(read_header(sample.path)))
    zero_timestep = torch.zeros(workload.image_tokens, dtype=torch.uint8)
    zero_timestep[100:] = 1
    expected = ZeroTimestepModel(sample.path)({**tensors, "zero_timestep_rows": zero_timestep})
    assert relative_error(reference_model(tensors), expected) > 0.01
    for plan in (ParallelPlan(), ParallelPlan(ulysses=3), ParallelPlan(ring=2), ParallelPlan(ring=2, ulysses=4)):
        result = run(eight_ranks, sample, plan, workload)({**tensors, "zero_timestep_rows": zero_timestep})
        assert relative_error(result, expected) <= FP32_TOLERANCE


@pytest.mark.slow
def test_each_block_takes_its_own_residual_on_every_plan(eight_ranks: Pool, deep: ModelSpec) -> None:
    """Against diffusers, which adds one residual a block when there are as many as blocks; two blocks of each kind."""
    workload = WORKLOADS[1]
    config = FluxConfig.from_header(read_header(deep.path))
    tensors, reference = workload.tensors(config), ReferenceModel(deep.path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    shape = (workload.batch, workload.image_tokens, config.hidden_size)
    double, single = ([torch.randn(shape, generator=generator) for _ in range(2)] for _ in range(2))
    residuals = {f"control_in.{n}": each for n, each in enumerate(double)}
    residuals |= {f"control_out.{n}": each for n, each in enumerate(single)}
    expected = reference.with_residuals(tensors, double, single)
    for wrong in ((double[::-1], single), (double, single[::-1])):
        assert relative_error(reference.with_residuals(tensors, *wrong), expected) > 0.05
    for plan in (ParallelPlan(ulysses=2), ParallelPlan(ring=3), ParallelPlan(ring=2, ulysses=4)):
        runner = run(eight_ranks, deep, plan, workload, control_in=[0, 1], control_out=[0, 1])
        assert relative_error(runner({**tensors, **residuals}), expected) <= FP32_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("naming", ["dev", "dev_saved", "checkpoint", "schnell", "fill"])
def test_every_naming_and_variant_of_a_file_equals_one_process(
    eight_ranks: Pool, tiny_models: TinyModels, naming: str
) -> None:
    """Original names, ComfyUI's, an all-in-one checkpoint's; without guidance; with inpaint channels; heads of 128."""
    folder = tiny_models.models / ("checkpoints" if naming == "checkpoint" else "diffusion_models")
    spec = ModelSpec.of(folder / getattr(tiny_models, naming))
    tensors = Workload(width=200, height=136, text_tokens=19, batch=2).tensors(
        FluxConfig.from_header(read_header(spec.path))
    )
    expected = ReferenceModel(spec.path)(tensors)
    for plan in (ParallelPlan(ulysses=4), ParallelPlan(ring=3)):
        assert relative_error(PlanRunner(eight_ranks, spec, plan, options={})(tensors), expected) <= FP32_TOLERANCE
    eight_ranks.unload(spec)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(Workload(width=1024, height=1024, text_tokens=512), id="1024x1024", marks=pytest.mark.full),
        pytest.param(Workload(width=1000, height=744, text_tokens=77, batch=2), id="1000x744"),
    ],
)
def test_two_ranks_equal_one_process_at_the_size_of_a_real_image(
    eight_ranks: Pool, tiny_models: TinyModels, workload: Workload
) -> None:
    spec = ModelSpec.of(tiny_models.diffusion_model(tiny_models.dev))
    tensors = workload.tensors(FluxConfig.from_header(read_header(spec.path)))
    expected = ReferenceModel(spec.path)(tensors)
    result = PlanRunner(eight_ranks, spec, ParallelPlan(ulysses=2), options={})(tensors)
    assert relative_error(result, expected) <= FP32_TOLERANCE
    control = PlanRunner(eight_ranks, spec, ParallelPlan(ulysses=2), options={"local_attention": True})(tensors)
    assert relative_error(control, expected) > 0.05
