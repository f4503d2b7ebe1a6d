"""Weights of which each rank holds a part are, in every block, to the last bit those of which it holds all.

Outputs are as good as equal: the weights lie elsewhere, and some kernels add in another order by where a matrix begins.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from noted import FOLDER, Notes
from safetensors.torch import load_file, save_file

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weights.unit_layout import ALIGNMENT, UnitLayout
from runtime.shard_sizes import ranges, sent, unit_of, weight_bytes

HERE = str(Path(__file__).parent)
FP8 = torch.float8_e4m3fn
DEPTH = 2
UNITS = ["", "double_blocks.0.", "double_blocks.1.", "single_blocks.0.", "single_blocks.1."]
RANKS = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool(
        parse_devices(f"cpu:{RANKS}").devices,
        threads_per_rank=1,
        engine="shard_engine:ShardEngine",
        python_path=(HERE, FOLDER),
    )
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One small model as fp32, as fp8 and bf16, and as scaled fp8."""
    folder = tmp_path_factory.mktemp("shards")
    paths = {kind: str(folder / f"{kind}.safetensors") for kind in ("plain", "fp8", "scaled")}
    write_sample(paths["plain"], sample_config(heads=4, depth=DEPTH, depth_single=DEPTH))
    for kind in ("fp8", "scaled"):
        stored = {}
        for name, tensor in load_file(paths["plain"]).items():
            in_fp8 = "_blocks." in name and tensor.ndim == 2
            scale = tensor.abs().max() / 448 if in_fp8 and kind == "scaled" else torch.tensor(1.0)
            stored[name] = (tensor / scale).to(FP8 if in_fp8 else torch.bfloat16)
            if in_fp8 and kind == "scaled":
                stored[name.replace(".weight", ".weight_scale")] = scale
        save_file(stored, paths[kind])
    return paths


def check(pool: Pool, name: str, path: str, *, size: int, **options: object) -> list[dict]:
    """What each of `size` ranks found."""
    with Notes() as notes:
        options = {"check": name, "path": path, **options, **notes.option}
        call = ModelCall(tensors={}, out_shape=(1,), out_dtype=torch.float32, options=options)
        pool.run(ModelSpec.of(path), ParallelPlan(ulysses=size), [call])
        return notes.read()[:size]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [
        pytest.param(kind, dtype, size, marks=[] if size == 2 + number % 2 else [pytest.mark.full])
        for number, (kind, dtype) in enumerate(
            [("plain", "default"), ("scaled", "default"), ("plain", "float16"), ("fp8", "default")]
        )
        for size in (2, 3)
    ],
)
def test_every_weight_is_that_of_a_whole_model_with_and_without_patches(
    ranks: Pool, files: dict[str, str], kind: str, dtype: str, size: int
) -> None:
    found = check(ranks, "equal", files[kind], size=size, dtype=dtype)
    for rank in found:
        assert rank["different"] == {}
        assert rank["stages"] == 9
        assert rank["idle"], "something is in flight after a step"
        assert rank["moved"]["all"] > 0.1
        assert rank["moved"]["lora"] > 0.01
        assert rank["moved"]["bias"] > 0.01
        assert rank["moved"]["again"] == 0
        assert rank["parameters_again"] == rank["sharded"]
    weights = weight_bytes(files[kind], itemsize=2 if dtype == "float16" else None)
    for rank in found:
        assert rank["replicated"] == sum(weights.values())
        assert rank["sharded"] == sum(ranges(weights, size).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("plain", 1),
        ("scaled", 2),
        ("plain", 3),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("scaled", 1), ("plain", 2), ("scaled", 3))),
    ],
)
def test_shards_on_the_host_are_copied_ahead_and_give_the_same_weights(
    ranks: Pool, files: dict[str, str], kind: str, size: int
) -> None:
    largest = max(ranges(weight_bytes(files[kind]), size).values())
    for rank in check(ranks, "equal", files[kind], size=size, offloaded=True):
        assert rank["different"] == {}
        assert rank["moved"]["all"] > 0.1
        assert rank["buffers"] == 2 * size * largest + (size > 1) * largest, "two units, and what is on its way to them"
        assert rank["needed"] == rank["buffers"], "on the device there are the buffers alone"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_side_branches_run_beside_gathered_weights(ranks: Pool, files: dict[str, str], size: int) -> None:
    for rank in check(ranks, "beside", files["plain"], size=size):
        assert rank == {"equal": True, "moved": True, "back": True}


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_next_unit_is_on_its_way_before_a_block_computes(
    ranks: Pool, files: dict[str, str], passes: int, offloaded: bool
) -> None:
    order = ["", *([*UNITS[1:], ""] * passes)]
    expected = [["start", ""]]
    for position, prefix in enumerate(order):
        expected += [["start", after] for after in order[position + 1 : position + 2]]
        expected += [["compute", prefix]]
        if prefix == "" and 0 < position < len(order) - 1:
            expected += [["compute", ""]]  # the head of one pass and the beginning of the next share a gather
    units = ranges(weight_bytes(files["plain"]), RANKS)
    for rank in check(ranks, "order", files["plain"], size=RANKS, passes=passes, offloaded=offloaded):
        assert rank["events"] == expected
        assert rank["touched"] == [], "the unit that arrives overwrote the one in use"
        assert rank["idle"]
        assert (rank["calls"], rank["bytes"]) == sent(units, RANKS, passes=passes)


