"""What one rank keeps, in this process: weights by bytes and units, models that go for others, what calls leave."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.model_call import CallPlace
from parallel_runtime.models.specs import ShardingSpec
from parallel_runtime.models.specs.found import Found, give_found
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.weights.unit_feed import UnitFeed
from parallel_runtime.wire.requests import ChangeWeights, Step
from parallel_runtime.worker import hosted_weights, loading
from parallel_runtime.worker.held_state import HeldState
from parallel_runtime.worker.hosted_weights import DeltaReceiver, HostedWeights
from parallel_runtime.worker.loading import LoadedModels, open_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """10 fp32 and 6 fp8 numbers of a model, and a VAE's."""
    weights = {"model.diffusion_model.a": torch.zeros(10), "first_stage_model.c": torch.zeros(99)}
    weights["model.diffusion_model.b"] = torch.zeros(6, dtype=torch.float8_e4m3fn)
    save_file(weights, tmp_path / "checkpoint.safetensors")
    return tmp_path / "checkpoint.safetensors"


def held(file: Path, *, size: int = 1, index: int = 0, kept: bool = False, **told: Any) -> HostedWeights:
    """The weights of place `index` of a group."""
    spec = ModelSpec.of(file, "bfloat16", **({"kept": "fp8_e4m3fn"} if kept else {}))
    told = {"device": CPU, "offloaded": False, **told}
    return HostedWeights(spec, group=Axis("shards", size, index), **told)


def test_a_load_says_that_nothing_is_there_before_and_after_comfyui_is_and_once_the_file_is_known(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(hosted_weights, "import_comfyui", lambda *given: asked.append(given))
    monkeypatch.setattr(
        hosted_weights, "recognise", lambda *_, **__: asked.append("file") or SimpleNamespace(quantised=0)
    )
    weights = held(file)
    loading = weights._loading()
    assert (next(loading), asked) == (0, [])
    assert (next(loading), asked) == (0, [(None, CPU)])
    assert (next(loading), asked) == (0, [(None, CPU), "file"])


def test_a_model_goes_to_its_device_layer_by_layer() -> None:
    """So that a rank shows that it lives, and hears a Cancel, while it reads a file of many gigabytes."""
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
    module = torch.nn.ModuleDict({"first": torch.nn.Sequential(*layers), "none": torch.nn.ReLU(), "again": layers[0]})
    module.register_parameter("own", torch.nn.Parameter(torch.zeros(3)))
    moving, places = (
        hosted_weights.move(module, torch.device("meta")),
        lambda: [weight.device.type for weight in module.parameters()],
    )
    assert [(next(moving), places()) for _ in range(2)] == [
        (64, ["cpu", "meta", "cpu"]),
        (128, ["cpu", "meta", "meta"]),
    ]
    assert [*moving] == [128] and places() == ["meta"] * 3
    assert module["again"].weight is layers[0].weight, "weights that two layers share are one"


def test_stages_have_blocks_of_about_equal_bytes_a_token() -> None:
    """A block that hands on two streams has weights for each of them."""
    of = {"double": ("img", "txt"), "single": "img"}
    spec = ShardingSpec(
        attention={"double": "txt+img", "single": "img"},
        cut={"double.0": {"img": "img", "txt": "txt"}},
        gather={"out": "img"},
        hands=of,
    )
    weights, module = HostedWeights.__new__(HostedWeights), torch.nn.Module()
    give_found(module, Found(spec=spec))
    weights._whole = SimpleNamespace(diffusion_model=module)
    weights.stages, weights._stage_shares = 2, ()
    names = ("double.0", "double.1", "single.0", "single.1", "single.2", "single.3")
    weights.staged_blocks = {name: torch.nn.Linear(16 if name[0] == "d" else 8, 9) for name in names}
    runs = []
    for weights._stage in range(2):
        runs.append(weights._own_run())
    assert runs == [range(3), range(3, 6)]


@pytest.mark.parametrize(
    ("stages", "staged"), [(1, ["refiner.0", "layers.0", "layers.1"]), (2, ["layers.0", "layers.1"])]
)
def test_every_stage_has_the_blocks_that_hand_on_all_tokens(file: Path, stages: int, staged: list[str]) -> None:
    weights, module = held(file, stages=stages), torch.nn.Module()
    for name, count in (("refiner", 1), ("layers", 2)):
        module.add_module(name, torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(count)))
    spec = ShardingSpec(
        attention={"refiner": "img", "layers": "img"},
        cut={"refiner.0": {"x": "img"}},
        gather={"refiner.-1": "img"},
        hands={"layers": "img"},
    )
    give_found(module, Found(spec=spec))
    weights._whole = SimpleNamespace(diffusion_model=module)
    weights._share_out_blocks()
    assert list(weights.staged_blocks) == staged
    assert list(weights.blocks_before) == ["refiner.0"][: stages - 1]


