"""Compiled blocks give what the same plan gives without, and their graphs outlive every change but that of a batch.

One set of two ranks for all of it, since making the graphs takes seconds. A fixture makes those that all tests share,
and each test counts from what is there when it begins, so they run in any order.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.__main__ import main
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.compiling import FOLDER, cache_folder, why_not
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_patch import PRISTINE, WeightPatchSet
from parallel_runtime.wire.replies import RankStep
from runtime.in_worker_runs import make_run
from runtime.loras import lora

# fp32 sums in another order; measured at most 5e-7, on 57 blocks as on four
TOLERANCE = 2e-6
GRAPHS = 4  # two halves of two kinds of blocks
FIRST = Workload(width=256, height=192, text_tokens=77)
OTHERS = (
    ("ulysses=1", Workload(width=232, height=136, text_tokens=9)),
    ("ring=2", Workload(width=640, height=512, text_tokens=300)),
    ("ulysses=2", Workload(width=64, height=32, text_tokens=4)),
    ("ulysses=2", Workload(width=64, height=64, text_tokens=16)),  # as many rows of image as of text, and so on
    ("ulysses=2,weights=sharded", Workload(width=256, height=192, text_tokens=77)),
    ("ulysses=1,weights=offloaded", Workload(width=128, height=112, text_tokens=12)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Two blocks of each kind, so that a graph serves more than the block it was made for."""
    path = tmp_path_factory.mktemp("compiled") / "model.safetensors"
    write_sample(path, sample_config(heads=4, depth=2, depth_single=2))
    return ModelSpec.of(path)


