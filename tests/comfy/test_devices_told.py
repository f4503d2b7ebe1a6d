"""What a user is told of devices: what each does under a plan, and which ones hold the others up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.devices import Device
from parallel_runtime.wire.replies import MeasureReply


def measured(*, name: str = "RTX 4090", gflops: float = 100.0, free_gb: float = 20.0) -> MeasureReply:
    """A rank's device as it measures it."""
    return MeasureReply(name=name, gflops=gflops, free_bytes=int(free_gb * 1e9))


@pytest.fixture(scope="module")
def unequal(module_of_pack):
    module = module_of_pack("nodes.host.model.measures")
    return lambda *found, kind="cuda": module.unequal([Device(kind, index) for index in range(4)], found)


def test_devices_that_are_alike_are_no_news(unequal) -> None:
    assert unequal(measured(), measured(gflops=90.0, free_gb=15.0)) == [], "a tenth slower, and a quarter less memory"
    assert len(unequal(measured(), measured(gflops=89.9, free_gb=14.9))) == 2
    assert unequal(measured()) == []


def test_a_device_more_than_a_tenth_slower_is_named_with_what_it_costs(unequal) -> None:
    (line,) = unequal(measured(), measured(gflops=60.0), measured(gflops=80.0))
    for word in ("cuda:1 (RTX 4090) is 40% slower than cuda:0", "the others wait", "SP Config"):
        assert word in line


def test_a_device_with_much_less_memory_free_is_named(unequal) -> None:
    (line,) = unequal(measured(), measured(free_gb=9.0))
    assert "cuda:1 (RTX 4090) has 9.0 GB free, cuda:0 (RTX 4090) 20.0 GB" in line


def test_devices_of_different_kinds_are_named(unequal) -> None:
    (line,) = unequal(measured(), measured(), measured(name="RTX 3090"))
    assert line.startswith("cuda:0 (RTX 4090) and cuda:2 (RTX 3090) are of different kinds: each takes the layers and")


def test_devices_of_two_kinds_compute_by_their_measured_speed(module_of_pack, monkeypatch) -> None:
    module = module_of_pack("nodes.host.model.measures")
    slow, quick, other = measured(name="RTX 3090", gflops=30.0), measured(), measured(name="A6000", gflops=95.0)
    for kinds, found, shares in (
        (("cuda", "cuda"), (slow, quick), (3, 10)),
        (("cuda",) * 3, (quick, slow, quick), (10, 3, 10)),
        (("cuda", "cuda"), (quick, quick), ()),
        (("cuda", "cuda"), (quick, other), ()),
        (("cuda",), (quick,), ()),
        (("cpu", "cpu"), (slow, quick), ()),
        (("cuda", "cpu"), (slow, quick), ()),
    ):
        asked: list[bool] = []
        pools = SimpleNamespace(measured=lambda *_, found=found, asked=asked: asked.append(True) or list(found))
        monkeypatch.setattr(module, "POOLS", pools)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda index, found=found: found[index].name)
        devices = tuple(Device(kind, index) for index, kind in enumerate(kinds))
        assert module.measured_shares(devices, lambda: None) == shares
        one_kind = len({each.name for each in found}) == 1
        assert not (one_kind and asked), "workers would start before ComfyUI has made room for them"
        elsewhere = tuple(replace(device, machine="b") for device in devices[1:])
        if set(kinds) == {"cuda"} and elsewhere:
            assert module.measured_shares((devices[0], *elsewhere), lambda: None) == shares


def test_comfyui_makes_room_for_the_start_of_workers_that_are_measured_first(module_of_pack, monkeypatch) -> None:
    """A text encoder may fill the GPU that a rank wants a context on."""
    module, done = module_of_pack("nodes.host.model.measures"), list[object]()
    management = SimpleNamespace(
        free_memory=lambda room, gpu: done.append((str(gpu), room > 1 << 30)),
        get_torch_device=lambda: torch.device("cuda", 0),
        current_loaded_models=[SimpleNamespace(device=torch.device(name)) for name in ("cuda:2", "cuda:2", "cpu")],
    )
    pool = SimpleNamespace(measure_devices=lambda check_cancelled: done.append("measured") or [measured()])
    monkeypatch.setattr(module, "comfy", SimpleNamespace(model_management=management))
    monkeypatch.setattr(module, "off", lambda feature: False)
    monkeypatch.setattr(module, "POOLS", SimpleNamespace(measured=lambda devices, measure: measure(pool)))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"GPU {index}")
    elsewhere = Device("cuda", 0, machine="b")
    module.measured_shares((Device("cuda", 1), Device("cuda", 2), elsewhere), lambda: None)
    assert done == [("cuda:2", True), "measured"], "ComfyUI has nothing on the other two"


