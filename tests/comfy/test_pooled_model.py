"""What ComfyUI's memory manager is told of weights in the workers, and who may ask for a pool while one loads."""

import dataclasses
import threading
import weakref
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

CUDA_0, CPU = torch.device("cuda", 0), torch.device("cpu")
TOTAL, BIGGEST = 24_000_000_001, 700_000_000


@pytest.fixture(scope="module")
def pooled_model(module_of_pack) -> ModuleType:
    return module_of_pack("nodes.host.model.pooled_model")


@pytest.fixture(scope="module")
def plan_of(module_of_pack) -> Any:
    return module_of_pack("parallel_runtime.plan").ParallelPlan.parse


@pytest.fixture(scope="module")
def made(module_of_pack, pooled_model, plan_of) -> Any:
    """A model on four devices of a kind; nothing is started."""
    device = module_of_pack("parallel_runtime.devices").Device
    spec = module_of_pack("parallel_runtime.checkpoint").ModelSpec("/models/flux.safetensors", "bfloat16", TOTAL, 0)

    def make(kind: str, plan: str) -> Any:
        sizes = pooled_model.WeightSizes(total=TOTAL, biggest_block=BIGGEST)
        devices = tuple(device(kind, index) for index in range(4))
        return pooled_model.PooledModel(devices=devices, spec=spec, plan=plan_of(plan), sizes=sizes, num_heads=24)

    return make


# By plan, bytes that ranks on cuda:0 keep there, and that four ranks on the CPU keep in the one memory they share.
KEPT = {
    "ulysses=4": (TOTAL, 4 * TOTAL),
    "ulysses=2": (TOTAL, 2 * TOTAL),
    "ulysses=2,cfg=2,weights=sharded": (6_000_000_001, 4 * 6_000_000_001),
    "ulysses=2,data=2,weights=sharded": (12_000_000_001, 4 * 12_000_000_001),
    "ulysses=2,weights=sharded,shares=3:1": (18_000_000_001, 18_000_000_001 + 6_000_000_001),
    "ulysses=2,weights=offloaded": (0, 2 * 12_000_000_001),
}


@pytest.mark.parametrize("plan", KEPT)
def test_weights_count_where_they_lie(plan: str, made) -> None:
    on_gpus, on_cpu = made("cuda", plan), made("cpu", plan)
    assert on_gpus.bytes_on(CUDA_0, on_gpus.plan.layout) == KEPT[plan][0]
    assert on_cpu.bytes_on(CPU, on_cpu.plan.layout) == KEPT[plan][1]
    assert on_gpus.bytes_on(CPU, on_gpus.plan.layout) == 0, (
        "ranks on GPUs take nothing of where ComfyUI runs on the CPU"
    )


def test_a_device_of_no_rank_keeps_nothing(made) -> None:
    model = made("cuda", "ulysses=2")
    assert model.bytes_on(torch.device("cuda", 1), model.plan.layout) == TOTAL
    assert model.bytes_on(torch.device("cuda", 3), model.plan.layout) == 0


def test_blocks_that_visit_count_only_where_weights_are_apart(made) -> None:
    assert made("cuda", "ulysses=4").visiting_bytes(made("cuda", "ulysses=4").plan) == 0
    for plan in ("ulysses=4,weights=sharded", "weights=offloaded"):
        model = made("cuda", plan)
        assert model.visiting_bytes(model.plan) == 2 * BIGGEST


def test_plans_share_weights_that_differ_in_the_number_of_ranks_alone(made) -> None:
    assert made("cpu", "ulysses=4").weights == made("cpu", "cfg=2").weights
    assert made("cpu", "ulysses=4,weights=sharded").weights != made("cpu", "ulysses=4").weights
    assert made("cpu", "ulysses=4,weights=sharded").weights != made("cpu", "ulysses=2,weights=sharded").weights


def test_others_may_ask_for_their_pools_while_one_loads(module_of_pack, made) -> None:
    registry = module_of_pack("nodes.host.model.pools").PoolRegistry()
    model = made("cpu", "ulysses=4")
    answered = threading.Event()

    def ask() -> None:
        registry.pool(model.devices[:2])
        answered.set()

    def load(_: object) -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(timeout=300)

    registry.load(model.weights, model.plan, load)
    assert answered.is_set()


class Workers:
    """What a registry asks of a pool."""

    state, generation, released = "idle", 1, 0


def test_what_was_measured_and_noted_is_of_one_set_of_workers(module_of_pack, made) -> None:
    registry, workers = module_of_pack("nodes.host.model.pools").PoolRegistry(), Workers()
    devices = made("cpu", "ulysses=4").devices
    registry._pools[devices] = workers
    assert registry.measured(devices) == []
    assert registry.measured(devices, lambda pool: [pool.generation]) == [1]
    registry.note_unlike(devices, ["another torch"])
    assert registry.measured(devices) == registry.measured(devices, lambda _: [0]) == [1]
    assert registry.unlike(devices) == ["another torch"]
    workers.generation = 2
    assert registry.measured(devices) == registry.unlike(devices) == []
    assert registry.measured(devices, lambda pool: [pool.generation]) == [2]
    workers.state = "stopped"
    assert registry.measured(devices) == [], "of workers that are gone"