@pytest.fixture(scope="module")
def config(model: ModelSpec) -> FluxConfig:
    """The model's sizes."""
    return FluxConfig.from_header(read_header(model.path))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache folder, of which these ranks see no other."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def pool(cache: Path) -> Iterator[Pool]:
    """Two ranks whose deadline is far below what a graph takes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(cache))
        patched.delenv(FOLDER, raising=False)
        with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
            pool.start()
            yield pool


@dataclass(frozen=True)
class FirstStep:
    """What was seen of the step that made the graphs, and of another one after it."""

    eager_ranks: list[RankStep]
    states: list[str]
    error: float
    ranks: list[RankStep]
    later_ranks: list[RankStep]


@pytest.fixture(scope="module")
def first_step(pool: Pool, model: ModelSpec, config: FluxConfig) -> FirstStep:
    """The first compiled step of these ranks."""
    states: list[str] = []
    runner = PlanRunner(pool, model, ParallelPlan(ulysses=2), options={"compiled": True, "timed": True})
    eager = PlanRunner(pool, model, ParallelPlan(ulysses=2), options={"timed": True})
    tensors = FIRST.tensors(config)
    expected = eager(tensors)
    call = ModelCall(tensors=tensors, out_shape=tuple(expected.shape), out_dtype=torch.float32, options=runner.options)
    step = pool.run(model, runner.plan, [call], check_cancelled=lambda: states.append(pool.state))
    runner(tensors)
    return FirstStep(eager.ranks, states, relative_error(step.outs[0], expected), step.ran, runner.ranks)


@pytest.fixture
def made(pool: Pool, model: ModelSpec, config: FluxConfig, first_step: FirstStep) -> list[int]:
    """How many graphs each rank has made before this test; those of whole steps of one image are among them."""
    runner = PlanRunner(pool, model, ParallelPlan(ulysses=2), options={"compiled": True})
    runner(FIRST.tensors(config))
    assert all(rank.compiled.compile_s == 0 for rank in runner.ranks)
    return [rank.compiled.graphs for rank in runner.ranks]


def check_graphs(ranks: list[RankStep], made: list[int], *, uncompiled: int = 0) -> None:
    """These ranks made no other graph, and ran so many blocks without one."""
    counts = [(rank.compiled.graphs, rank.compiled.uncompiled_blocks) for rank in ranks]
    assert counts == [(graphs, uncompiled) for graphs in made[: len(ranks)]]


def both(
    pool: Pool, model: ModelSpec, plan: str, tensors: dict, *, patches: WeightPatchSet = PRISTINE, **options: object
) -> tuple[torch.Tensor, torch.Tensor, list[RankStep]]:
    """The result without and with compiled blocks, and what the ranks say of the latter."""
    results = []
    for compiled in (False, True):
        runner = PlanRunner(pool, model, ParallelPlan.parse(plan), options={**options, "compiled": compiled})
        runner.patches = patches
        results.append(runner(tensors))
    return results[0], results[1], runner.ranks


@pytest.mark.full
def test_the_first_step_makes_the_graphs_says_so_and_is_right(first_step: FirstStep) -> None:
    assert all(rank.compiled is None and "compile_s" not in rank.regions for rank in first_step.eager_ranks)
    assert "compiling" in first_step.states
    assert first_step.error <= TOLERANCE
    assert len(first_step.ranks) == 2
    for rank in first_step.ranks:
        assert (rank.compiled.graphs, rank.compiled.uncompiled_blocks) == (GRAPHS, 0)
        compile_s, regions = rank.compiled.compile_s, rank.regions
        assert 0 < regions["compile_s"] == pytest.approx(compile_s)
        assert compile_s < regions["double_blocks_s"] + regions["single_blocks_s"]
    later = first_step.later_ranks
    assert all(rank.compiled.compile_s == 0 and "compile_s" not in rank.regions for rank in later)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "workload"),
    [pytest.param(plan, workload, id=f"{plan} {workload.width}", marks=pytest.mark.full) for plan, workload in OTHERS],
)
def test_another_plan_size_or_length_of_text_needs_no_other_graph(
    pool: Pool, model: ModelSpec, config: FluxConfig, made: list[int], plan: str, workload: Workload
) -> None:
    expected, result, ranks = both(pool, model, plan, workload.tensors(config))
    assert relative_error(result, expected) <= TOLERANCE
    assert not torch.equal(result, expected), "both ran without graphs"
    check_graphs(ranks, made)


@pytest.mark.full
def test_without_the_exchange_compiled_blocks_are_wrong_too(pool: Pool, model: ModelSpec, config: FluxConfig) -> None:
    expected, _, _ = both(pool, model, "ulysses=2", FIRST.tensors(config))
    _, wrong, _ = both(pool, model, "ulysses=2", FIRST.tensors(config), local_attention=True)
    assert relative_error(wrong, expected) > 0.05


@pytest.mark.full
def test_a_merged_lora_needs_no_other_graph_and_one_beside_the_weights_runs_its_block_uncompiled(
    pool: Pool, model: ModelSpec, config: FluxConfig, made: list[int]
) -> None:
    tensors = FIRST.tensors(config)
    plain, _, _ = both(pool, model, "ulysses=2", tensors)
    for side_branch, uncompiled in ((False, 0), (True, 1)):
        patches = lora(model, "single_blocks.0.linear1.weight", side_branch=side_branch)
        expected, result, ranks = both(pool, model, "ulysses=2", tensors, patches=patches)
        assert relative_error(expected, plain) > 1e-3
        assert relative_error(result, expected) <= TOLERANCE
        check_graphs(ranks, made, uncompiled=uncompiled)


@pytest.mark.full
def test_scaled_fp8_weights_need_no_other_graph(
    pool: Pool, model: ModelSpec, config: FluxConfig, made: list[int], tmp_path: Path
) -> None:
    weights = load_file(model.path)
    for name, tensor in weights.items():
        if "_blocks." in name and tensor.ndim == 2:
            weights[name] = tensor.to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "fp8.safetensors")
    spec = ModelSpec.of(tmp_path / "fp8.safetensors", "float32")
    expected, result, ranks = both(pool, spec, "ring=2", FIRST.tensors(config))
    assert relative_error(result, expected) <= TOLERANCE
    check_graphs(ranks, made)


@pytest.mark.full
def test_a_run_of_one_token_runs_uncompiled(pool: Pool, model: ModelSpec, config: FluxConfig, made: list[int]) -> None:
    expected, result, ranks = both(
        pool, model, "ulysses=2", Workload(width=64, height=64, text_tokens=2).tensors(config)
    )
    assert relative_error(result, expected) <= TOLERANCE
    check_graphs(ranks, made, uncompiled=config.depth)


@pytest.mark.full
def test_a_run_inside_the_workers_uses_the_same_graphs(
    pool: Pool, model: ModelSpec, config: FluxConfig, made: list[int]
) -> None:
    run = make_run(config, sides=(7, 12))
    compiled = tuple(replace(cond, options={**cond.options, "compiled": True}) for cond in run.conds)
    for plan in (ParallelPlan(ulysses=2), ParallelPlan(cfg=2)):
        expected = pool.sample(model, plan, run)
        result = pool.sample(model, plan, replace(run, conds=compiled))
        assert relative_error(result.out, expected.out) <= 4 * TOLERANCE  # four calls after one another
        assert [rank.compiled.graphs for rank in result.ran] == made
        assert expected.ran[0].compiled is None


@pytest.mark.full
def test_stages_make_graphs_of_patches_without_text_once(
    pool: Pool, model: ModelSpec, config: FluxConfig, made: list[int]
) -> None:
    """The first of two stages has all double blocks here, and text goes with the first patch alone."""
    graphs = []
    for width in (256, 320):
        runs = []
        for compiled in (False, True):
            plan = ParallelPlan.parse("pipefusion=2,patches=3")
            runner = PlanRunner(pool, model, plan, options={"compiled": compiled})
            runner.sampling_run = f"{compiled} {width}"
            tensors = Workload(width=width, height=192, text_tokens=33).tensors(config)
            runs.append([runner(tensors) for _ in range(3)])
        assert all(relative_error(*pair) <= TOLERANCE for pair in zip(runs[1], runs[0], strict=True))
        graphs.append([rank.compiled.graphs for rank in runner.ranks])
    assert graphs == [[made[0] + 2, made[1]]] * 2


@pytest.mark.full
def test_several_images_have_graphs_of_their_own_for_any_number(
    pool: Pool, model: ModelSpec, config: FluxConfig, made: list[int]
) -> None:
    """Double blocks run uncompiled, with LoRAs beside them: making graphs for them too would take as long again."""
    beside = lora(model, *(f"double_blocks.{i}.img_mlp.0.weight" for i in range(config.depth)), side_branch=True)
    graphs = []
    for batch in (2, 3):
        tensors = Workload(width=128, height=96, text_tokens=9, batch=batch).tensors(config)
        expected, result, ranks = both(pool, model, "ulysses=1", tensors, patches=beside)
        assert relative_error(result, expected) <= TOLERANCE
        assert ranks[0].compiled.uncompiled_blocks == config.depth
        graphs.append(ranks[0].compiled.graphs)
    assert graphs == [made[0] + 2] * 2


@pytest.mark.full
def test_what_was_compiled_lies_in_the_users_cache_and_nobody_else_may_write_there(
    first_step: FirstStep, cache: Path
) -> None:
    folder = cache / "parallel-dit" / "compiled"
    assert list(folder.rglob("*.so"))
    assert not folder.stat().st_mode & 0o022


def test_the_folder_is_where_the_user_says_in_the_cache_or_among_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cache_folder({FOLDER: "/there"}) == Path("/there")
    assert cache_folder({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "parallel-dit" / "compiled"
    for no_home in ({"HOME": str(tmp_path / "file")}, {}, {"XDG_CACHE_HOME": "relative"}):
        found = cache_folder({**no_home, "TMPDIR": str(tmp_path)})
        assert found == tmp_path / f"parallel-dit-compiled-{os.getuid()}"


def test_what_is_missing_is_said_in_a_sentence(tmp_path: Path) -> None:
    here = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    here.pop(FOLDER, None)
    assert why_not(["cpu"], here) is None
    missing = "compiling needs a C++ compiler, and {} is not there; install g++"
    assert why_not(["cpu"], {**here, "PATH": str(tmp_path)}) == missing.format("g++")
    assert why_not(["cuda"], {**here, "PATH": str(tmp_path)}) == missing.format("gcc or clang")
    assert why_not(["cpu"], {**here, "CXX": "no-such-compiler"}) == missing.format("no-such-compiler")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    reason = why_not(["cpu"], {**here, FOLDER: str(tmp_path / "open")})
    assert reason is not None
    assert "others can write to" in reason


@pytest.mark.slow
def test_the_command_line_refuses_to_compile_without_a_compiler(
    model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["verify", "--model", model.path, "--plan", "ulysses=1", "--devices", "cpu:1", "--compile"]) == 2
    assert "--compile: compiling needs a C++ compiler, and g++ is not there" in capsys.readouterr().err