@pytest.mark.parametrize(
    ("plan", "kind", "held"),
    [
        ("ulysses=2,weights=offloaded", "cuda", 3.0),
        ("data=2,ulysses=2,weights=offloaded", "cuda", 6.0),
        ("weights=offloaded", "cuda", 3.0),
        ("data=2,ulysses=2,weights=offloaded", "cpu", None),
        ("ulysses=2,weights=sharded", "cuda", None),
        ("ulysses=2", "cuda", None),
    ],
)
def test_weights_beyond_the_memory_of_the_host_are_refused(module_of_pack, monkeypatch, plan, kind, held) -> None:
    module, plans = (module_of_pack(name) for name in ("nodes.host.model.measures", "parallel_runtime.plan"))
    asked, devices = plans.ParallelPlan.parse(plan), tuple(Device(kind, index) for index in range(4))
    has = SimpleNamespace(total=0)
    monkeypatch.setattr(module, "host_memory", lambda: (0, has.total))
    if held is None:
        module.refuse_beyond_host(asked, devices, 3 * 10**9)
        return
    has.total = round(held * 10**9)
    module.refuse_beyond_host(asked, devices, 3 * 10**9)
    has.total -= 1
    with pytest.raises(ValueError) as refused:
        module.refuse_beyond_host(asked, devices, 3 * 10**9)
    assert str(refused.value) == (
        f"weights=offloaded keeps {held:.1f} GB in host memory, and this machine has {held:.1f} GB; use a smaller file "
        "such as fp8, weights=sharded on more devices, or add memory"
    )
    further = (devices[0], *(replace(device, machine="b") for device in devices[1:]))
    if asked.ranks > 1:
        module.refuse_beyond_host(asked, further, 3 * 10**9)


def test_shares_by_which_a_device_would_hold_too_much_are_refused_with_the_fullest(module_of_pack, monkeypatch) -> None:
    module, plan = (module_of_pack(name) for name in ("nodes.host.model.measures", "parallel_runtime.plan"))
    devices = tuple(Device("cuda", index) for index in range(3))
    sharded, whole = (plan.ParallelPlan(ulysses=3, weights=weights) for weights in ("sharded", "replicated"))
    monkeypatch.setattr(module, "whole_bytes", lambda _: [2 * 10**9, 10**9, 4 * 10**9])
    size = 4 * 10**9
    for of, shares in ((sharded, None), (sharded, ()), (sharded, (3, 1, 6)), (whole, (1, 1, 2))):
        if of is whole:
            with pytest.raises(ValueError, match="give cuda:1 4.0 GB of weights, and it has 1.0 GB"):
                module.refuse_beyond_room(of, devices, shares, size)
        else:
            module.refuse_beyond_room(of, devices, shares, size)
    with pytest.raises(ValueError) as refused:
        module.refuse_beyond_room(sharded, devices, (2, 2, 1), size)
    assert str(refused.value) == (
        "shares=2, 2, 1 give cuda:1 1.6 GB of weights, and it has 1.0 GB; give it a smaller number in SP Config's "
        "shares, or set shares to equal"
    )
    assert module.held_beyond_room(sharded.with_shares((2, 2, 1)), devices, size) == [(devices[1], 1.6e9, 10**9)]
    for num_bytes, beyond in ((950_000_000, []), (950_000_001, [(devices[1], 950_000_001.0, 10**9)])):
        assert module.held_beyond_room(whole, devices, num_bytes) == beyond
    assert module.held_by_memory(sharded, devices, 3 * 10**9).shares == (5, 2, 10)
    staged = plan.ParallelPlan.parse("pipefusion=2,ulysses=2,weights=sharded")
    for of, kind, num_bytes in (
        (staged, "cuda", 1),
        (sharded, "cuda", 8 * 10**9),
        (sharded, "cpu", 1),
        (whole, "cuda", 1),
    ):
        there = (*devices[:2], Device(kind, 2))
        assert module.held_by_memory(of, there, num_bytes) == of


def test_ranks_on_one_processor_are_not_compared(unequal) -> None:
    assert unequal(measured(), measured(gflops=10.0, free_gb=1.0), kind="cpu") == []


# A plan, and the lines of its first and last device of eight.
ROLES = {
    "ulysses=2,ring=4": (
        "cuda:0: ring part 0/4, 1/2 of the attention heads",
        "cuda:7: ring part 3/4, 1/2 of the attention heads",
    ),
    "ulysses=1": ("cuda:0: the whole model", "cuda:7 sleeps"),
    "ulysses=4,weights=sharded": ("cuda:0: 1/4 of the attention heads, shard 0/4 of the weights", "cuda:7 sleeps"),
    "ring=2,weights=sharded": ("cuda:0: ring part 0/2, shard 0/2 of the weights", "cuda:7 sleeps"),
    "cfg=2,ulysses=2,data=2,weights=sharded": (
        "cuda:0: replica 0, cond 0, 1/2 of the attention heads, shard 0/4 of the weights",
        "cuda:7: replica 1, cond 1, 1/2 of the attention heads, shard 3/4 of the weights",
    ),
    "ring=8,weights=offloaded": (
        "cuda:0: ring part 0/8, shard 0/8 of the weights, weights in host memory",
        "cuda:7: ring part 7/8, shard 7/8 of the weights, weights in host memory",
    ),
    "weights=offloaded": ("cuda:0: weights in host memory", "cuda:7 sleeps"),
}


@pytest.mark.parametrize("plan", ROLES)
def test_each_device_has_a_line_about_what_it_does(plan: str, module_of_pack) -> None:
    devices = module_of_pack("parallel_runtime.devices")
    plans = module_of_pack("parallel_runtime.plan")
    eight = [devices.Device("cuda", index) for index in range(8)]
    lines = module_of_pack("nodes.roles").roles(plans.ParallelPlan.parse(plan), eight)
    assert (lines[0], lines[-1], len(lines)) == (*ROLES[plan], 8)
