"""What is counted of ComfyUI's classes without running them: held to real ranks, to formulas by hand, and to itself."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from host import layouts
from host.fetch import comfyui_path
from host.outcomes import StockFailsError
from host.tiny_hosted import call
from host.tiny_models import write_layout
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.model_call import CallPlace
from parallel_runtime.models.hosted.count import OperationCounter
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import useful_plans
from parallel_runtime.planner.comfyui_process import find_comfyui
from parallel_runtime.planner.cost import step_cost
from parallel_runtime.planner.counted import CountedModel, amounts_of, kept_by_step_cache
from parallel_runtime.planner.counting import Counted, Counts, usual_counted, usual_work_of
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.memory import memory_of
from parallel_runtime.planner.work import Work
from parallel_runtime.pool.pool import Pool

from .files import write_model_files
from .variants import FILES

WAN, KOALA, H3, BOOGU = (f"tiny_{name}.safetensors" for name in ("wan_t2v", "koala", "minimax_h3", "boogu"))
HEADS, HEAD_DIM, LAYERS = 5, 24, 3  # of this Wan
WIDTH = HEADS * HEAD_DIM
SIZE = {"width": 352, "height": 288, "frames": 9}  # no size that is counted
TEXT = 20
COUNTS = Counts()
CPU = known_calibration("cpu")
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counted")


def counted(folder: Path, file: str, **size: int) -> Counted:
    if not (folder / file).is_file():
        write_model_files(folder, [FILES[file]])
    if not (folder / file).is_file():
        raise StockFailsError(f"this ComfyUI does not have the class of {file}")
    return COUNTS.of(str(folder / file), "float32", find_comfyui(str(comfyui_path())), **size)


def work_of(found: Counted, **more: int) -> Work:
    return Work(image_tokens=found.image_tokens, text_tokens=TEXT, element_bytes=found.element_bytes, **more)


def test_flops_and_scores_are_those_of_the_formulas_written_by_hand(folder: Path) -> None:
    found = counted(folder, WAN, **SIZE)
    work, tokens = work_of(found), 3 * 22 * 18  # three latent frames, 44 x 36 in patches of two
    assert found.image_tokens == tokens
    usual = {name: value for name, value in SIZE.items() if name != "frames"}
    assert counted(folder, WAN, **usual).image_tokens == 21 * 22 * 18, "a video that people make has 81 frames"
    assert (found.frames, counted(folder, WAN, **usual).frames, found.model.small_numbers) == (9, 81, False)
    assert (usual_work_of(counted(folder, WAN, **usual)).frames, usual_counted().frames) == (81, 1)
    scores = LAYERS * HEADS * tokens**2
    assert found.model.count("attended.scores", work) == pytest.approx(scores, rel=1e-6)
    assert found.model.count("attended.attention_flops", work) == pytest.approx(4 * HEAD_DIM * scores, rel=1e-6)
    crossed = LAYERS * HEADS * tokens * TEXT
    assert found.model.count("module.scores", work) == pytest.approx(crossed, rel=1e-6)
    # q, k, v, o, and q and o of the text's attention: 6 d d; the MLP of twice the width: 4 d d
    blocks = LAYERS * 2 * tokens * 10 * WIDTH**2
    shared = found.model.count("module.matmul_flops", work) - found.model.count("module.matmul_flops", work, 2)
    assert shared == pytest.approx(blocks / 2, rel=0.03)  # and the head


def test_a_class_that_does_not_go_without_a_mask_of_its_text_is_counted(folder: Path) -> None:
    small = FILES[BOOGU].arguments | {"num_layers": 1, "num_double_stream_layers": 1}  # each layer is counted
    write_model_files(folder, [replace(FILES[BOOGU], arguments=small)])
    assert counted(folder, BOOGU, width=352, height=288).image_tokens == 22 * 18


def test_views_of_weights_are_not_counted_as_memory_that_a_call_holds() -> None:
    layer, counter = torch.nn.Linear(512, 512), OperationCounter()
    with torch.no_grad(), counter:
        layer(layer(torch.ones(2, 512)))
    assert counter.counts["held_bytes"] == 2 * 2 * 512 * 4  # what the layers put out


@pytest.mark.full
def test_the_usual_model_is_kept_as_it_is_counted(tmp_path: Path) -> None:
    """Flux.1 dev in bf16, of whose file there is the header alone."""
    shape = layouts.FluxShape(hidden=3072, depth=19, single=38, ctx=4096, vec=768)
    path = write_layout(
        tmp_path / "dev.safetensors", layouts.flux(shape), seed=0, dtype=torch.bfloat16, values_of=lambda _: b""
    )
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + usual_counted().model.weight_bytes)
    found = Counts().of(str(path), "bfloat16", find_comfyui(str(comfyui_path()))).model
    kept = usual_counted().model
    assert (found.weight_bytes, found.block_bytes, found.key_heads) == (23_802_816_640, kept.block_bytes, 24)
    for counted_now, known in ((found.whole, kept.whole), (found.shared, kept.shared)):
        assert counted_now.keys() == known.keys()
        for name, polynomial in counted_now.items():
            assert polynomial == pytest.approx(known[name], rel=1e-5, abs=1e-3), name


def test_bytes_are_those_that_real_ranks_send(folder: Path, command: Command) -> None:
    found, plan = counted(folder, WAN, **SIZE), ParallelPlan(ring=2)
    size = [part for name, value in SIZE.items() for part in (f"--{name}", str(value))]
    asked = ("--model", str(folder / WAN), *size, "--text-tokens", str(TEXT), "--comfyui", str(comfyui_path()))
    done = command("verify", *asked, "--plan", "ring=2", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    amounts = amounts_of(found.model, work_of(found), plan)
    expected = amounts.hop_bytes + amounts.gathered_bytes
    report = json.loads(done.stdout)
    assert report["max_rel_err"] <= report["tolerance"] == 1e-5
    assert report["bytes_per_step"] == pytest.approx([expected] * 2, rel=1e-6)
    assert expected != pytest.approx(amounts.hop_bytes, rel=1e-3)  # what is gathered is seen


def test_a_step_cache_keeps_on_real_ranks_what_was_counted_of_it(folder: Path) -> None:
    """What Wan's first block added, and what its others did, in fp32; it is in the estimate of a plan that has one."""
    found = counted(folder, WAN, **SIZE)
    spec = ModelSpec.of(folder / WAN, "float32", comfyui=find_comfyui(str(comfyui_path())))
    asked = call(0, text=TEXT, batch=2, size=(3, 36, 44))
    asked = replace(asked, place=CallPlace("kept", "one"), options={**asked.options, "step_cache": 0.1})
    work = work_of(found, batch=2, step_cache=True)
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        for plan in (ParallelPlan(), ParallelPlan(ulysses=2)):
            ran = pool.run(spec, plan, [asked]).ran[0].cached
            estimated = 2 * kept_by_step_cache(found.model, work, plan)
            assert ran.kept_bytes == pytest.approx(estimated, rel=1e-6), plan
            assert ran.kept_bytes == 2 * 2 * 4 * WIDTH * work.image_tokens / plan.parts
            without = memory_of(found.model, replace(work, step_cache=False), plan, CPU.rates)
            told = memory_of(found.model, work, plan, CPU.rates)
            assert told.activations - without.activations == pytest.approx(ran.kept_bytes, abs=1)