class Holding(Workers):
    """Workers that hold what they are told to, and note what is asked of them."""

    def __init__(self, *held: object) -> None:
        self.held, self.asked = [*held], list[str]()

    def holds(self, spec: object, plan: object) -> bool:
        return (spec, plan) in self.held

    def layout_of(self, spec: object, plan: object) -> object:
        return next((plan.layout for name, plan in self.held if name == spec), None)

    def unload(self, spec: object, plan: object) -> None:
        self.held.remove(next(each for each in self.held if each[0] == spec))
        self.asked.append("unload")

    def close(self) -> None:
        self.asked.append("close")
        self.released += self.state != "stopped"
        self.state = "stopped"


class Root:
    """What all MODELs on the same weights are clones of; there is one."""

    def __init__(self) -> None:
        self.clones = ["a MODEL"]


def test_weights_that_no_model_wants_make_room_and_idle_workers_end_for_others(module_of_pack, made, plan_of) -> None:
    registry = module_of_pack("nodes.host.model.pools").PoolRegistry()
    device, plan = module_of_pack("parallel_runtime.devices").Device, plan_of("ulysses=2")
    two, four, far = made("cpu", "ulysses=2").devices[:2], made("cpu", "ulysses=2").devices, (device("cpu", 0, "b"),)
    first, second, third = (
        (devices, name, (2, False, 1, 1)) for devices, name in ((two, "a"), (two, "b"), (four, "c"))
    )
    registry._pools |= {
        two: (workers := Holding(("a", plan), ("b", plan), ("a", plan))),
        four: Holding(),
        far: Holding(),
    }
    registry._pools[four].state = "stopped"
    assert (registry.last_loaded, registry.root(first, Root)) == (None, root := registry.root(first, Root))
    loaded = []
    for weights in (first, second):  # nobody has a MODEL of the second
        registry.load(weights, plan, loaded.append)
    assert loaded == [workers, workers] and registry.last_loaded is None and workers.asked == []
    assert registry.plan_of_load(second, plan_of("cfg=2")) == plan
    assert registry.plan_of_load(third, plan_of("cfg=2")) == plan_of("cfg=2")
    registry.load(first, plan, loaded.append)
    assert workers.held == [("a", plan)] * 2 and workers.asked == ["unload"] and registry.last_loaded is root
    registry.unload(second, plan)
    registry.unload(first, plan_of("ulysses=4"))  # the MODEL that is asked has a plan of more ranks than the weights
    assert workers.asked == ["unload"] * 2 and workers.held == [("a", plan)]
    # Another set of devices starts: workers that hold nothing end, others stay.
    registry.load(first, plan, loaded.append)
    kept = registry.root(third, Root)
    assert registry.lost_generations() == 1, "of the pool without workers"
    registry.load(third, plan, loaded.append)
    assert registry._pools[far].asked == ["close"] and workers.asked == ["unload"] * 2
    assert registry.lost_generations() == 1 and registry.last_loaded is kept
    registry.unload(first, plan)
    assert workers.held == [] and registry.all() == [*registry._pools.values()]
    # Shares, and weights that go by another name.
    assert registry.is_cut_by(first, (2, 1)) and registry.is_cut_by(first, None)
    registry.note_cut(first, (2, 1))
    assert registry.is_cut_by(first, (2, 1)) and not registry.is_cut_by(first, None)
    registry.rename(first, second)
    assert registry.is_cut_by(second, (2, 1)) and not registry.is_cut_by(second, ()) and registry.is_cut_by(first, ())
    assert registry.root(second, Root) is root and registry.plan_of_load(first, plan_of("cfg=2")) == plan_of("cfg=2")
    # What ends.
    assert registry.has_something_to_release()
    registry._pools[far].state = "idle"
    registry.close_without(["b"])
    assert registry._pools[far].asked == ["close"]
    registry.close_without(["c"])
    assert registry._pools[far].asked == ["close"] * 2 and workers.asked == ["unload"] * 3
    registry.close_all()
    assert workers.asked == ["unload"] * 3 + ["close"] and registry.last_loaded is None
    assert not registry.has_something_to_release() and not registry.is_alive(two)