@pytest.mark.parametrize(
    ("told", "num_bytes"),
    [
        ({}, 40 + 6),
        ({"device": CUDA}, 40 + 12),  # widened to what is computed in
        ({"device": CUDA, "kept": True}, 16),
        ({"device": CUDA, "size": 2}, 23),
        ({"size": 2, "index": 0, "shares": (3, 1)}, 34),
        ({"size": 2, "index": 1, "shares": (3, 1)}, 11),
        ({"stages": 2}, 23),
        ({"stages": 2, "stage": 1, "stage_shares": (1, 3)}, 34),
        ({"size": 2, "stages": 2}, 11),
        ({"offloaded": True}, 0),
    ],
)
def test_a_load_needs_the_bytes_of_a_ranks_part_of_the_model(file: Path, told: dict[str, Any], num_bytes: int) -> None:
    assert held(file, **told).needed_bytes == num_bytes


def test_a_rank_holds_its_share_of_the_ranks_that_it_gathers_with(file: Path) -> None:
    layout = ParallelPlan.parse("data=2,ulysses=2,shares=3:1:1:3,weights=sharded").layout
    spec, groups = ModelSpec.of(file, "bfloat16"), [Axis("shards", 2, rank % 2) for rank in range(4)]
    opened = [open_model(spec, layout, rank=rank, device=CPU, group=group) for rank, group in enumerate(groups)]
    assert [model.weights.needed_bytes for model in opened] == [34, 11, 11, 34]


@pytest.mark.parametrize(("told", "said"), [({"size": 2}, "sharded"), ({"offloaded": True}, "offloaded")])
def test_a_model_without_blocks_is_not_spread(file: Path, told: dict[str, Any], said: str) -> None:
    module = torch.nn.Bilinear(2, 2, 2)
    whole, weights = held(file), held(file, **told)
    whole._whole = weights._whole = SimpleNamespace(diffusion_model=module)
    assert whole._find_blocks() == {}
    with pytest.raises(
        ValueError, match=f"weights={said} brings blocks one by one, and Bilinear has none; use weights=replic"
    ):
        weights._find_blocks()
    module.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    assert weights._find_blocks() == {"layers.0": module.layers[0]}


@pytest.mark.parametrize(("shards", "offloaded", "num_bytes"), [(None, False, 7), (100, False, 137), (100, True, 37)])
def test_weights_take_the_device_for_their_part_and_buffers_or_for_buffers_alone(
    file: Path, shards: int | None, offloaded: bool, num_bytes: int
) -> None:
    weights: Any = held(file, offloaded=offloaded)
    weights.hook_modules, weights.branches = SimpleNamespace(num_bytes=2), SimpleNamespace(num_bytes=5)
    weights.shards = None if shards is None else SimpleNamespace(num_bytes=shards, buffer_bytes=30)
    assert weights.device_bytes == num_bytes
    assert weights.parameter_bytes == (shards or 0)


@pytest.mark.parametrize(
    ("needed", "budget", "evicted"),
    [(70, 100, []), (71, 100, [3]), (80, 100, [3]), (81, 100, [3, 1]), (101, 100, [3, 1, 2]), (5, None, [3])],
)
def test_models_go_in_the_order_told_until_the_next_one_fits(
    monkeypatch: pytest.MonkeyPatch, needed: int, budget: int | None, evicted: list[int]
) -> None:
    let_go = list[int]()
    models: Any = LoadedModels(rank=0, device=CPU, memory=lambda: None)  # type: ignore[arg-type,return-value]
    models.update((handle, SimpleNamespace(weights=SimpleNamespace(device_bytes=10))) for handle in (1, 2, 3))
    monkeypatch.setattr(models, "_let_go", lambda: let_go.append(1))
    monkeypatch.setattr(loading, "free_bytes", lambda device: 4 + len(let_go))
    assert models._make_room(needed, order=(3, 9, 1, 2), budget=budget) == evicted
    assert [len(let_go), sorted(models)] == [len(evicted), sorted({1, 2, 3} - {*evicted})]


def test_strengths_alone_change_what_runs_beside_a_layer_and_nothing_that_is_merged() -> None:
    told = list[dict[str, list[float]]]()
    weights: Any = SimpleNamespace(branches=SimpleNamespace(set_strengths=told.append))
    receiver = DeltaReceiver(weights)
    assert not receiver.changed
    receiver._order = ["a", 0.5, "b", None, "a"]
    assert receiver.changed
    assert receiver.set_strengths((1.0, 0.5, 2.0, 9.0, 3.0))
    assert (told, receiver.version) == ([{"a": [1.0, 3.0], "b": [2.0]}], 1)
    assert not receiver.set_strengths((1.0, 0.25, 2.0, 9.0, 3.0))
    assert (len(told), receiver.version) == (1, 2)