def test_more_tokens_never_take_less_and_heads_are_as_uneven_as_they_are(folder: Path) -> None:
    found = counted(folder, WAN, **SIZE)
    work = work_of(found)
    by_heads, ring = (amounts_of(found.model, work, plan) for plan in (ParallelPlan(ulysses=2), ParallelPlan(ring=2)))
    alone = amounts_of(found.model, work, ParallelPlan())
    whole = found.model.count("attended.scores", work)
    assert alone.scores - by_heads.scores == pytest.approx((1 - 3 / 5) * whole + (alone.scores - whole) / 2, rel=1e-3)
    assert alone.scores - ring.scores == pytest.approx(alone.scores / 2, rel=1e-3)
    larger = replace(work, image_tokens=2 * work.image_tokens)
    for plan in useful_plans(2, model=found.model, work=replace(work, guided=True), stale=False):
        times = [step_cost(found.model, each, plan, CPU).step_s for each in (work, larger)]
        needs = [memory_of(found.model, each, plan, CPU.rates).total for each in (work, larger)]
        assert 0 < times[0] < times[1] and 0 < needs[0] < needs[1], plan
    assert memory_of(found.model, work, ParallelPlan(), CPU.rates).weights == found.model.weight_bytes


def test_a_step_of_a_full_pipeline_is_shared_out_over_its_stages(folder: Path) -> None:
    found = counted(folder, WAN, **SIZE)
    work, model = work_of(found, guided=True), found.model
    quick = replace(CPU, software=replace(CPU.software, operation_s=0.0), link=replace(CPU.link, latency_s=0.0))
    assert model.staged_blocks == LAYERS
    # the text's own work goes with every patch, and the weights are read with each
    alone, sent = (step_cost(model, work, ParallelPlan(), quick), 2 * 3 * 22 * 18 * WIDTH * found.element_bytes)
    times = {}
    for patches in (3, 9):
        cost = step_cost(model, work, ParallelPlan(pipefusion=3, patches=patches), quick)
        times[patches] = cost.compute_s
    assert alone.compute_s / 3 < times[3] < times[9] < alone.compute_s / 2
    warmup = step_cost(model, work, ParallelPlan(pipefusion=3), quick).warmup_step_s
    assert warmup - alone.step_s == pytest.approx(2 * sent / quick.link.bandwidth, rel=1e-6)
    plans = {stale: list(useful_plans(2, model=model, work=work, stale=stale)) for stale in (False, True)}
    assert {plan.pipefusion for plan in plans[True] if plan not in plans[False]} == {2}
    assert not model.may_run(ParallelPlan(pipefusion=4))
    one, two = (memory_of(model, work, plan, CPU.rates) for plan in (ParallelPlan(), ParallelPlan(pipefusion=3)))
    assert one.weights - two.weights == pytest.approx(2 / 3 * sum(model.block_bytes), abs=1)
    keys = 2 * 2 * work.image_tokens * WIDTH * found.element_bytes  # of both calls, keys and values, of one block
    assert two.buffers - one.buffers == pytest.approx(keys * LAYERS / 3, rel=1e-6)


