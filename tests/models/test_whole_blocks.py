"""Blocks of sharded and offloaded weights that stay whole: the same bits, fewer gathers, and never more than there is.

A device's memory is told by each rank: CPU ranks have none of their own. Ranks on pretend GPUs do all of this by
themselves (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.plan import WHOLE_LEAVE
from parallel_runtime.rank_environment import WHOLE_BLOCKS
from parallel_runtime.weights.block_shards import BlockShards
from parallel_runtime.weights.whole_blocks import OFF, DeviceMemory, WholeBlocks

from .gloo_group import GlooGroup
from .ranks import in_ranks

CPU, BLOCKS, WIDTH = torch.device("cpu"), 7, 24
GIB = 1 << 30
X = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def blocks_with(seed: int = 1) -> nn.Sequential:
    """Blocks, of which every second one is larger."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH * (1 + number % 2)), nn.Linear(WIDTH * (1 + number % 2), WIDTH))
            for number in range(BLOCKS)
        )
    )


def sharded(model: nn.Sequential, group: Axis, *, offloaded: bool, shares: tuple[int, ...] = ()) -> BlockShards:
    """The blocks of the model, spread over the group."""
    blocks = {f"blocks.{number}": block for number, block in enumerate(model)}
    shards = BlockShards(blocks, group, rounded={}, device=CPU, offloaded=offloaded, shares=shares)
    list(shards.load())
    return shards


def run(model: nn.Module, shards: BlockShards) -> Tensor:
    """One call."""
    shards.begin()
    try:
        return model(X)
    finally:
        shards.end()


class Device:
    """The memory of a device that holds this rank's weights, what stays whole, and what a step takes."""

    def __init__(self, shards: BlockShards, *, total: int, others: int = 0) -> None:
        self.shards, self.total, self.others, self.step, self.least = shards, total, others, 0, total

    @property
    def reserved(self) -> int:
        return self.shards.num_bytes + self.shards.staying_bytes + self.step

    def __call__(self, _: torch.device) -> DeviceMemory:
        free = self.total - self.others - self.reserved
        self.least = min(self.least, free)
        return DeviceMemory(free, self.reserved, self.total)


def stays(shards: BlockShards) -> list[str]:
    """The blocks that are whole now."""
    return sorted(shards._staying)


@in_ranks(2)
def test_blocks_that_stay_give_the_same_bits_and_are_gathered_once(group: GlooGroup) -> None:
    for offloaded, shares in ((False, ()), (True, ()), (False, (2, 1))):
        model = blocks_with()
        want = model(X)
        shards, traffic = sharded(model, group.axis, offloaded=offloaded, shares=shares), group.axis.traffic
        held = shards.num_bytes
        for count in (0, 3, BLOCKS, 2, 0):
            shards.keep(count)
            for again in range(3):
                traffic.reset()
                assert torch.equal(run(model, shards), want), (offloaded, count)
                assert len(stays(shards)) == count
                assert traffic.calls == BLOCKS - count or not again, (offloaded, count, traffic.calls)
            assert shards.num_bytes == held, "this rank's part of the weights is no other"
            more = sum(shards._more_bytes(path) for path in stays(shards))
            assert shards.staying_bytes == more and (more > 0) == (count > 0)
        assert all(weight is None for block in model for each in block for weight in each._parameters.values())


@in_ranks(2)
def test_a_change_of_a_block_that_stays_is_seen_and_taken_back(group: GlooGroup) -> None:
    model, other = blocks_with(), blocks_with(seed=2)
    want = model(X)
    shards = sharded(model, group.axis, offloaded=False)
    shards.keep(BLOCKS)
    run(model, shards)
    changed = {f"blocks.3.0.{name}": weight for name, weight in other[3][0].named_parameters()}
    shards.change(changed)
    assert "blocks.3" not in stays(shards) and len(stays(shards)) == BLOCKS - 1
    plain = blocks_with()
    plain[3][0] = other[3][0]
    for _ in range(2):
        assert torch.equal(run(model, shards), plain(X)) and not torch.equal(plain(X), want)
    shards.change(dict.fromkeys(changed))
    assert torch.equal(run(model, shards), want) and len(stays(shards)) == BLOCKS