def test_workers_are_waited_for_without_the_lock_and_may_fail_as_they_free_weights(
    module_of_pack, made, plan_of, caplog: pytest.LogCaptureFixture
) -> None:
    """ComfyUI's manager frees weights in the thread that runs its prompts, in which nothing takes an error."""
    registry, plan = module_of_pack("nodes.host.model.pools").PoolRegistry(), plan_of("ulysses=2")
    error = module_of_pack("parallel_runtime.errors").PoolError
    two, four = made("cpu", "ulysses=2").devices[:2], made("cpu", "ulysses=2").devices

    class Failing(Holding):
        def unload(self, spec: object, plan: object) -> None:
            assert not registry._lock.locked()
            super().unload(spec, plan)
            raise error("no heartbeat for 120 s", rank=1)

        def close(self) -> None:
            assert not registry._lock.locked()
            super().close()

    registry._pools |= {two: Failing(("b", plan), *(("a", plan),) * 4), four: (other := Holding())}
    other.state = "stopped"
    first, second, third = (
        (devices, name, (2, False, 1, 1)) for devices, name in ((two, "a"), (two, "b"), (four, "c"))
    )
    roots, loaded = [registry.root(each, Root) for each in (second, third)], []
    registry.load(first, plan, loaded.append)
    registry.unload(first, plan)
    for weights in (first, second, first, third):  # nobody wants the first, which leaves for the second and third
        registry.load(weights, plan, loaded.append)
    root = registry.root(first, Root)
    registry.load(first, plan, loaded.append)
    root.clones.clear()
    registry.rename(second, first)
    assert caplog.text.count("failed as they were to free weights: rank 1: no heartbeat for 120 s") == 4
    assert len(loaded) == 6 and len(roots) == 2 and registry._pools[two].held == [("b", plan)]
    registry.close_all()
    assert registry._pools[two].asked == ["unload"] * 4 + ["close"]


def test_a_model_that_is_collected_under_the_registrys_lock_asks_whether_a_callback_runs(
    module_of_pack, made, plan_of
) -> None:
    registry = module_of_pack("nodes.host.model.pools").PoolRegistry()
    two = made("cpu", "ulysses=2").devices[:2]
    registry._pools[two] = workers = Holding(("a", plan_of("ulysses=2")))
    with registry._lock:
        for asked in (True, False):
            workers.asked_here = asked
            assert registry.asked_here(two) is asked and not registry.asked_here(("none",))


def test_weights_keep_their_root_without_a_model_until_a_load_after_they_left(module_of_pack, made, plan_of) -> None:
    registry, plan = module_of_pack("nodes.host.model.pools").PoolRegistry(), plan_of("ulysses=2")
    two = made("cpu", "ulysses=2").devices[:2]
    first, second = ((two, name, (2, False, 1, 1)) for name in "ab")
    registry._pools[two] = workers = Holding(("a", plan))
    left = weakref.ref(registry.root(first, Root))
    assert left() is None, "nothing was loaded for it"
    for unload in (registry.unload, lambda *_: None):  # ComfyUI's manager does; what is loaded next makes room
        workers.held, workers.asked = [("a", plan)], []
        left = weakref.ref(root := registry.root(first, Root))
        registry.load(first, plan, str)
        registry.load(second, plan, str)
        assert workers.asked == [], "of a MODEL that is there"
        registry.load(first, plan, str)
        root.clones.clear()
        del root
        assert registry.last_loaded is left() is not None
        unload(first, plan)
        assert left() is not None, "the manager that unloads it reads it still"
        registry.load(second, plan, str)
        assert left() is None and workers.held == [] and workers.asked == ["unload"]


def test_a_node_that_releases_keeps_no_root_and_so_no_mapped_file(module_of_pack, made, plan_of) -> None:
    registry, plan = module_of_pack("nodes.host.model.pools").PoolRegistry(), plan_of("ulysses=2")
    two = made("cpu", "ulysses=2").devices[:2]
    weights = two, "a", (2, False, 1, 1)
    registry._pools[two] = Holding(("a", plan))
    left = weakref.ref(root := registry.root(weights, Root))
    registry.note_use(weights, "a prompt")
    registry.load(weights, plan, str)
    root.clones.clear()
    del root
    registry.close_all()
    assert left() is not None, "the panel's Release does so in a thread of its own"
    registry.forget_left()
    assert left() is None and registry._used_by == {}


def test_weights_that_crowd_a_device_leave_where_another_set_of_workers_loads(
    module_of_pack, made, plan_of, caplog
) -> None:
    """As where devices in SP Config were changed, and ComfyUI's cache keeps the MODEL of before. Here all that this
    prompt has not used crowds."""
    registry, plan = module_of_pack("nodes.host.model.pools").PoolRegistry(), plan_of("ulysses=2")
    four = made("cuda", "ulysses=2").devices
    sets = {"a": four[1:3], "b": four[1:], "c": four[:1], "d": four[1:3]}
    weights = {name: (devices, name, (2, False, 1, 1)) for name, devices in sets.items()}
    for devices in sets.values():
        registry._pools[devices] = Holding()
    roots, asked = [], []

    def crowds(root: object, its_plan: object, now: bool) -> bool:
        asked.append((root in roots, its_plan, now))
        return not now

    def run(prompt: str, *names: str) -> None:
        for name in names:
            devices, *_ = weights[name]
            roots.append(registry.root(weights[name], Root))
            registry.note_use(weights[name], prompt)
            if not registry._pools[devices].holds(name, plan):
                registry.load(
                    weights[name], plan, lambda pool, name=name: pool.held.append((name, plan)), crowds=crowds
                )

    def held() -> str:
        return "".join(sorted(name for name, devices in sets.items() if registry._pools[devices].holds(name, plan)))

    run("1", "a", "c")
    run("2", "b")
    assert held() == "bc", "the card of c is no other set's"
    run("3", "a", "b")
    assert held() == "abc", "one graph has both"
    run("4", "b", "a", "d")
    assert held() == "abcd"
    run("5", "d")
    assert held() == "abcd", "nothing is loaded"
    run("6", "b", "c")
    registry.unload(weights["b"], plan)
    run("7", "b")
    assert held() == "bc", "neither a nor d was used since"
    assert set(asked) == {(True, plan, False), (True, plan, True)}
    for workers in registry._pools.values():  # a pool whose workers fail then is not the one that loads
        workers.unload = lambda spec, plan: (_ for _ in ()).throw(
            module_of_pack("parallel_runtime.errors").PoolError("x")
        )
    run("8", "a")
    assert "parallel workers failed as they were to free weights: x" in caplog.text