SHARDS = {"a": torch.tensor([1, 2], dtype=torch.uint8), "b": torch.tensor([3], dtype=torch.uint8)}


@pytest.fixture
def feed() -> UnitFeed:
    """One rank's, whose units of two bytes and one are copied whole."""
    made = UnitFeed(Axis("shards"), lambda unit: (SHARDS[unit].numel(),), device=CPU, offloaded=True)
    assert made.buffer_bytes == 0
    made.fit(SHARDS)
    return made


def test_units_come_in_the_order_that_was_told_and_one_more_is_under_way(feed: UnitFeed) -> None:
    assert (feed.buffer_bytes, feed._arriving) == (4, None)
    feed.begin(("a", "b", "a"), SHARDS)
    for unit, last in (("a", False), ("a", False), ("b", False), ("a", True)):
        assert feed.take(unit).tolist() == SHARDS[unit].tolist()
        assert (feed._arriving is None) == last
    feed.end()
    feed.begin((), SHARDS)
    assert feed._arriving is None
    buffers = feed._buffers
    feed.fit(SHARDS)
    assert feed._buffers is buffers
    feed.fit(["b"])
    assert feed.buffer_bytes == 2
    feed.begin(["b"], SHARDS)
    feed.end()
    assert feed._arriving is None


@pytest.mark.parametrize(("index", "own"), [(0, 2), (1, 3)])
def test_a_ranks_largest_part_of_a_unit_is_copied_to_its_device_first(index: int, own: int) -> None:
    lengths = {"a": (1, 3), "b": (2, 1)}
    made = UnitFeed(Axis("shards", 2, index), lengths.__getitem__, device=CPU, offloaded=True)
    made.fit(lengths)
    assert made.buffer_bytes == 2 * (1 + 3) + own


def test_a_unit_that_is_not_due_is_refused_and_so_are_buffers_while_one_is_in_flight(feed: UnitFeed) -> None:
    with pytest.raises(RuntimeError, match="weights of 'a' are asked for, but none is due; say `begin`"):
        feed.take("a")
    feed.begin(("a", "b"), SHARDS)
    with pytest.raises(RuntimeError, match="weights of 'b' are asked for, but 'a' is due"):
        feed.take("b")
    for again in (lambda: feed.begin(("a",), SHARDS), lambda: feed.fit(["b"])):
        with pytest.raises(RuntimeError, match="the weights of 'a' are still in flight; end the passes"):
            again()
    feed.take("a")
    feed.take("b")
    with pytest.raises(RuntimeError, match="weights of 'a' are asked for, but none is due"):
        feed.take("a")


PIECE, OTHER, STAGES = BatchSlice(0, 0, 1), BatchSlice(0, 1, 2), ParallelPlan(pipefusion=2, warmup_steps=2)
NEXT = BatchSlice(1, 0, 1)


def begun(state: HeldState, *places: CallPlace | None, rows: Any = None, tokens: int = 8, epoch: int = 1) -> HeldState:
    """The state once a step with calls of these places has begun, whose rows are all of the first batch group."""
    rows = rows or (tuple(BatchSlice(number, 0, 1) for number in range(len(places))), ())
    step = Step(model=1, plan=STAGES, calls=(), batch_groups=rows, repeated={}, epoch=epoch, places=places)
    state.begin(step, {f"{number}.t0": torch.zeros(1, tokens, 4) for number in range(len(places))})
    return state


ONE, TWO = CallPlace("a run", "cond"), CallPlace("another run", "cond")


def test_calls_of_a_run_warm_up_and_then_find_what_the_one_before_left() -> None:
    state = HeldState(CPU)
    keys = [begun(state, ONE).keys_of(PIECE) for _ in range(2)]
    assert state.warms_up(PIECE)
    keys += [begun(state, ONE).keys_of(PIECE) for _ in range(2)]
    assert [each is keys[0] for each in keys] == [True] * 4 and not state.warms_up(PIECE)
    with pytest.raises(RuntimeError, match="there are no keys in slot 0 of epoch 1"):
        state.keys_of(OTHER)
    assert begun(state, CallPlace("a run", "uncond")).warms_up(PIECE), "the other side"
    assert begun(state, ONE, tokens=12).warms_up(PIECE), "another shape"
    assert begun(state, ONE, rows=((), (PIECE,))).warms_up(PIECE), "rows of another batch group"
    assert not begun(state, ONE).warms_up(PIECE)
    run = state.run
    assert begun(state, TWO).run != run is not None
    assert begun(state, ONE).warms_up(PIECE) and state.keys_of(PIECE) is not keys[0], (
        "of the run before nothing is kept"
    )


