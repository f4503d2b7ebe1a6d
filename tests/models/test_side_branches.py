"""LoRAs beside the weights of ComfyUI's modules in real workers: merged by ComfyUI they give the same.

Every kind of plan and of weights, other strengths by numbers alone, and back to the file's weights to the last bit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rounding import ROUNDING

from host.hosted_runs import FLUX
from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.errors import PoolError
from parallel_runtime.model_call import CallPlace, ModelCall
from parallel_runtime.models.hosted.calls import travelling
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.arena import Arena
from parallel_runtime.pool.generation import Generation
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error
from parallel_runtime.weight_delta import PRISTINE, WeightDelta, WeightDeltas
from parallel_runtime.wire.protocol import Op

pytestmark = pytest.mark.slow

# fp32: ComfyUI's own merging rounds each weight anew, which moved these outputs by 6e-7 at most.
VISIBLE = 1e-3
RUNS = [
    *(("Wan", plan) for plan in ("ulysses=2,weights=sharded", "ulysses=1,weights=offloaded", "pipefusion=2,patches=2")),
    ("Flux.1", "ring=2"),
]


@dataclass(frozen=True)
class Model:
    """A file, a call of it, and its weights that a LoRA changes: `fused` by a LoRA for each of three runs of rows."""

    spec: ModelSpec
    call: ModelCall
    keys: tuple[str, ...]
    fused: str


def flux_call() -> ModelCall:
    """Of the file that families/ has, at half of the noise."""
    x, context, vector = noise(1, 16, 10, 14, seed=1), noise(1, 9, 64, seed=2), noise(1, 32, seed=3)
    given = [x, torch.full((1,), 0.5), context, vector, torch.full((1,), 3.5)]
    tensors, options = travelling("Flux", given, {"transformer_options": {}}, batched=given)
    return ModelCall(tensors=tensors, out_shape=(1, x.numel()), out_dtype=torch.float32, options=options)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lora(model: Model, key: str, *, seed: int, rows: tuple[int, int] | None = None, rank: int = 4) -> WeightDelta:
    """A LoRA of a weight, or of a run of its rows: the first one and their number."""
    outputs, *inputs = read_header(model.spec.path).tensors[key].shape
    first, outputs = rows or (0, outputs)
    up, down = noise(outputs, rank, seed=seed), noise(rank, *inputs, seed=seed + 1)
    values = (up, down / down[0].numel() ** 0.5, 2.0 * rank, None)
    offset = None if rows is None else (0, first, outputs)
    return WeightDelta(key=key, kind="lora", strength=0.2, values=values, offset=offset)


def loras(model: Model) -> tuple[WeightDelta, ...]:
    """Two LoRAs on each weight, of other ranks, and of the fused one on some of its rows."""
    third = read_header(model.spec.path).tensors[model.fused].shape[0] // 3
    found = [lora(model, key, seed=number, rank=rank) for number, key in enumerate(model.keys) for rank in (4, 2)]
    found += [lora(model, model.fused, seed=50 + at, rows=(at * third, third)) for at in (0, 2)]
    return (*found, replace(lora(model, model.fused, seed=60), strength=-0.3))


def stronger(deltas: tuple[WeightDelta, ...]) -> tuple[WeightDelta, ...]:
    return tuple(replace(patch, strength=0.5 * number % 0.7) for number, patch in enumerate(deltas, 1))


@pytest.fixture(scope="module")
def by_name(wan: ModelSpec, models: Path) -> dict[str, Model]:
    """Wan's first layer is a convolution."""
    blocks = ("blocks.0.self_attn.q.weight", "blocks.1.ffn.0.weight", "blocks.2.cross_attn.v.weight")
    of_wan = ("patch_embedding.weight", "head.head.weight", *blocks)
    of_flux = ("img_in.weight", "double_blocks.0.img_mlp.0.weight", "single_blocks.1.linear2.weight")
    return {
        "Wan": Model(wan, call(1), of_wan, "blocks.1.self_attn.k.weight"),
        "Flux.1": Model(FLUX.write(models), flux_call(), of_flux, "double_blocks.0.txt_attn.qkv.weight"),
    }


def run(pool: Pool, model: Model, plan: str, deltas: WeightDeltas = PRISTINE, **options: object) -> torch.Tensor:
    """The output of a call, of a pipeline its first, which is exact."""
    made = replace(model.call, options={**model.call.options, **options})
    if "pipefusion" in plan:
        made = replace(made, place=CallPlace(f"{plan} {deltas.name}", "text"))
    return pool.run(model.spec, ParallelPlan.parse(plan), [made], deltas=deltas).outs[0]