@pytest.mark.parametrize(
    ("plan", "other", "gib", "now", "crowded"),
    [
        ("ulysses=2", "ulysses=2", 72, True, False),  # 48 GB of 77, and 26.4 beside 77 alone
        ("ulysses=2", "ulysses=2", 72, False, True),
        ("ulysses=2", "ulysses=2", 76, False, False),
        ("ulysses=2", "ulysses=2", 48, True, True),
        ("ulysses=4,weights=sharded", "ulysses=2", 48, False, True),
        ("ulysses=4,weights=sharded", "ulysses=2", 54, False, False),
        ("ulysses=2", "weights=offloaded", 48, False, False),
        ("ulysses=2", "ulysses=1", 48, False, False),  # it is on none of our ranks' devices
    ],
)
def test_two_sets_of_weights_crowd_a_gpu_that_both_have(
    plan: str, other: str, gib: int, now: bool, crowded: bool, made, pooled_model, monkeypatch
) -> None:
    monkeypatch.setattr(pooled_model, "whole_bytes", lambda devices: [gib * 2**30] * len(devices))
    ours, theirs = made("cuda", plan), made("cuda", other)
    theirs.devices = (*theirs.devices[2:], *theirs.devices[:2]) if other == "ulysses=1" else theirs.devices[:2]
    root = SimpleNamespace(model=SimpleNamespace(pooled=theirs))
    assert ours._is_crowded_by(ours.plan, root, theirs.plan, now) == crowded
    on_cpu = made("cpu", plan)
    assert not on_cpu._is_crowded_by(on_cpu.plan, root, theirs.plan, now)


def test_workers_that_fail_after_a_run_hide_neither_its_error_nor_its_result(
    monkeypatch: pytest.MonkeyPatch, module_of_pack, pooled_model, made, caplog: pytest.LogCaptureFixture
) -> None:
    """ComfyUI cleans up where the run's error passes by: what that raised would be all that anybody sees."""
    error = module_of_pack("parallel_runtime.errors").PoolError

    class Workers:
        def give_back(self, devices: list, **_: bool) -> None:
            raise error("killed by SIGKILL", rank=1, device="cuda:0", remedy="the next prompt starts fresh workers")

    monkeypatch.setattr(pooled_model.PooledModel, "started", True)
    monkeypatch.setattr(pooled_model.PooledModel, "pool", Workers())
    model = made("cuda", "ulysses=4")
    with pytest.raises(InterruptedError, match="the user cancels"):
        try:
            raise InterruptedError("the user cancels")
        finally:
            model.give_back(CUDA_0)
    assert "failed after a sampling run: rank 1 (cuda:0): killed by SIGKILL; the next prompt" in caplog.text
    model.give_back(CUDA_0)  # after a run that ended well


@pytest.mark.parametrize(
    ("kind", "device", "shared"),
    [
        *(("cuda", CUDA_0, [0]), ("cuda", torch.device("cuda", 7), None), ("cuda", CPU, None)),
        *(("cpu", CPU, None), ("cpu", CUDA_0, None)),
    ],
)
def test_after_a_run_ranks_on_comfyuis_gpu_give_back_what_they_cached(
    monkeypatch: pytest.MonkeyPatch, pooled_model, made, kind: str, device: torch.device, shared: list[int] | None
) -> None:
    asked: list[tuple[list[int], bool]] = []
    graphs: list[bool] = []

    class Workers:
        def give_back(self, devices: list, *, of_run: bool, **told: bool) -> None:
            asked.append(([each.index for each in devices], of_run))
            graphs.append(told["graphs"])

        def memory(self) -> list[dict[str, int]]:
            return [{"reserved_bytes": 3000, "allocated_bytes": 2000}, {"reserved_bytes": 2**40}]

    monkeypatch.setattr(pooled_model.PooledModel, "started", True)
    monkeypatch.setattr(pooled_model.PooledModel, "pool", Workers())
    free = 12 * 2**30 - 1000  # with what the rank there caches, just enough

    def get_free_memory(_: object) -> int:
        if free < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return free

    management = SimpleNamespace(get_free_memory=get_free_memory)
    monkeypatch.setattr(pooled_model, "comfy", SimpleNamespace(model_management=management))
    model = made(kind, "ulysses=4")
    model.give_back(device)
    assert asked == ([] if shared is None else [(shared, False)])
    asked.clear()
    model.give_back(device, graphs=True)  # ranks elsewhere are told, too: theirs go before a run without them
    assert asked == ([] if kind == "cpu" else [(shared or [], False)])
    keeps = dataclasses.replace(model, keeps_state=True)
    keeps.give_back(device, graphs=True)  # a class that keeps something has it freed anyway
    assert asked[-1] == (shared or [], True)
    assert graphs[-1] is (kind == "cuda"), "they stay where enough of the device is free"
    keeps.give_back(device)
    assert graphs[-1] is False, "but those of a try"
    for less in (1, 12 * 2**30 + 1):
        free = 12 * 2**30 - 1000 - less
        keeps.give_back(device, graphs=True)
        assert graphs[-1] is (kind == "cuda" and shared is None), "of its device none is free"


