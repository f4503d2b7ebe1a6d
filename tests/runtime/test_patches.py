"""Changes of weights: each kind by its formula, in the ranks, and taken back bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.errors import PoolError
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_patch import PRISTINE, WeightPatch, WeightPatchSet, pack, unpack
from parallel_runtime.weights.branches import Branch
from parallel_runtime.weights.patches import merge, patched

QKV = "double_blocks.0.img_attn.qkv.weight"
WORKLOAD = Workload(width=128, height=96, text_tokens=9, batch=1)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def lora(key: str, rows: int, columns: int, *, seed: int = 1, **more: object) -> WeightPatch:
    up, down = noise(rows, 4, seed=seed, scale=0.3), noise(4, columns, seed=seed + 1, scale=columns**-0.5)
    values = (up, down, 2.0, None)
    return WeightPatch(**{"key": key, "kind": "lora", "strength": 0.8, "values": values, **more})


def test_a_lora_is_scaled_by_alpha_over_rank_and_strength() -> None:
    weight, patch = noise(12, 10), lora("w", 12, 10)
    up, down = patch.values[:2]
    torch.testing.assert_close(patched(weight, [patch]), weight + 0.8 * (2.0 / 4) * (up @ down))


def test_offset_swap_and_strength_of_the_model_are_followed() -> None:
    weight, patch = noise(12, 10), lora("w", 4, 10, offset=(0, 4, 4), swap=True, strength_model=0.5)
    up, down = patch.values[:2]
    change = 0.8 * 0.5 * (up @ down)
    expected = weight.clone()
    expected[4:8] = expected[4:8] * 0.5 + torch.cat((change[2:], change[:2]))
    torch.testing.assert_close(patched(weight, [patch]), expected)


def test_patches_stack_in_order_and_leave_the_pristine_weight_alone() -> None:
    weight = noise(12, 10)
    before = weight.clone()
    first, second = lora("w", 12, 10), WeightPatch(key="w", kind="diff", strength=-2.0, values=(noise(12, 10, seed=9),))
    torch.testing.assert_close(patched(weight, [first, second]), patched(patched(weight, [first]), [second]))
    assert torch.equal(weight, before)
    assert torch.equal(
        patched(weight, [WeightPatch(key="w", kind="set", strength=1, values=(before + 1,))]), before + 1
    )


def test_a_rotation_keeps_the_length_of_every_column() -> None:
    weight = noise(16, 10)
    for kind, blocks in (("oft", noise(4, 4, 4, seed=3)), ("boft", noise(2, 4, 4, 4, seed=3))):
        turned = patched(weight, [WeightPatch(key="w", kind=kind, strength=1.0, values=(blocks, None, 0.0, None))])
        assert not torch.allclose(turned, weight, atol=1e-2)
        torch.testing.assert_close(turned.norm(dim=0), weight.norm(dim=0))


def test_dora_gives_every_row_its_learnt_length() -> None:
    weight, lengths = noise(12, 10), noise(12, 1, seed=5).abs() + 1
    plain = lora("w", 12, 10, strength=1.0)
    result = patched(weight, [WeightPatch(key="w", kind="lora", strength=1.0, values=(*plain.values[:3], lengths))])
    direction = patched(weight, [plain])
    torch.testing.assert_close(result, direction * lengths / weight.norm(dim=1, keepdim=True))


def test_a_patch_that_does_not_fit_says_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"lora patch of shapes \[\[9, 4\], \[4, 10\]\] .* weight of \[12, 10\]"):
        patched(noise(12, 10), [lora("w", 9, 10)])
    with pytest.raises(ValueError, match="kind 'lorra' is unknown"):
        WeightPatch(key="w", kind="lorra", strength=1, values=())


def test_a_batch_ends_where_its_tensors_are_enough_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [WeightPatch(key=f"7/{name}", kind="beside", strength=1.0, values=(noise(8, 8),)) for name in "abcde"]
    monkeypatch.setattr("parallel_runtime.weight_patch.ENOUGH_BYTES", 2 * 8 * 8 * 4)
    assert [len(batch.records) for batch in pack(weights)] == [2, 2, 1]


def test_patches_travel_in_batches_and_arrive_as_they_were() -> None:
    patches = [lora(f"w{index % 400}", 3, 2, seed=index) for index in range(800)]
    arrived: dict[str, list[WeightPatch]] = {}
    batches = list(pack(patches))
    assert len(batches) > 1
    for batch in batches:
        assert not arrived.keys() & unpack(batch.records, batch.tensors).keys(), "a weight's patches were torn apart"
        arrived |= unpack(batch.records, batch.tensors)
    assert [len(group) for group in arrived.values()] == [2] * 400
    for index in (0, 400):
        assert torch.equal(arrived["w0"][index // 400].values[0], patches[index].values[0])
        assert arrived["w0"][index // 400].values[2:] == patches[index].values[2:]


@pytest.fixture(scope="module")
def changed(sample: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[WeightPatch], ReferenceModel]:
    """Patches of fused and plain weights, and the reference model of a file that has them merged."""
    tensors = load_file(sample.path)
    hidden = tensors["img_in.weight"].shape[0]
    patches = [
        lora(QKV, 3 * hidden, hidden),
        lora(QKV, hidden, hidden, seed=20, offset=(0, hidden, hidden), strength=-0.5),
        lora("single_blocks.0.linear1.weight", *tensors["single_blocks.0.linear1.weight"].shape, seed=30),
        WeightPatch(key="img_in.bias", kind="diff", strength=1.0, values=(noise(hidden, seed=4),)),
    ]
    for key in {patch.key for patch in patches}:
        tensors[key] = patched(tensors[key], [patch for patch in patches if patch.key == key])
    path = tmp_path_factory.mktemp("merged") / "merged.safetensors"
    save_file(tensors, path)
    return patches, ReferenceModel(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [ParallelPlan(ulysses=2), ParallelPlan(ring=3)], ids=lambda plan: plan.name)
def test_a_change_reaches_every_rank_and_is_taken_back_bit_for_bit(
    eight_ranks: Pool,
    sample: ModelSpec,
    reference_model: ReferenceModel,
    changed: tuple[list[WeightPatch], ReferenceModel],
    plan: ParallelPlan,
) -> None:
    patches, merged = changed
    tensors = WORKLOAD.tensors(FluxConfig.from_header(read_header(sample.path)))
    runner = PlanRunner(eight_ranks, sample, plan, options={})
    pristine = runner(tensors)
    runner.patches = WeightPatchSet("all", tuple(patches))
    assert relative_error(runner(tensors), merged(tensors)) <= 1e-5
    assert relative_error(reference_model(tensors), merged(tensors)) > 0.05
    runner.patches = WeightPatchSet("first", tuple(patches[:1]))
    assert relative_error(runner(tensors), merged(tensors)) > 1e-3, "what a change leaves out is taken back"
    runner.patches = PRISTINE
    assert torch.equal(runner(tensors), pristine)


@pytest.mark.slow
def test_a_change_in_another_dtype_is_rounded_once_and_taken_back(eight_ranks: Pool, sample: ModelSpec) -> None:
    half = ModelSpec.of(sample.path, "bfloat16")
    tensors = WORKLOAD.tensors(FluxConfig.from_header(read_header(sample.path)))
    runner = PlanRunner(eight_ranks, half, ParallelPlan(ulysses=2), options={})
    pristine = runner(tensors)
    hidden = 768
    runner.patches = WeightPatchSet("one", (lora(QKV, 3 * hidden, hidden),))
    assert relative_error(runner(tensors), pristine) > 1e-2
    runner.patches = PRISTINE
    assert torch.equal(runner(tensors), pristine)
    eight_ranks.unload(half)


@pytest.mark.slow
def test_a_change_that_fits_no_weight_fails_with_its_reason(sample: ModelSpec, tmp_path: Path) -> None:
    from parallel_runtime.devices import parse_devices

    with Pool(parse_devices("cpu:1").devices) as pool:
        with pytest.raises(PoolError, match=r"rank 0: .*double_blocks\.7.*this model has not"):
            pool.load(sample, patches=WeightPatchSet("wrong", (lora("double_blocks.7.img_attn.qkv.weight", 3, 2),)))
        pool.load(sample, patches=WeightPatchSet("right", (lora(QKV, 3 * 768, 768),)))


def test_merging_by_rows_equals_merging_whole_matrices() -> None:
    """Several LoRAs, some on rows only that begin inside a run and end in another; bf16 weights too."""
    weight = noise(3000, 200)
    patches = [
        lora("w", 3000, 200),
        lora("w", 1100, 200, seed=7, offset=(0, 950, 1100), strength_model=0.5),
        lora("w", 1000, 200, seed=9, offset=(0, 2000, 1000), strength=-1.5),
    ]
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        out = torch.empty(weight.shape, dtype=dtype)
        merge(weight.to(dtype), patches, out)
        whole = patched(weight.to(dtype), patches)
        assert relative_error(out.float(), whole) <= tolerance
    assert relative_error(patched(weight, patches[:1]), patched(weight, patches)) > 0.1


@pytest.mark.slow
def test_side_branches_equal_merging_and_change_strength_without_sending_a_tensor(
    eight_ranks: Pool, sample: ModelSpec, changed: tuple[list[WeightPatch], ReferenceModel]
) -> None:
    """Fused rows, offsets and a patch that can only be merged among them."""
    patches, merged = changed
    tensors = WORKLOAD.tensors(FluxConfig.from_header(read_header(sample.path)))
    runner = PlanRunner(eight_ranks, sample, ParallelPlan(ulysses=2), options={})
    runner.patches = WeightPatchSet("beside", tuple(patches), side_branch=True)
    assert relative_error(runner(tensors), merged(tensors)) <= 1e-5

    loras = tuple(patch for patch in patches if patch.kind == "lora")
    stronger = tuple(replace(patch, strength=patch.strength * 1.7) for patch in loras)
    before, after = (
        WeightPatchSet(name, each, side_branch=True) for name, each in (("before", loras), ("after", stronger))
    )
    assert after.differs_in_strength_alone(before)
    runner.patches = before
    weak = runner(tensors)
    runner.patches = after
    strong = runner(tensors)
    runner.patches = WeightPatchSet("after, merged", stronger)
    assert relative_error(strong, runner(tensors)) <= 1e-5
    assert relative_error(strong, weak) > 1e-3
    runner.patches = PRISTINE
    assert relative_error(runner(tensors), ReferenceModel(sample.path)(tensors)) <= 1e-5


def test_other_tensors_are_never_taken_for_a_change_of_strength() -> None:
    first = lora("w", 3, 2)
    same = replace(first, strength=2.0)
    copied = replace(first, values=(first.values[0].clone(), *first.values[1:]))
    moved = replace(first, offset=(0, 0, 3))
    held = WeightPatchSet("a", (first,), side_branch=True)
    for patch, alone in ((same, True), (copied, False), (moved, False)):
        assert WeightPatchSet("b", (patch,), side_branch=True).differs_in_strength_alone(held) is alone
    assert not WeightPatchSet("b", (same,)).differs_in_strength_alone(held)


def test_a_side_branch_that_does_not_fit_says_both_shapes() -> None:
    branch = Branch.of(lora("w", 9, 10), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"\[\[9, 4\], \[4, 10\]\] does not fit a weight of \[8, 10\]"):
        branch.check_fit((8, 10))