def test_warm_up_is_of_steps_of_which_a_sampler_may_make_several_calls_each() -> None:
    """heun's, to the end of three steps: the second call of a step is at the sigma of the next one."""
    state, told = HeldState(CPU), {"sigmas": {"t": 0}, "sample_sigmas": {"t": 1}}
    call = {"call": {"d": {"args": {"l": []}, "kwargs": {"d": {"transformer_options": {"d": told}}}}}, "tensors": 2}
    found = []
    for sigma in (1.0, 0.6, 0.6, 0.3, 0.3):
        step = Step(model=1, plan=STAGES, calls=(call,), batch_groups=((PIECE,),), repeated={}, epoch=1, places=(ONE,))
        state.begin(step, {"0.t0": torch.tensor([sigma] * 2), "0.t1": torch.tensor([1.0, 0.6, 0.3, 0.0])})
        found.append(state.warms_up(PIECE))
    assert found == [True, True, True, False, False]
    whole = replace(step, plan=replace(STAGES, warmup_steps=3), epoch=2)
    for _ in range(5):  # at the last sigma, more often than there are steps
        state.begin(whole, {"0.t0": torch.tensor([0.3]), "0.t1": torch.tensor([1.0, 0.6, 0.5, 0.3])})
        assert state.warms_up(PIECE), "as many steps as there are make all of it exact"


@pytest.mark.parametrize("other", ["epoch", "dropped"])
def test_nothing_is_found_in_another_epoch_nor_once_it_was_dropped(other: str) -> None:
    state = HeldState(CPU)
    left = [begun(state, ONE).residuals_of(PIECE) for _ in range(3)]
    assert left[0] is left[2] is not None and not state.warms_up(PIECE)
    if other == "dropped":
        state.drop()
    begun(state, ONE, epoch=1 + (other == "epoch"))
    assert state.residuals_of(PIECE) is not left[0] and state.warms_up(PIECE)


def test_runs_that_travel_together_each_find_their_own_until_a_new_one_joins() -> None:
    """Of a list over replicas: the calls of each step come in one request, and a run that ends first stops none."""
    state, rows = HeldState(CPU), ((PIECE,), (NEXT,))
    for step in range(4):
        begun(state, ONE, TWO, rows=rows)
        assert [state.warms_up(each) for each in (PIECE, NEXT)] == [step < 2] * 2
        assert state.residuals_of(PIECE) is not state.residuals_of(NEXT)
    assert not begun(state, ONE, rows=((PIECE,), ())).warms_up(PIECE)
    assert begun(state, ONE, CallPlace("a third", "cond"), rows=rows).warms_up(PIECE)


def test_a_call_of_no_run_is_warm_up_and_leaves_nothing() -> None:
    state = HeldState(CPU)
    assert (state.run, state.residuals_of(PIECE)) == (None, None)
    assert begun(state, ONE).run is not None
    assert begun(state, ONE, None).run is None, "nothing will follow the second"
    assert state.warms_up(NEXT) and state.keys_of(NEXT) is not state.keys_of(NEXT)
    assert (state.residuals_of(NEXT), len(state.slots)) == (None, 0)
    begun(state)
    assert begun(state, None, None).run is None and state.warms_up(PIECE)


@pytest.mark.parametrize(
    ("stored", "taken"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.float8_e4m3fn, torch.float16),
     (torch.int32, torch.float16)],
)  # fmt: skip
def test_loras_beside_a_layer_are_in_its_dtype_or_in_that_which_is_computed_in(
    stored: torch.dtype, taken: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[torch.dtype]()
    monkeypatch.setattr(hosted_weights, "runs_as_branch", lambda *_: True)
    monkeypatch.setattr(hosted_weights.LowRank, "of", lambda *_, dtype, device: asked.append(dtype))
    module = SimpleNamespace(get_submodule=lambda _: "layer")
    receiver: Any = DeltaReceiver.__new__(DeltaReceiver)
    receiver._weights = SimpleNamespace(module=module, declared={"a.weight": stored}, dtype=torch.float16, device=CPU)
    receiver._changes = SimpleNamespace(pristine=lambda _: torch.zeros(1))
    assert receiver._loras_of("a.weight", ["a delta"]) == [None] and asked == [taken]


def test_a_change_of_weights_begins_with_a_look_at_the_file() -> None:
    """Whatever message of it this is: weights are made anew of what the file says."""
    looks = list[int]()

    def refuse_changed() -> None:
        looks.append(1)
        raise ValueError("the file was written to")

    weights: Any = SimpleNamespace(refuse_changed=refuse_changed)
    receiver = DeltaReceiver(weights)
    change = ChangeWeights(model=1, records=(), side_branch=False, first=True, last=False)
    with pytest.raises(ValueError, match="the file was written to"):
        receiver.take(change, {}, cancelled=lambda: False, beat=lambda: None)
    assert looks == [1] and receiver._changes is None