ON_HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "plan", "held", "used", "freed"),
    [
        ("cuda", "ulysses=2", None, [0, 1, 3], {1: TOTAL}),
        ("cuda", "ulysses=2,weights=sharded", None, [1], {1: 12_000_000_001 + 2 * BIGGEST}),
        ("cuda", "ulysses=2,weights=sharded,shares=3:1", None, [1], {1: 6_000_000_001 + 2 * BIGGEST}),
        ("cuda", "weights=offloaded", None, [0, 1], {}),
        ("cuda", "ulysses=4", None, [2, 3], {2: TOTAL, 3: TOTAL}),
        ("cuda", "ulysses=4", "ulysses=4", [2, 3], {2: 0, 3: 0}),
        ("cuda", "ulysses=4", "ulysses=2", [1, 3], {1: 0, 3: TOTAL}),
        ("cpu", "ulysses=2", None, [0, 1], {}),
    ],
)
def test_comfyui_gives_up_what_it_holds_on_the_other_gpus_of_ranks_where_they_need_the_room(
    monkeypatch, pooled_model, made, plan_of, kind: str, plan: str, held: str | None, used: list[int],
    freed: dict[int, int],
) -> None:  # fmt: skip
    """It holds models on the GPUs `used`, as where a node chose one for a text encoder; on its own it has made room."""
    asked: dict[int, float] = {}
    emptied: list[bool] = []
    pinned: list[float] = []
    there = SimpleNamespace(offload_device=ON_HOST)
    management = SimpleNamespace(
        current_loaded_models=[SimpleNamespace(device=torch.device("cuda", index), model=there) for index in used],
        free_memory=lambda needed, device: asked.update({device.index: needed}),
        get_torch_device=lambda: CUDA_0,
        minimum_inference_memory=lambda: 900.0,
        soft_empty_cache=lambda: emptied.append(True),
        ensure_pin_budget=lambda size: pinned.append(size),
    )
    monkeypatch.setattr(pooled_model, "comfy", SimpleNamespace(model_management=management))
    monkeypatch.setattr(pooled_model, "off", lambda feature: "")
    layout = None if held is None else plan_of(held).layout
    monkeypatch.setattr(pooled_model.PooledModel, "held_layout", lambda self, plan: layout)
    monkeypatch.setattr(pooled_model.PooledModel, "cached_on", lambda self, device: 100 * device.index)
    model = made(kind, plan)
    model._make_room(model.plan)
    assert asked == {index: pytest.approx(1.1 * more + 900 - 100 * index) for index, more in freed.items()}
    assert pinned == ([TOTAL] if "offloaded" in plan else []), "host memory that ComfyUI has pinned"
    assert emptied == ([True] if kind == "cuda" and held is None else []), "what torch keeps for ComfyUI is no rank's"
    asked.clear()
    management.get_torch_device = lambda: torch.device("cuda", 1)  # ComfyUI's own GPU is another
    model._make_room(model.plan)
    assert 1 not in asked and (0 in asked) == (kind == "cuda" and 0 in used)
    management.get_torch_device = lambda: CUDA_0
    asked.clear()
    del management.ensure_pin_budget  # as in an older ComfyUI
    there.offload_device = CUDA_0  # --gpu-only: what is given up goes there
    model._make_room(model.plan)
    there.offload_device = ON_HOST
    monkeypatch.setattr(pooled_model, "off", lambda feature: "" if feature != "room" else "ComfyUI lacks it")
    model._make_room(model.plan)
    assert asked == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_room_is_made_before_workers_load_and_each_run_and_several_devices_are_measured_before_a_load(
    ranks: int, monkeypatch, pooled_model, made
) -> None:
    told: list[str] = []
    pool = SimpleNamespace(load=lambda *_, **__: told.append("load") or SimpleNamespace(rank_load_s={1: 2.5}, ranks=[]))
    registry = SimpleNamespace(
        measured=lambda devices, measure: told.append(f"measure {len(devices)}"),
        note_use=lambda weights, prompt: told.append("used"),
        load=lambda weights, plan, load, **_: told.append("unwanted go") or load(pool),
        pool=lambda devices: pool,
    )
    holds: list[bool] = [False, True]
    for name, value in {"POOLS": registry, "unlike_host": lambda devices, ranks: []}.items():
        monkeypatch.setattr(pooled_model, name, value)
    monkeypatch.setattr(pooled_model.ModelSpec, "refuse_changed", lambda spec: None)
    monkeypatch.setattr(pooled_model.PooledModel, "holds", lambda self, plan: holds.pop(0))
    monkeypatch.setattr(pooled_model.PooledModel, "_make_room", lambda self, plan: told.append("room"))
    model = made("cuda", "ulysses=2")
    model.devices = model.devices[:ranks]
    took = [model.ensure(model.plan, None, progress=print, check_cancelled=print) for _ in range(2)]
    assert took == [{1: 2.5}, {}], "seconds by rank that had to load"
    measured = ["measure 2"] if ranks == 2 else []
    assert told == ["used", "unwanted go", "room", *measured, "load", "load", "used", "room", "load"]