@pytest.mark.slow
def test_a_rank_without_work_keeps_the_others_going(ranks: Pool, files: dict[str, str]) -> None:
    for index, rank in enumerate(check(ranks, "idle", files["plain"], size=3)):
        assert rank["equal"]
        assert rank["idle"]
        assert rank["after"] == []
        assert rank["beats"] == (0 if index else 3 * (len(UNITS) + 1))


@pytest.mark.slow
def test_units_out_of_turn_are_refused_and_nothing_hangs(ranks: Pool, files: dict[str, str]) -> None:
    for rank in check(ranks, "out_of_turn", files["plain"], size=2):
        unasked, wrong, twice = rank["said"]
        assert "the weights of '' are asked for, but none is due" in unasked
        assert "the weights of 'double_blocks.1.' are asked for, but '' is due" in wrong
        assert "the weights of '' are still in flight" in twice
        assert rank["idle"]


@pytest.mark.slow
def test_loading_can_be_cancelled_reads_this_ranks_bytes_alone_and_can_be_done_again(
    ranks: Pool, files: dict[str, str]
) -> None:
    found = check(ranks, "cancel", files["plain"], size=2)
    for rank in found:
        assert rank["cancelled"]
        first, second = rank["seen"][:3], rank["seen"][3:]
        assert first == second[:3], "the first load went on after it was cancelled"
        assert second == sorted(second)
        assert second[-1][0] == second[-1][1]
        assert rank["different"] == []
    whole = sum(tensor.nbytes for tensor in load_file(files["plain"]).values())
    assert sum(rank["seen"][-1][1] for rank in found) == whole, "each byte is read by one rank"


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", [0, 2])
def test_a_number_that_differs_on_one_rank_is_seen_on_all(ranks: Pool, files: dict[str, str], spoilt: int) -> None:
    for rank in check(ranks, "corrupted", files["plain"], size=3, spoilt=spoilt):
        assert [unit_of(name) for name in rank["different"]] == [*UNITS, ""], "one weight of each unit"
        assert not rank["equal"]


@pytest.mark.slow
def test_units_smaller_than_the_ranks_are_whole(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    large = torch.arange(1000.0)
    save_file({"b.0.w": torch.tensor([7.5]), "b.1.w": large}, path)
    for rank in check(ranks, "small", str(path), size=3):
        assert rank["outside"] == []
        assert rank["small"] == [7.5]
        assert rank["large"] == large.tolist()
        assert rank["bytes"] == ALIGNMENT + ALIGNMENT + -(-4000 // (3 * ALIGNMENT)) * ALIGNMENT


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
def test_the_parts_of_a_unit_are_each_element_once_and_begin_between_elements(shards: int) -> None:
    weights = {
        "matrix": (torch.bfloat16, (37, 11)),
        "scalar": (torch.float32, ()),
        "fp8": (FP8, (129,)),
        "empty": (torch.float32, (0, 4)),
        "vector": (torch.float32, (1008,)),  # with it 80 times 64 bytes, which three ranks cannot cut evenly
    }
    layout = UnitLayout(weights, shards=shards)
    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, (dtype, shape) in weights.items():
        count = torch.Size(shape).numel()
        values = torch.arange(count, dtype=torch.float32).to(dtype)
        reached = 0
        for index in range(shards):
            part = layout.part(name, index)
            if part.first < part.stop:
                assert part.first == reached
                reached = part.stop
            shard = whole[index * layout.shard_bytes : (index + 1) * layout.shard_bytes]
            part.of(shard).copy_(values[part.first : part.stop])
        assert reached == count
        view = layout.views(whole)[name]
        assert view.data_ptr() % ALIGNMENT == whole.data_ptr() % ALIGNMENT
        assert view.shape == shape
        assert torch.equal(view.float().flatten(), values.float())
    data = {name: torch.Size(shape).numel() * dtype.itemsize for name, (dtype, shape) in weights.items()}
    assert ranges(data, shards) == {"": layout.shard_bytes}
    assert layout.num_bytes == shards * layout.shard_bytes
