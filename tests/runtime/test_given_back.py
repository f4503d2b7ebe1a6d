"""After a sampling run, ranks keep nothing of it, and a device that ComfyUI uses too gets what torch only caches."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from noted import FOLDER, Notes

from host.hosted_runs import make_run
from host.tiny_hosted import call
from models.keeper import PLAN, Keeper
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import Device, parse_devices
from parallel_runtime.errors import BESIDE_BLOCKS
from parallel_runtime.models.hosted.kept_state import KeptState
from parallel_runtime.parallel.overlap import OverlapRates, SharedHeads, choose_chunks
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.pool.arena import Arena
from parallel_runtime.pool.pool import Pool
from parallel_runtime.wire.replies import Memory
from parallel_runtime.wire.requests import (
    ChangeWeights,
    DecodeTiles,
    MakeMesh,
    MeasureDevice,
    SetStrengths,
    Step,
    Trim,
    Unload,
)
from parallel_runtime.worker.engine import Engine
from parallel_runtime.worker.hosted import HostedModel
from parallel_runtime.worker.loading import LoadedModels

from .test_a_ranks_calls import table


def nothing(*_: object, **__: object) -> bool:
    """What a request has to tell, or to ask."""
    return False


@pytest.mark.parametrize(("ranks", "emptied"), [([0, 2], 1), ([1], 0)])
def test_a_rank_on_a_shared_gpu_empties_its_cache_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int], emptied: int
) -> None:
    engine = Engine(rank=0, device=torch.device("cuda", 0), segments=table())
    engine.held_state.slots[0, BatchSlice(0, 0, 1)] = {"block": torch.ones(3)}
    emptying: list[dict] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptying.append(dict(engine.held_state.slots)))
    engine.handle(Trim(ranks=tuple(ranks)), (), progress=nothing, cancelled=nothing, beat=nothing)
    assert emptying == [{}] * emptied, "once, and after what the run had kept was let go"
    assert engine.held_state.slots == {}


def test_pinned_memory_that_torch_caches_is_given_back_once_all_copies_are_done_where_torch_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened = list[str]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("device"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append(f"waited for {device}"))
    gpu = LoadedModels(rank=0, device=torch.device("cuda", 1), memory=Memory)
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    gpu.give_back()
    assert happened == ["device"], "a torch without such a cache"
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: happened.append("host"), raising=False)
    gpu.give_back()
    assert happened[1:] == ["waited for cuda:1", "host", "device"]
    LoadedModels(rank=0, device=torch.device("cpu"), memory=Memory).give_back()
    assert len(happened) == 4


def test_a_gpu_gets_the_memory_of_merging_back_once_a_change_and_not_with_each_of_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: Any = Engine(rank=0, device=torch.device("cuda", 0), segments=table())
    happened = list[str]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("given back"))
    stream = SimpleNamespace(synchronize=lambda: happened.append("read"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    changes = SimpleNamespace(take=lambda *_, **__: happened.append("merged"))
    weights = SimpleNamespace(spec=None, shards=None)
    engine.models[7] = SimpleNamespace(weights=weights, changes=changes, end_run=nothing, drop_whole_blocks=nothing)
    engine.models.switched = None
    for number in range(3):
        change = ChangeWeights(model=7, records=(), side_branch=False, first=number == 0, last=number == 2)
        engine.handle(change, (), progress=nothing, cancelled=nothing, beat=nothing)
    assert happened == ["merged", "read"] * 3 + ["given back"], "the next message takes the same memory"


CHANGE = {"side_branch": False, "first": True, "last": True, "records": ()}
STEP = {"calls": (), "batch_groups": ((),), "repeated": {}, "plan": ParallelPlan()}


@pytest.mark.parametrize(
    ("request_", "kept"),
    [
        (ChangeWeights(model=7, **CHANGE), False),
        (Unload(model=8), False),
        (Trim(ranks=()), False),
        (MeasureDevice(), False),
        (Step(model=8, **STEP), False),
        (Step(model=7, **STEP), True),
    ],
    ids=["weights change", "another model goes", "the run has ended", "another request", "another model's", "a step"],
)
def test_what_a_class_keeps_goes_with_any_request_that_is_no_step_of_its_model(request_: Any, kept: bool) -> None:
    engine, keeper = Engine(rank=0, device=torch.device("cpu"), segments=table()), Keeper()
    engine.models[7] = model = HostedModel(weights=SimpleNamespace(module=keeper))
    model.kept = KeptState(keeper, PLAN, PLAN.keeps)
    model.kept.begin("run")
    assert keeper.enabled
    engine._asked = asked = (time.monotonic(), "memory")  # type: ignore[assignment]
    keeper.kept = {"key": torch.ones(1), "blocks": []}
    with suppress(KeyError, AttributeError):  # the rest of a request is not what is asked about
        engine.handle(request_, (), progress=nothing, cancelled=nothing, beat=nothing)
    assert (keeper.kept is not None, keeper.enabled) == (kept, kept)
    assert (engine._asked is asked) == isinstance(request_, Step), "memory is asked anew behind what may change it"


@pytest.mark.parametrize(
    ("request_", "stay"),
    [
        *((ChangeWeights(model=7, **CHANGE), False), (Unload(model=8), False), (Trim(ranks=(), graphs=True), False)),
        *((Step(model=8, **STEP), False), (Step(model=7, **STEP), True)),
        *((SetStrengths(model=7, strengths=()), True), (SetStrengths(model=8, strengths=()), False)),
        (DecodeTiles(vae=1, method="decode", tiles=((),), last=True), False),
    ],
    ids=lambda value: f"{type(value).__name__} of {getattr(value, 'model', '')}",
)
def test_whole_blocks_go_with_any_request_that_is_no_run_of_their_model_and_their_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch, request_: Any, stay: bool
) -> None:
    engine, happened = Engine(rank=0, device=torch.device("cuda", 0), segments=table()), list[str]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("given back"))
    shards = SimpleNamespace(staying_bytes=5)

    def drop(*, for_a_step: bool) -> None:
        assert for_a_step == isinstance(request_, Step | SetStrengths)
        shards.staying_bytes = 0
        happened.append("dropped")

    engine.models[7] = SimpleNamespace(  # type: ignore[assignment]
        weights=SimpleNamespace(shards=shards), end_run=nothing, drop_whole_blocks=drop, graphs_left=False
    )
    with suppress(
        KeyError, AttributeError, RuntimeError, AssertionError, ValueError
    ):  # the rest is not what is asked about
        engine.handle(request_, (), progress=nothing, cancelled=nothing, beat=nothing)
    assert happened[:2] == ([] if stay else ["dropped", "given back"])


@pytest.mark.parametrize("stay", [5, 0])
def test_an_error_says_that_blocks_stayed_whole_beside_what_failed(stay: int) -> None:
    engine: Any = Engine(rank=0, device=torch.device("cpu"), segments=table())
    raised = RuntimeError("no memory")

    def step(*_: object, **__: object) -> None:
        raise raised

    engine._step = step
    shards = SimpleNamespace(staying_bytes=stay)
    engine.models[7] = SimpleNamespace(weights=SimpleNamespace(shards=shards), end_run=nothing)
    with pytest.raises(RuntimeError, match="no memory") as told:
        request = Step(model=7, **STEP)
        engine.handle(request, (), progress=nothing, cancelled=nothing, beat=nothing)
    assert told.value is raised and raised.args == (f"no memory ({BESIDE_BLOCKS})" if stay else "no memory",)


def test_heads_of_a_mesh_go_in_as_many_chunks_as_the_told_devices_and_link_say() -> None:
    engine = Engine(rank=0, device=torch.device("cpu"), segments=table())
    slow = OverlapRates(attention_flops=1e9, bandwidth=2e6, latency_s=0.0)
    found = []
    for told in (None, slow):
        request = MakeMesh(plan=ParallelPlan(), dropped=(), freed=(), overlap=told)
        engine.handle(request, (), progress=nothing, cancelled=nothing, beat=nothing)
        found.append(engine.meshes[request.plan].attention.chunks)
    sizes = {"groups": 32, "ranks": 2, "keys": 2048, "head_dim": 16, "flops": 4.0 * 2048**2 * 16 * 16}
    shared = SharedHeads(**sizes, arriving_bytes=3 * 2**20, returning_bytes=2**20)
    whole, chunked = found
    assert whole is None and chunked(shared) == choose_chunks(shared, slow) > 1


@pytest.fixture(scope="module")
def holding() -> Iterator[Pool]:
    """Two ranks without a garbage collector."""
    here, devices = str(Path(__file__).parent), parse_devices("cpu:2").devices
    with Pool(devices, threads_per_rank=1, engine="holding_engine:HoldingEngine", python_path=(here, FOLDER)) as pool:
        yield pool


def test_a_pool_gives_back_between_runs_and_starts_nothing_for_it(holding: Pool, tiny_hosted: ModelSpec) -> None:
    plan, run = ParallelPlan(ulysses=2), make_run()
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        pool.give_back(pool.devices)
        assert pool.state == "stopped"
    first = holding.sample(tiny_hosted, plan, run).out
    generation, numbers = holding.generation, holding._requests
    request = next(numbers)
    holding.give_back([Device("cuda", 0)])
    assert next(numbers) == request + 1, "no rank computes there, so none is asked"
    given = list[int]()
    with mock.patch.object(Arena, "give_back", lambda _: given.append(1)):
        holding.give_back([holding.devices[1]])
    assert next(numbers) == request + 3 and given == [1], "shared memory goes back, too"
    kept = first.clone()
    holding.give_back(holding.devices)
    assert torch.equal(first, kept), "a result has memory of its own"
    assert torch.equal(holding.sample(tiny_hosted, plan, run).out, first)
    assert holding.generation == generation


@pytest.mark.parametrize(
    ("plan", "cancelled"),
    [("cfg=2", True), ("ring=2", False), ("ulysses=2,weights=sharded", False), ("pipefusion=2", False)],
)
def test_a_run_that_has_ended_holds_no_tensor(
    holding: Pool, tiny_hosted: ModelSpec, plan: str, cancelled: bool
) -> None:
    run = make_run(texts=(7, 12))
    parsed = ParallelPlan.parse(plan)

    def give_up(step: int, _: torch.Tensor) -> None:
        if cancelled and step == 0:
            raise InterruptedError

    held = []
    for _ in range(7):
        with suppress(InterruptedError):
            holding.sample(tiny_hosted, parsed, run, on_step=give_up)
        with Notes() as found:
            holding.run(tiny_hosted, parsed, [call(options=found.option)])
            looks = [tuple(look) for look in found.read()]
        held.append([tensors for tensors, _ in looks])
        assert [kept for _, kept in looks] == [0, 0], "no stage has keys of the run"
    # One that is cancelled leaves two in a rank now and then, until the next run.
    early, late = ([min(counts) for counts in zip(*looks, strict=True)] for looks in (held[1:4], held[4:7]))
    assert all(after <= before for before, after in zip(early, late, strict=True)), (early, late)