def test_what_ranks_only_keep_on_comfyuis_gpu_is_free_for_their_next_call(module_of_pack, monkeypatch, made) -> None:
    patcher = module_of_pack("nodes.host.model.patcher")
    pooled, it = made("cuda", "ulysses=4"), patcher.RemotePatcher.__new__(patcher.RemotePatcher)
    said = [{"reserved_bytes": 3000, "allocated_bytes": 2000}, {"reserved_bytes": 2**40}, {}, {}]
    monkeypatch.setattr(type(pooled), "started", True)
    monkeypatch.setattr(type(pooled), "pool", SimpleNamespace(memory=lambda: said))
    stock = patcher.RemotePatcher.__mro__[1]
    monkeypatch.setattr(stock, "get_free_memory", lambda self, device: 500, raising=False)
    it.model = SimpleNamespace(pooled=pooled)
    assert (it.get_free_memory(CUDA_0), it.get_free_memory(CPU)) == (1500, 500)
    said[0] |= {"allocated_bytes": 2900, "staying_bytes": 700}
    assert it.get_free_memory(CUDA_0) == 1300, "blocks that stay whole go for a call that takes more"
    monkeypatch.setattr(type(pooled), "started", False)
    assert it.get_free_memory(CUDA_0) == 500


@pytest.fixture
def patched(module_of_pack, made, monkeypatch) -> Any:
    """A MODEL's patcher on two GPUs with rooms as told, by its plan and what SP Config says of shares."""
    patcher, measures = (module_of_pack(f"nodes.host.model.{name}") for name in ("patcher", "measures"))
    decision = module_of_pack("parallel_runtime.planner.automatic").Decision

    def make(plan: str, shares: tuple[int, ...] | None, *room: float) -> Any:
        monkeypatch.setattr(measures, "whole_bytes", lambda devices: [round(part * TOTAL) for part in room])
        model, it = made("cuda", plan), patcher.RemotePatcher.__new__(patcher.RemotePatcher)
        it.model = SimpleNamespace(pooled=dataclasses.replace(model, devices=model.devices[:2]))
        it.decision, it.shares = decision(plan=model.plan), shares
        return it

    return make


def test_weights_are_cut_by_the_shares_that_a_user_wrote_else_by_what_devices_have_room_for(patched) -> None:
    """A device has room for 19 of 20 bytes."""
    whole, sharded = "ulysses=2", "ulysses=2,weights=sharded"
    assert patched(whole, (3, 1), 0.5, 0.5)._plan_of_load().shares == (3, 1), "each has all of it, and is not judged"
    assert patched(whole, None, 0.5, 0.5)._plan_of_load().shares == ()
    assert patched(sharded, (3, 1), 0.8, 0.5)._plan_of_load().shares == (3, 1)
    with pytest.raises(ValueError, match="shares"):
        patched(sharded, (3, 1), 0.77, 0.5)._plan_of_load()
    assert patched(sharded, None, 0.8, 0.4)._plan_of_load().shares == (2, 1)
    assert patched(sharded, None, 0.6, 0.3)._plan_of_load().shares == (), "more than either has room for"
    for room, shares in ((0.8, (3, 1)), (0.77, ())):
        stages = patched("pipefusion=2", None, room, 0.5)
        stages.model.corrected = SimpleNamespace(now=(3, 1))
        assert stages._plan_of_load() == stages.plan.with_shares(shares)