@in_ranks(2)
def test_all_ranks_keep_what_the_fullest_device_has_room_for(group: GlooGroup) -> None:
    model = blocks_with()
    want = model(X)
    shards = sharded(model, group.axis, offloaded=False)
    half = sum(map(shards._more_bytes, shards._units)) // 2
    taken = 1000
    roomy = shards.num_bytes + taken + half
    total = round(roomy / (1 - WHOLE_LEAVE)) + 1
    device = Device(shards, total=total * (3 if group.index == 0 else 1))
    whole = WholeBlocks(shards, group.axis, CPU, memory=device)
    counts = []
    for _ in range(4):
        whole.begin("a form")
        device.step = taken
        assert torch.equal(run(model, shards), want)
        whole.end()
        device.step = 0
        counts.append(len(stays(shards)))
    assert counts[0] == 0 < counts[1] == counts[2] == counts[3] < BLOCKS, counts
    assert shards.staying_bytes <= half, "more than the fullest device has"
    if group.index == 0:  # one rank alone was asked for its memory
        whole.drop()
    whole.begin("a form")
    assert torch.equal(run(model, shards), want) and len(stays(shards)) == counts[1]


@in_ranks(2)
def test_where_one_rank_of_a_group_has_no_device_memory_none_stays(group: GlooGroup) -> None:
    """As of a machine whose ranks are on its CPU."""
    model = blocks_with()
    want = model(X)
    shards = sharded(model, group.axis, offloaded=False)
    device = Device(shards, total=GIB)
    whole = WholeBlocks(shards, group.axis, CPU, memory=device if group.index else lambda _: None)
    for _ in range(3):
        whole.begin("a form")
        assert torch.equal(run(model, shards), want) and not stays(shards)
        whole.end()


def alone(total: int, **more: str) -> tuple[nn.Sequential, BlockShards, Device, WholeBlocks]:
    """Offloaded weights of one rank on a device with so much memory for blocks."""
    model = blocks_with()
    shards = sharded(model, Axis("shards"), offloaded=True)
    device = Device(shards, total=total)
    return model, shards, device, WholeBlocks(shards, Axis("shards"), CPU, environment=more, memory=device)


def steps(model: nn.Module, shards: BlockShards, device: Device, whole: WholeBlocks) -> Callable[..., int]:
    """What makes a step of a form, which takes so many bytes; how many blocks stay whole in it."""

    def step(form: str, taken: int, *, wanted: bool = True) -> int:
        whole.begin(form, wanted=wanted)
        device.step = taken
        assert device(CPU).free >= 0, "a step has no room"
        with torch.inference_mode():
            run(model, shards)
        whole.end()
        assert device(CPU).free >= 0, "blocks took a step's room"
        device.step = 0
        return len(stays(shards))

    return step


def test_what_a_step_takes_is_measured_without_blocks_and_left_to_steps_like_it() -> None:
    model, shards, device, whole = alone(200_000)
    step = steps(model, shards, device, whole)
    small, large = 100, 150_000 - shards.num_bytes
    assert step("small", small) == 0, "nobody knows yet what it takes"
    most = step("small", small)
    assert 0 < most == step("small", small)
    assert step("large", large) == 0, "one of another form comes"
    fewer = step("large", large)
    assert 0 < fewer < most
    assert [step("small", small) for _ in range(3)] == [fewer] * 3, "forms that take turns keep the same"
    assert [step("small", small) for _ in range(8)][-1] == most, "the large one is long past"
    assert step("small", small, wanted=False) == 0
    assert step("small", small) == most
    device.others = 200_000
    whole.begin("small")
    assert not stays(shards), "another program takes the device"


def test_room_is_left_on_the_device_and_the_switch_turns_all_of_it_off() -> None:
    for total in (60_000, 120_000, 10_000_000):
        model, shards, device, whole = alone(total)
        step = steps(model, shards, device, whole)
        if device(CPU).free < 0:
            continue
        step("a form", 0)
        found = step("a form", 0)
        room = total - shards.num_bytes - round(WHOLE_LEAVE * total)
        fitting = [count for count in range(BLOCKS + 1) if sum(map(shards._more_bytes, shards._spread[:count])) <= room]
        assert found == max(fitting, default=0)
    model, shards, device, whole = alone(10_000_000, **{WHOLE_BLOCKS: OFF})
    step = steps(model, shards, device, whole)
    assert [step("a form", 0) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("count", range(1, BLOCKS + 1))
def test_blocks_that_stay_lie_apart_and_more_of_them_are_the_same_and_others(count: int) -> None:
    """So each block that is gathered has about as many others to hide behind, and another room moves few."""
    _, shards, _, _ = alone(1)
    shards.keep(count)
    places = sorted(int(path.rpartition(".")[2]) for path in shards._stay)
    gathered = [number for number in range(BLOCKS) if number not in places]
    runs = "".join("x" if number in gathered else " " for number in range(BLOCKS)).split()
    assert max(map(len, runs), default=0) <= -(-len(gathered) // count) + 1, places
    before = set(shards._stay)
    shards.keep(count - 1)
    assert shards._stay < before
