"""Ranks reuse the inputs that they are told are the same, and only those."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool import arena
from parallel_runtime.pool.pool import Pool
from parallel_runtime.worker.inputs import RepeatedInputs

# fp32 sums in another order: what the design allows any plan
FP32_TOLERANCE = 1e-5
CONFIG = sample_config(heads=4, depth=1, depth_single=1)
PLANS = (ParallelPlan(ulysses=2), ParallelPlan(cfg=2), ParallelPlan(), ParallelPlan(pipefusion=2, warmup_steps=99))
Inputs = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("repeated") / "model.safetensors"
    write_sample(path, CONFIG)
    return ModelSpec.of(path)


@pytest.fixture(scope="module")
def reference_model(spec: ModelSpec) -> ReferenceModel:
    return ReferenceModel(spec.path, dtype=torch.float32)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        yield pool


def prompts(count: int = 2, *, batch: int = 1) -> list[Inputs]:
    """Inputs that differ in the text alone."""
    found = [Workload(width=64, height=48, text_tokens=5, batch=batch, seed=n).tensors(CONFIG) for n in range(count)]
    return [found[0] | {"txt": each["txt"], "y": each["y"]} for each in found]


def worst(outs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(relative_error(out, judged) for out, judged in zip(outs, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.full), 3])
def test_fifty_swaps_of_prompts_and_plans_give_what_one_process_gives(
    two_ranks: Pool, spec: ModelSpec, reference_model: ReferenceModel, batch: int
) -> None:
    given = prompts(batch=batch)
    expected = [reference_model(tensors) for tensors in given]
    assert relative_error(expected[0], expected[1]) > 100 * FP32_TOLERANCE
    for turn in range(50):
        runner = PlanRunner(two_ranks, spec, PLANS[turn // 10 % len(PLANS)], options={})
        chosen = [(turn // 3) % 2, (turn // 2) % 2][: 1 + turn // 5 % 2]  # one call, or cond and uncond
        outs = runner.run([{name: t.clone() for name, t in given[index].items()} for index in chosen])
        assert worst(outs, [expected[index] for index in chosen]) <= FP32_TOLERANCE, turn


@pytest.mark.slow
def test_one_element_changed_in_place_is_seen(
    two_ranks: Pool, spec: ModelSpec, reference_model: ReferenceModel
) -> None:
    tensors, runner = prompts()[0], PlanRunner(two_ranks, spec, ParallelPlan(ulysses=2), options={})
    before = reference_model(tensors)
    for _ in range(4):
        assert relative_error(runner(tensors), before) <= FP32_TOLERANCE
    tensors["txt"][0, 4, 7] += 30
    after = reference_model(tensors)
    assert relative_error(after, before) > 10 * FP32_TOLERANCE
    assert relative_error(runner(tensors), after) <= FP32_TOLERANCE


@pytest.mark.slow
def test_inputs_wrongly_taken_for_the_same_would_be_noticed(
    two_ranks: Pool, spec: ModelSpec, reference_model: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the two tests above."""
    runner = PlanRunner(two_ranks, spec, ParallelPlan(ulysses=2), options={})
    given = prompts()
    for _ in range(3):
        runner(given[0])
    with monkeypatch.context() as patch:
        patch.setattr(arena, "_holds", lambda *_: True)
        out = runner(given[1])
    assert relative_error(out, reference_model(given[0])) <= FP32_TOLERANCE
    assert relative_error(out, reference_model(given[1])) > 100 * FP32_TOLERANCE
    runner(prompts(batch=2)[1])


def test_a_part_is_copied_once_and_let_go_when_it_is_repeated_no_more() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    kept = RepeatedInputs(torch.device("cpu"))
    first = kept.of_request({"0.txt": whole}, {})
    assert first.on_device(whole, whole[1:]).data_ptr() == whole[1:].data_ptr()  # nothing is kept of what is new
    copies = [kept.of_request({"0.txt": whole}, {"0.txt": 5}).on_device(whole, whole[1:]) for _ in range(2)]
    assert copies[0] is copies[1]
    assert copies[0].data_ptr() != whole[1:].data_ptr()
    request = kept.of_request({"0.txt": whole}, {"0.txt": 5})
    for part in (whole, whole[:3], whole[:, 1:], whole.T, whole[1:]):
        assert torch.equal(request.on_device(whole, part), part)
    whole += 1
    assert torch.equal(kept.of_request({"0.txt": whole}, {"0.txt": 6}).on_device(whole, whole[1:]), whole[1:])
    kept.of_request({}, {})
    whole += 1
    assert torch.equal(kept.of_request({"0.txt": whole}, {"0.txt": 6}).on_device(whole, whole[1:]), whole[1:])


def test_rows_that_were_gathered_are_never_taken_for_others_at_their_address() -> None:
    whole, room = torch.arange(24.0).reshape(4, 6), torch.empty(2, 6)
    kept = RepeatedInputs(torch.device("cpu"))
    for rows in ([0, 2], [1, 3], [3, 0]):
        torch.index_select(whole, 0, torch.tensor(rows), out=room)
        request = kept.of_request({"0.txt": whole}, {"0.txt": 5})
        assert torch.equal(request.on_device(whole, room), whole[rows])


def test_an_empty_input_beside_a_repeated_one_stays_empty() -> None:
    whole, empty = torch.ones(3, 4), torch.ones(3, 0)
    request = RepeatedInputs(torch.device("cpu")).of_request({"a": whole, "b": empty}, {"a": 1, "b": 2})
    assert request.on_device(empty, empty).shape == (3, 0)
    assert request.on_device(whole, whole[:0]).shape == (0, 4)