@pytest.mark.parametrize(
    ("held", "shares", "stays"),
    [((3, 1), (3, 1), True), ((6, 2), (3, 1), True), ((1, 1), (), True), ((1, 3), (3, 1), False), ((3, 1), (), False),
     (None, (), False)],
)  # fmt: skip
def test_weights_stay_where_they_are_cut_as_the_plan_would_have_them(
    held: tuple[int, ...] | None, shares: tuple[int, ...], stays: bool, module_of_pack, patched, plan_of, monkeypatch
) -> None:
    """Though SP Config said other shares when they were loaded."""
    patcher, gone = module_of_pack("nodes.host.model.patcher"), list[Any]()
    it = patched("ulysses=2,weights=sharded", shares, 0.8, 0.8)
    layout = held and plan_of("ulysses=2,weights=sharded").with_shares(held).layout
    pool = SimpleNamespace(holds=lambda *_: True, layout_of=lambda *_: layout)
    registry = SimpleNamespace(is_cut_by=lambda *_: False, is_alive=lambda _: True, pool=lambda _: pool)
    for module in (patcher, module_of_pack("nodes.host.model.pooled_model")):
        monkeypatch.setattr(module, "POOLS", registry)
    monkeypatch.setattr(type(it.model.pooled), "unload", lambda _, plan: gone.append(plan))
    assert (it._loads(), gone) == (not stays, [] if stays else [it.plan])


def test_devices_that_differ_are_told_where_they_were_measured_for_this_load(module_of_pack, monkeypatch) -> None:
    module, told = module_of_pack("nodes.host.model.patcher"), list[str]()
    noted = SimpleNamespace(say=told.append, loading=print)
    for name, value in {"NodeText": lambda: noted, "unequal": lambda devices, found: [f"{found}"]}.items():
        monkeypatch.setattr(module, name, value)

    class Pooled:
        spec, devices, measured, started = SimpleNamespace(path="/m/a.safetensors"), ("cuda:0", "cuda:1"), [], False
        weights = None

        def ensure(self, *_: object, **__: object) -> dict[int, float]:
            self.measured, self.started = self.measured or [3, 2, 1], True
            return {}

    class Patcher(module.RemotePatcher):
        recorder = shares = None
        plan = SimpleNamespace(ranks=2)
        model = SimpleNamespace(pooled=Pooled())

        def _loads(self) -> bool:
            return len(told) < 4

        def _plan_of_load(self) -> None: ...

        def delta_set(self) -> None: ...

    it = Patcher.__new__(Patcher)
    for _ in range(3):
        it._ensure_pooled()
    there = "a.safetensors is in the workers on cuda:0, cuda:1"
    assert told == ["Starting workers on cuda:0, cuda:1", f"{there}\n[3, 2]", "Loading a.safetensors", there]


def test_comfyui_counts_the_shares_that_weights_are_loaded_by(patched) -> None:
    sharded = "ulysses=2,weights=sharded"
    for shares, numerator, denominator in ((None, 2, 3), ((3, 1), 3, 4), ((), 1, 2)):
        it = patched(sharded, shares, 0.8, 0.4)
        it.model_options, it.load_device = {"transformer_options": {}}, CUDA_0
        assert it.model_size() == pytest.approx(TOTAL * numerator / denominator, abs=2)


def test_the_memory_of_weights_alone_is_told_until_the_model_and_its_work_are_known(
    module_of_pack, pooled_model, made, plan_of, monkeypatch
) -> None:
    counting = module_of_pack("parallel_runtime.planner.counting")
    monkeypatch.setattr(pooled_model, "whole_bytes", lambda devices: [4 * TOTAL] * len(devices))
    counted, model = counting.usual_counted(), made("cpu", "ulysses=4")
    work = counting.usual_work_of(counted)

    def needed(plan: str, *known: Any) -> tuple[int, int, bool, str]:
        it = pooled_model.needed_memory(plan_of(plan), model.devices, model.sizes, *known, held=plan_of(plan))
        return it.device_bytes, it.host_bytes, it.weights_alone, it.fullest

    for known in ((None, None), (counted.model, None), (None, work)):
        assert needed("ulysses=1", *known) == needed("ulysses=4", *known) == (TOTAL, 0, True, "")
        assert needed("ulysses=4,weights=sharded", *known) == (6_000_000_001 + 2 * BIGGEST, 0, True, "")
        assert needed("ulysses=4,weights=offloaded", *known) == (2 * BIGGEST, 4 * 6_000_000_001, True, "")
        uneven = "ulysses=2,weights=offloaded,shares=9:1"
        assert needed(uneven, *known) == (2 * BIGGEST, TOTAL + 1, True, ""), "all ranks together, however they share it"
        uneven = "ulysses=2,weights=sharded,shares=1:3"
        assert needed(uneven, *known) == (round(0.75 * (TOTAL + 1)) + 2 * BIGGEST, 0, True, "cpu:1")
        assert needed("pipefusion=2", *known) == (12_000_000_001, 0, True, "")
    on_cpu = needed("ulysses=1", counted.model, work)[0]
    model = made("cuda", "ulysses=4")
    assert needed("ulysses=1", counted.model, work)[0] > on_cpu, "a driver keeps some of a device for itself"
    assert needed("ulysses=4", counted.model, work)[0] > counted.model.weight_bytes
    assert needed("ulysses=4", counted.model, work)[2:] == (False, "")
    blocks = sum(counted.model.block_bytes)
    for plan in ("ulysses=4,weights=offloaded", "ulysses=2,weights=offloaded", "weights=offloaded"):
        assert needed(plan, counted.model, work)[1] == pytest.approx(blocks, abs=4), "of all ranks together"