def test_ranks_that_cannot_share_an_image_are_offered_prompts_and_batches_alone(folder: Path) -> None:
    if not (folder / KOALA).is_file():
        write_model_files(folder, [FILES[KOALA]])
    path = str(folder / KOALA)
    model = COUNTS.of(path, "float32", find_comfyui(str(comfyui_path())), width=256, height=256).model
    work = Work(image_tokens=64, text_tokens=77, guided=True, batch=2, element_bytes=4)
    plans = {plan.name for plan in useful_plans(2, model=model, work=work, stale=False) if plan.weights == "replicated"}
    assert plans == {"cfg2-ring1-uly1", "data2-ring1-uly1"}
    assert model.count("module.matmul_flops", work) > 1e9


@pytest.mark.parametrize("file", [WAN, H3])
def test_a_half_precision_file_is_counted_without_its_values(folder: Path, file: str) -> None:
    """Wan computes its patches in fp32 whatever the file has; H3 reads values of what it is given."""
    whole, half = counted(folder, file), folder / f"half_{file}"
    with safe_open(str(folder / file), "pt") as opened:
        metadata = opened.metadata()
    save_file({name: each.bfloat16() for name, each in load_file(folder / file).items()}, half, metadata=metadata)
    found = COUNTS.of(str(half), "default", find_comfyui(str(comfyui_path())))
    assert not found.model.from_real_calls and not whole.model.from_real_calls
    work = replace(work_of(whole), image_tokens=found.image_tokens)
    flops = [each.model.count("module.matmul_flops", work) for each in (whole, found)]
    assert flops[0] == pytest.approx(flops[1]) and flops[0] > 1e9
    assert found.model.weight_bytes == pytest.approx(whole.model.weight_bytes / 2, rel=0.01)


def test_a_file_larger_than_the_memory_of_the_machine_is_counted(folder: Path) -> None:
    """torch maps a file so that it could be written to, which the system refuses beyond its memory."""
    small = counted(folder, WAN).model.weight_bytes
    data = (folder / WAN).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    more = psutil.virtual_memory().total + psutil.swap_memory().total + 2**30
    header["of_another_model"] = {"dtype": "U8", "shape": [more], "data_offsets": [len(rest), len(rest) + more]}
    text = json.dumps(header).encode()
    large = folder / "large.safetensors"
    with large.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + rest)
        file.truncate(8 + len(text) + len(rest) + more)  # a hole, which takes no room
    try:
        found = COUNTS.of(str(large), "float32", find_comfyui(str(comfyui_path())))
    finally:
        large.unlink()
    assert found.model.weight_bytes in (small, small + more)


def test_counts_that_lack_something_are_refused_by_the_files_name() -> None:
    with pytest.raises(ValueError, match=r"what was counted of some\.safetensors cannot be read .*; count it again"):
        CountedModel.of("some.safetensors", {"whole": {}, "shared": {}})
