"""What a user is told of devices: what each does under a plan, and which ones hold the others up."""

from __future__ import annotations

import pytest

from parallel_runtime.devices import Device
from parallel_runtime.wire.replies import MeasureReply


def measured(*, name: str = "RTX 4090", gflops: float = 100.0, free_gb: float = 20.0) -> MeasureReply:
    """A rank's device as it measures it."""
    return MeasureReply(name=name, gflops=gflops, free_bytes=int(free_gb * 1e9), total_bytes=int(24e9))


@pytest.fixture(scope="module")
def unequal(module_of_pack):
    module = module_of_pack("nodes.host.model.measures")
    return lambda *found, kind="cuda": module.unequal([Device(kind, index) for index in range(4)], found)


def test_devices_that_are_alike_are_no_news(unequal) -> None:
    assert unequal(measured(), measured(gflops=91.0, free_gb=16.0)) == []
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


def test_ranks_on_one_processor_are_not_compared(unequal) -> None:
    assert unequal(measured(), measured(gflops=10.0, free_gb=1.0), kind="cpu") == []


# A plan, and the lines of its first and last device of eight.
ROLES = {
    "ulysses=2,cfg=2,data=2": (
        "cuda:0: replica 0, cond 0, 1/2 of the attention heads",
        "cuda:7: replica 1, cond 1, 1/2 of the attention heads",
    ),
    "ulysses=2,ring=4": (
        "cuda:0: ring part 0/4, 1/2 of the attention heads",
        "cuda:7: ring part 3/4, 1/2 of the attention heads",
    ),
    "ulysses=1": ("cuda:0: the whole model", "cuda:7 sleeps"),
    "ulysses=4,weights=sharded": ("cuda:0: 1/4 of the attention heads, shard 0/4 of the weights", "cuda:7 sleeps"),
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