@pytest.mark.parametrize(("tries", "written"), [(False, None), (True, None), (True, (3, 1))])
def test_a_run_is_told_how_many_images_steps_and_conditionings_it_has(
    tries: bool, written: object, module_of_pack, monkeypatch
) -> None:
    module, happened = module_of_pack("nodes.host.model.new_model"), list[Any]()
    run, around = SimpleNamespace(call_late=lambda: happened.append("late"), packs_around=False), list[Any]()
    decision = SimpleNamespace(plan="a plan")
    trier = SimpleNamespace(by_graphs=True, after=lambda it: happened.append(it)) if tries else None
    corrected = SimpleNamespace(
        told=lambda it: happened.append("told") or it, after=lambda *it: happened.append(("corrected", *it))
    )
    patcher = module.RemotePatcher.__new__(module.RemotePatcher)
    patcher.shares, patcher.worker_loop, patcher.patches, patcher.decision = written, False, {}, decision
    patcher.model = SimpleNamespace(
        corrected=corrected, diffusion_model=3, pooled=SimpleNamespace(devices=()), last_run=None
    )
    of = SimpleNamespace(shares=(2, 1))
    given = {
        **{"check_controlnets": print, "_refuse_other_weights": print, "work_of_run": lambda *_: "work"},
        **{"Tunable": SimpleNamespace(of=lambda *_: of), "with_tries": lambda *_: (decision, trier)},
        **{"LastRun": SimpleNamespace, "_sizes_of_run": lambda *_: {}, "asks_both": lambda _: True},
        **{"check_skipped_layers": lambda *it, guided: happened.append((it[-1], guided)), "whole_bytes": lambda _: [7]},
        **{"LIVE": SimpleNamespace(begins=happened.append), "begun": lambda *_: nullcontext()},
        **{"readable_weights": lambda *_: nullcontext(), "have_packs_around": lambda *it: around.append(it) or True},
    }
    for name, value in given.items():
        monkeypatch.setattr(module, name, value)
    for name, value in {"shares_of_run": (), "decision_for": decision, "new_run": run, "written": ()}.items():
        monkeypatch.setattr(module.RemotePatcher, name, lambda *_, value=value: value)

    class Executor:
        class_obj = SimpleNamespace(model_patcher=patcher, conds={}, model_options={}, cfg=1.0)

        def __call__(self, *told: object, **named: object) -> tuple[object, ...]:
            return (*told, named)

    sigmas = torch.tensor([1.0, 0.5, 0.25, 0.0])
    noise = torch.zeros(3, 4, 8, 9)
    sampler = SimpleNamespace()
    asked = (noise, 1, sampler, sigmas, 5)
    assert module.with_context(Executor(), *asked, seed=6) == (*asked, {"seed": 6})
    assert (run.guided, run.images, run.steps, run.trier) == (True, 3, 3, trier)
    assert run.packs_around and around == [({"loop": [Executor.class_obj, sampler, {}]}, ["loop"])]
    assert vars(patcher.model.last_run) == {"of": of, "work": "work", "sizes": {}}
    assert getattr(run, "graphs_under", None) == ("a plan" if tries else None)
    assert happened == [
        *([] if written else ["told"]), ([1.0, 0.5, 0.25], False), run, "late", *([run] if tries else []),
        *([] if written else [("corrected", run, (2, 1), [7])]),
    ]  # fmt: skip
    for count, steps in ((2, 1), (1, 1), (0, 1)):
        module.with_context(Executor(), noise, 1, sampler, sigmas[:count])
        assert run.steps == steps
    happened.clear()
    Executor.class_obj = SimpleNamespace(model_patcher="a stock MODEL, with our options")
    assert module.with_context(Executor(), *asked, seed=6) == (*asked, {"seed": 6})
    assert happened == []


def test_weights_that_are_loaded_have_the_shapes_that_nodes_gave_them(module_of_pack) -> None:
    patcher = module_of_pack("nodes.host.model.new_model").RemotePatcher

    class TakenError(Exception):
        """Ends the rest of it."""

    def take_shapes(deltas: str) -> None:
        raise TakenError(deltas)

    it = patcher.__new__(patcher)
    it._ensure_pooled, it.delta_set = lambda: None, lambda: "the deltas"
    it.model = SimpleNamespace(take_shapes=take_shapes)
    with pytest.raises(TakenError, match="the deltas"):
        it.load()


def test_a_devices_memory_is_told_in_tenths_of_a_gb_where_that_says_something(pooled_model) -> None:
    for needed, text in ((10**10, "10.0"), (50_000_000, "0.1"), (49_000_000, "0.049")):
        told = pooled_model.DeviceMemory(device_bytes=needed, total_bytes=8 * 10**10).text
        assert f" {text} of 80.0 GB" in f" {told}", told
