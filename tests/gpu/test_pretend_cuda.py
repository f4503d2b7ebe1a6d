"""Plans on pretend GPUs, where torch's CUDA sanitizer finds a wait that is left out (pretend_cuda/device.py).

The whole of them, memory refused, and mistakes that they must find: `make pretend-cuda`.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpu.cases import Reference, write_model
from gpu.pretend_cuda.mistakes import MISTAKES
from gpu.pretend_cuda.pool import PretendPool, Trial, pretending
from host.tiny_hosted import call, spec_of, write_tiny
from parallel_runtime.checkpoint import read_header
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool import pool as of_pool
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_delta import PRISTINE, WeightDelta, WeightDeltas

TRIALS = (
    Trial(plan="ulysses=2", run="a mask, an odd length"),
    Trial(plan="ulysses=1", weights="offloaded"),
    Trial(plan="ulysses=2", weights="sharded", worker_loop=False),
    Trial(plan="ring=2", run="two sides of unequal texts, two images"),
    Trial(plan="pipefusion=2,patches=3", launches_wait=True),
    Trial(plan="pipefusion=2", launches_wait=True, run="two sides of unequal texts, two images"),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """What CPU ranks compute of the same."""
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as plain:
        yield Reference(plain, write_model(tmp_path_factory.mktemp("pretend")))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendPool]:
    with pretending(), PretendPool(2, tmp_path_factory.mktemp("pool")) as made:
        yield made


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.plan} {trial.weights}")
def test_no_stream_uses_what_another_writes(reference: Reference, pool: PretendPool, trial: Trial) -> None:
    assert pool.wrong(reference, trial, deadline_s=30.0) == ""  # beside other tests a rank may be slow


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.float32, "bfloat16")],
)
def test_no_weight_is_on_a_device_twice(tmp_path: Path, pool: PretendPool, dtype: torch.dtype, computed: str) -> None:
    """Neither one that a LoRA has changed, nor one that the file has narrower or wider than it is held."""
    spec = spec_of(write_tiny(tmp_path / "model.safetensors", dtype=dtype), computed)
    shapes = {name: entry.shape for name, entry in read_header(spec.path).tensors.items() if len(entry.shape) == 2}
    values = {
        name: (torch.ones(rows, 1), torch.ones(1, columns), 1.0, None) for name, (rows, columns) in shapes.items()
    }
    loras = tuple(WeightDelta(key=name, kind="lora", strength=1.0, values=each) for name, each in values.items())
    allocated = []
    for deltas in (PRISTINE, WeightDeltas("a LoRA", loras), PRISTINE):
        loaded = pool.load(spec, deltas=deltas).ranks[0]
        memory = pool.status()["memory"][0]
        allocated.append(memory["allocated_bytes"])
        assert memory["reserved_bytes"] == memory["allocated_bytes"], "memory of merging or loading is kept"
    pool.unload(spec)
    held = allocated[0] - pool.status()["memory"][0]["allocated_bytes"]
    assert allocated == [allocated[0]] * 3, "a weight was kept beside the changed one"
    assert loaded.parameter_bytes <= held < 1.1 * loaded.parameter_bytes, "the file's weight was kept, too"


@pytest.mark.parametrize("weights", ["sharded", "offloaded"])
def test_blocks_that_gpus_have_room_for_travel_until_they_stay_and_go_with_the_run(
    reference: Reference, pool: PretendPool, weights: str
) -> None:
    plan, out = ParallelPlan.parse(f"ulysses=2,weights={weights}"), list[torch.Tensor]()
    gathers, stay = [], []
    pool.give_back(pool.devices)
    for number in range(5):
        result = pool.run(reference.spec, plan, [call(text=9, options={"lean": number > 3})])
        out.append(result.outs[0].clone())
        gathers.append([rank.ran.weight_collectives for rank in result.ranks])
        stay.append([rank.get("staying_bytes", 0) for rank in pool.memory()])
    assert all(torch.equal(each, out[0]) for each in out)
    assert gathers == [[3, 3], [3, 3], [0, 0], [0, 0], [3, 3]], "of three blocks"
    assert min(stay[2]) > 0 and stay[1] == stay[2] == stay[3] and stay[0] == stay[4] == [0, 0]
    pool.run(reference.spec, plan, [call(text=9)])
    assert min(each["staying_bytes"] for each in pool.memory()) > 0, "it is known what such a step takes"
    pool.give_back(pool.devices)
    assert not any("staying_bytes" in each for each in pool.memory())


def test_the_text_of_each_mistake_is_in_the_product() -> None:
    """Which `make pretend-cuda` plants; one that is nowhere any more would be found by nothing."""
    sources = {path: path.read_text(encoding="utf-8") for path in Path(of_pool.__file__).parents[1].rglob("*.py")}
    for each in MISTAKES:
        assert any(each.old in text for path, text in sources.items() if path.name == each.file), each.name


@pytest.mark.parametrize(("now", "here"), [("1,0", ("GPU pretend-1", "GPU pretend-0")), ("0", ("", "no GPU"))])
def test_a_rank_with_another_gpu_than_comfyui_under_its_name_is_told_with_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, now: str, here: tuple[str, str]
) -> None:
    """As where a custom node sets the variable once ComfyUI has numbered its GPUs, here two in the machine's order."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"pretend-{index}"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pretending(), PretendPool(2, tmp_path) as pool:
        pool.start()
        pool.close()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", now)
        with pytest.raises(PoolError) as told:
            pool.start()
    rank = told.value.rank
    assert rank is not None and here[rank], "a rank with the right GPU"
    said = f'("cuda:{rank} is {here[rank]} in this rank and GPU pretend-{rank} in ComfyUI"); restart ComfyUI, and leave'
    assert said in str(told.value).splitlines()[0]
    assert type(told.value) is PoolError, "not a fault of the code, which auto would go round"