@pytest.mark.parametrize(("name", "plan"), RUNS)
def test_loras_beside_the_weights_equal_those_that_comfyui_merges(
    pool: Pool, by_name: dict[str, Model], name: str, plan: str
) -> None:
    model = by_name[name]
    first = loras(model)
    plain = run(pool, model, plan)
    for number, deltas in enumerate((first, stronger(first), first[2:])):
        merged = run(pool, model, "data=1", WeightDeltas(f"merged {number}", deltas))
        beside = run(pool, model, plan, WeightDeltas(f"beside {number}", deltas, side_branch=True))
        assert relative_error(beside, merged) <= ROUNDING
        assert relative_error(beside, plain) > VISIBLE
    assert torch.equal(run(pool, model, plan), plain), "a LoRA was not taken off to the last bit"


@pytest.mark.parametrize("side_branch", [False, True])
def test_loras_and_results_stay_once_the_memory_that_they_came_in_is_given_back(
    pool: Pool, by_name: dict[str, Model], side_branch: bool
) -> None:
    model = by_name["Wan"]
    deltas = WeightDeltas(f"kept {side_branch}", loras(model), side_branch=side_branch)
    first = run(pool, model, "ulysses=2", deltas)
    kept = first.clone()
    pool.give_back(pool.devices)
    assert torch.equal(first, kept)
    with watched() as asked:
        assert torch.equal(run(pool, model, "ulysses=2", deltas), first)
    assert asked.ops == [Op.STEP], "the LoRAs were brought again"


@dataclass
class Asked:
    """What a pool asked its ranks for but groups, which plans of other tests may have had it free, and the bytes of
    tensors that it gave them."""

    ops: list[Op]
    num_bytes: int = 0


@contextmanager
def watched() -> Iterator[Asked]:
    """While this lasts."""
    asked = Asked([])
    place, ask = Arena.place, Generation.ask

    def placed(arena: Arena, tensors: Mapping[str, torch.Tensor], *more: Any) -> Any:
        asked.num_bytes += sum(each.nbytes for each in tensors.values())
        return place(arena, tensors, *more)

    def asking(generation: Generation, request: Any, *more: Any, **named: Any) -> Any:
        asked.ops += [request.op] if request.op is not Op.MESH else []
        return ask(generation, request, *more, **named)

    with mock.patch.object(Arena, "place", placed), mock.patch.object(Generation, "ask", asking):
        yield asked


@pytest.mark.parametrize("plan", ["ulysses=2,weights=sharded", "pipefusion=2,patches=2"])
def test_another_strength_moves_no_tensor_and_another_lora_moves_only_loras(
    pool: Pool, by_name: dict[str, Model], plan: str
) -> None:
    """Also where a LoRA with a core of its own was merged beside them, as long as it keeps its strength."""
    model, axes = by_name["Wan"], ParallelPlan.parse(plan)
    key = "blocks.2.ffn.2.weight"
    merged = replace(lora(model, key, seed=70), key=key)
    lengths = noise(*read_header(model.spec.path).tensors[key].shape[:1], 1, seed=71).abs()
    dora = replace(merged, values=(*merged.values[:3], lengths))
    first = (*loras(model), dora)
    louder = (*stronger(first[:-1]), dora)
    pool.load(model.spec, axes, deltas=WeightDeltas("first", first, side_branch=True))
    with watched() as asked:
        pool.load(model.spec, axes, deltas=WeightDeltas("louder", louder, side_branch=True))
    assert asked.ops == [Op.STRENGTHS]
    assert asked.num_bytes == 0
    want = run(pool, model, "data=1", WeightDeltas("louder, merged", louder))
    got = run(pool, model, plan, WeightDeltas("louder", louder, side_branch=True))
    assert relative_error(got, want) <= ROUNDING
    assert relative_error(got, run(pool, model, "data=1", WeightDeltas("first, merged", first))) > VISIBLE

    fewer = louder[1:]
    with watched() as asked:
        pool.load(model.spec, axes, deltas=WeightDeltas("fewer", fewer, side_branch=True))
    assert set(asked.ops) == {Op.CHANGE}
    assert asked.num_bytes == sum(patch.num_bytes for patch in fewer)
    other_dora = (*fewer[:-1], replace(dora, strength=0.6))
    with watched() as asked:
        got = run(pool, model, plan, WeightDeltas("other", other_dora, side_branch=True))
    assert asked.ops[:2] == [Op.STRENGTHS, Op.CHANGE], "a merged one is merged anew"
    want = run(pool, model, "data=1", WeightDeltas("other, merged", other_dora))
    assert relative_error(got, want) <= ROUNDING


def test_a_lora_for_a_layer_that_the_model_lacks_is_refused(pool: Pool, by_name: dict[str, Model]) -> None:
    model = by_name["Wan"]
    lost = replace(lora(model, model.keys[-1], seed=1), key="blocks.7.self_attn.q.weight")
    with pytest.raises(PoolError, match="has not; use one made for this model"):
        pool.load(model.spec, deltas=WeightDeltas("lost", (lost,), side_branch=True))
