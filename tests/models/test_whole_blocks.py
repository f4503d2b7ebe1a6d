"""Blocks of sharded and offloaded weights that stay whole: the same bits, fewer gathers, and never more than there is.

A device's memory is told by each rank: CPU ranks have none of their own. Ranks on pretend GPUs do all of this by
themselves (tests/gpu).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.planner.memory import left_to_others
from parallel_runtime.process.environment import WHOLE_BLOCKS
from parallel_runtime.weights.block_shards import BlockShards
from parallel_runtime.weights.device_memory import DeviceMemory
from parallel_runtime.weights.whole_blocks import WholeBlocks

from .gloo_group import GlooGroup
from .ranks import in_ranks

CPU, BLOCKS, WIDTH = torch.device("cpu"), 7, 24
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
    """The memory of a device of 16 GiB that holds this rank's weights and what stays whole.

    `room`: for blocks and steps beside what is left to others. What a step took, and what was freed in it, is cached
    until it is given back. `others`: bytes of other programs; `beside`: of what else this rank holds.
    """

    total = 16 << 30

    def __init__(self, shards: BlockShards, *, room: int) -> None:
        self.shards, self.cached, self.given_back, self.beside = shards, 0, 0, 0
        self.others = self.total - left_to_others(self.total) - room - shards.num_bytes

    def __call__(self, _: torch.device) -> DeviceMemory:
        allocated = self.shards.num_bytes + self.shards.staying_bytes + self.beside
        reserved = allocated + self.cached
        return DeviceMemory(self.total - self.others - reserved, reserved, allocated, self.total)

    @property
    def free(self) -> int:
        return self(CPU).free

    def give_back(self, _: torch.device) -> None:
        self.cached, self.given_back = 0, self.given_back + 1

    def compute(self, taken: int, call: Callable[[], Tensor]) -> Tensor:
        """A call that takes so many bytes beside the weights."""
        before = set(self.shards._staying)
        out = call()
        new = [path for path in self.shards._staying if path not in before]
        self.cached = max(self.cached, taken)
        if not self.shards.offloaded:
            self.cached += sum(self.shards._lengths(path)[self.shards._index] for path in new)
        return out


@contextmanager
def kept_on(device: Device, group: Axis, **environment: str) -> Iterator[WholeBlocks]:
    """What keeps blocks on the device of this rank."""
    with patch("parallel_runtime.weights.whole_blocks.empty_cache", device.give_back):
        yield WholeBlocks(device.shards, group, CPU, environment=environment, memory=device)


def stays(shards: BlockShards) -> list[str]:
    """The blocks that are whole now."""
    return sorted(shards._staying)


def keep(shards: BlockShards, count: int) -> None:
    """Have so many blocks stay whole, whatever they take."""
    assert shards.make_rooms(count) == count
    shards.keep(count)


@in_ranks(2)
def test_blocks_that_stay_give_the_same_bits_and_are_gathered_once(group: GlooGroup) -> None:
    for offloaded, shares in ((False, ()), (True, ()), (False, (2, 1)), (False, (1, 2))):
        model = blocks_with()
        want = model(X)
        shards, traffic = sharded(model, group.axis, offloaded=offloaded, shares=shares), group.axis.traffic
        held = shards.num_bytes
        for count in (0, 3, BLOCKS, 2, 0):
            keep(shards, count)
            for again in range(3):
                traffic.reset()
                assert torch.equal(run(model, shards), want), (offloaded, count)
                assert len(stays(shards)) == count and not shards._rooms
                assert traffic.calls == BLOCKS - count or not again, (offloaded, count, traffic.calls)
            assert shards.num_bytes == held, "this rank's part of the weights is no other"
            for path, part in shards._shards.items():
                inside = not offloaded and path in stays(shards)
                there = part.untyped_storage() if part.numel() else shards._staying.get(path, part).untyped_storage()
                assert (there.nbytes() > part.nbytes) == inside, "a part lies in the whole, or by itself"
                assert not inside or there.data_ptr() == shards._staying[path].data_ptr()
            mine = 0 if offloaded else sum(shards._shards[path].nbytes for path in stays(shards))
            more = sum(whole.nbytes for whole in shards._staying.values()) - mine
            assert shards.staying_bytes == more and (more > 0) == (count > 0)
        assert all(weight is None for block in model for each in block for weight in each._parameters.values())


@in_ranks(2)
def test_each_block_is_under_way_while_another_computes_also_where_others_stay_or_no_longer_do(
    group: GlooGroup,
) -> None:
    model, begun = blocks_with(), list[int]()
    shards = sharded(model, group.axis, offloaded=False)
    feed = shards._feed
    begin = feed.begin
    feed.begin = lambda order, of: (begun.append(len(order)), begin(order, of))[1]  # type: ignore[method-assign]
    run(model, shards)
    for count, there in ((0, 0), (4, 0), (4, 4), (1, 1), (0, 0)):
        keep(shards, count)
        begun.clear()
        run(model, shards)
        assert begun == [BLOCKS - there], "one order a call"


@in_ranks(2)
def test_a_change_of_a_block_that_stays_is_seen_and_taken_back(group: GlooGroup) -> None:
    model, other = blocks_with(), blocks_with(seed=2)
    want = model(X)
    shards = sharded(model, group.axis, offloaded=False)
    keep(shards, BLOCKS)
    run(model, shards)
    changed = {f"blocks.3.0.{name}": weight for name, weight in other[3][0].named_parameters()}
    shards.change(changed)
    assert "blocks.3" not in stays(shards) and len(stays(shards)) == BLOCKS - 1
    plain = blocks_with()
    plain[3][0] = other[3][0]
    for count in (BLOCKS - 1, BLOCKS):
        assert torch.equal(run(model, shards), plain(X)) and not torch.equal(plain(X), want)
        assert len(stays(shards)) == count
        keep(shards, BLOCKS)
    shards.change(dict.fromkeys(changed))
    keep(shards, BLOCKS)
    assert torch.equal(run(model, shards), want) and len(stays(shards)) == BLOCKS


@in_ranks(2)
def test_all_ranks_keep_what_the_fullest_device_has_room_for(group: GlooGroup) -> None:
    model, taken = blocks_with(), 1000
    want = model(X)
    shards = sharded(model, group.axis, offloaded=False)
    half = sum(map(shards._more_bytes, shards._units)) // 2
    device, counts = Device(shards, room=(half if group.index else 10 * half) + taken), list[int]()
    with kept_on(device, group.axis) as whole:
        for _ in range(6):
            whole.begin("a form")
            assert torch.equal(device.compute(taken, lambda: run(model, shards)), want)
            assert device.free >= left_to_others(device.total) or not counts
            came = len(stays(shards)) > (counts[-1] if counts else 0)
            before, cached = device.given_back, device.cached
            whole.end()
            assert (device.given_back - before, device.cached) == ((1, 0) if came else (0, cached)), "freed parts"
            counts.append(len(stays(shards)))
        assert counts[0] == 0 < counts[1] < counts[3] == counts[4] == counts[5] < BLOCKS, counts
        assert half // 2 < shards.staying_bytes <= half, "what the fullest device has, and parts given back since"
        if group.index == 0:  # one rank alone was asked for its memory
            whole.drop()
        for there in (0, counts[1]):
            whole.begin("a form")
            assert torch.equal(run(model, shards), want) and len(stays(shards)) == there


@in_ranks(2)
def test_where_one_rank_of_a_group_may_keep_none_no_rank_does(group: GlooGroup) -> None:
    """As of a machine whose ranks are on its CPU, or where a user turned it off."""
    for told in ({}, {WHOLE_BLOCKS: "0"}):
        model = blocks_with()
        want = model(X)
        shards = sharded(model, group.axis, offloaded=False)
        device = Device(shards, room=1 << 30)
        with kept_on(device, group.axis, **(told if group.index else {})) as whole:
            if not told and not group.index:
                whole = WholeBlocks(shards, group.axis, CPU)
            for _ in range(3):
                whole.begin("a form")
                assert torch.equal(run(model, shards), want) and not stays(shards)
                whole.end()


class Alone:
    """Offloaded weights of one rank on a device with so much room for blocks and steps."""

    def __init__(self, room: int) -> None:
        self.model = blocks_with()
        self.shards = sharded(self.model, Axis("shards"), offloaded=True)
        self.device = Device(self.shards, room=room)
        self.each = [self.shards._more_bytes(path) for path in self.shards._spread]

    def step(self, whole: WholeBlocks, form: str, taken: int, *, wanted: bool = True) -> int:
        """A step of a form, which takes so many bytes; how many blocks stay whole in it."""
        whole.begin(form, wanted=wanted)
        with torch.inference_mode():
            self.device.compute(taken, lambda: run(self.model, self.shards))
        assert self.device.free >= left_to_others(self.device.total), "blocks took a step's room, or that of others"
        whole.end()
        return len(stays(self.shards))

    def most(self, room: int) -> int:
        """How many blocks fit."""
        return max(count for count in range(BLOCKS + 1) if sum(self.each[:count]) <= room)


def test_what_a_step_takes_is_measured_without_blocks_and_left_to_steps_like_it() -> None:
    room, small, large = 40_000, 100, 20_000
    here = Alone(room)
    few, many = here.most(room - large), here.most(room - small)
    assert 0 < few < many < BLOCKS
    with kept_on(here.device, Axis("shards")) as whole:
        assert here.step(whole, "small", small) == 0, "nobody knows yet what it takes"
        assert [here.step(whole, "small", small) for _ in range(2)] == [many] * 2
        assert here.step(whole, "large", large) == 0, "one of another form comes"
        assert here.step(whole, "large", large) == few
        assert [here.step(whole, "small", small) for _ in range(3)] == [few] * 3, "forms that take turns keep the same"
        assert [here.step(whole, "small", small) for _ in range(8)][-1] == many, "the large one is long past"
        assert here.step(whole, "small", small, wanted=False) == 0
        assert here.step(whole, "small", small) == many


def test_what_else_is_held_or_taken_since_leaves_less_for_blocks() -> None:
    """As another model in the pool, LoRAs beside the layers, or another program."""
    room, taken = 40_000, 100
    here = Alone(room)
    with kept_on(here.device, Axis("shards")) as whole:
        for _ in range(2):
            here.step(whole, "a form", taken)
        whole.drop()
        held = 20_000
        here.device.beside = held
        assert here.step(whole, "a form", taken) == here.most(room - taken - held)
        here.device.beside, here.device.others = 0, here.device.others + held
        assert here.step(whole, "a form", taken) == here.most(room - taken - held)
        here.device.others += room
        whole.begin("a form")
        assert not stays(here.shards), "another program takes the device"


@in_ranks(2)
def test_what_a_cancelled_run_freed_does_not_hide_what_the_next_one_takes(group: GlooGroup) -> None:
    model, taken = blocks_with(), 20_000
    shards = sharded(model, group.axis, offloaded=False)
    device = Device(shards, room=sum(map(shards._more_bytes, shards._units)) // 2 + taken)
    with kept_on(device, group.axis) as whole:
        for form in ("a form", "a form", "another"):
            whole.begin(form)
            device.compute(taken if form == "another" else 10, lambda: run(model, shards))
            if form == "a form" and stays(shards):  # cancelled: the step has no end, and others get the memory
                whole.drop()
                device.cached = 0
            else:
                whole.end()
        whole.begin("another")
        device.compute(taken, lambda: run(model, shards))
        assert device.free >= left_to_others(device.total), "blocks took what such a step takes"


@in_ranks(2)
def test_a_rank_with_more_room_than_the_others_takes_none_that_it_gives_up_again(group: GlooGroup) -> None:
    model = blocks_with()
    shards = sharded(model, group.axis, offloaded=False)
    more = sum(map(shards._more_bytes, shards._units))
    device, given = Device(shards, room=more * (5 if group.index else 1) // 2 + 100), list[int]()
    made, make = list[int](), shards.make_rooms
    shards.make_rooms = lambda count: (made.append(count), make(count))[1]  # type: ignore[method-assign]
    with kept_on(device, group.axis) as whole:
        for _ in range(7):
            whole.begin("a form")
            device.compute(100, lambda: run(model, shards))
            whole.end()
            given.append(device.given_back)
        assert made == sorted(set(made)) and max(made) == len(stays(shards)) < BLOCKS, "each time for more than before"
        assert given[-3] == given[-1], "and nothing is given back once all is settled"


def test_a_step_that_never_ended_is_no_measure() -> None:
    """As of a run that was cancelled between its steps, whose cache is given back before the next one begins."""
    here = Alone(40_000)
    with kept_on(here.device, Axis("shards")) as whole:
        whole.begin("a form")
        whole.drop()
        whole.end()
        assert here.step(whole, "a form", 20_000) == 0, "it is known of no step what it takes"
        assert here.step(whole, "a form", 20_000) == here.most(20_000)


def test_models_that_take_turns_keep_no_block_and_a_run_after_another_does() -> None:
    here = Alone(40_000)
    with kept_on(here.device, Axis("shards")) as whole:
        found, given = [here.step(whole, "a form", 100) for _ in range(2)], list[int]()
        for _ in range(3):  # a step of another model each time
            whole.drop(for_a_step=True)
            found.append(here.step(whole, "a form", 100))
            given.append(here.device.given_back)
        assert given[0] == given[-1], "what a step takes is known, and its memory stays cached"
        whole.drop()
        found.append(here.step(whole, "a form", 100))
    many = here.most(40_000 - 100)
    assert found == [0, many, 0, 0, 0, many]


def test_memory_that_is_refused_is_room_for_fewer_blocks_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    here, empty, given = Alone(10_000_000), torch.empty, list[int]()

    def refusing(*size: int, **how: object) -> Tensor:
        if how.get("dtype") == torch.uint8 and len(given) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        given.append(1)
        return empty(*size, **how)

    with kept_on(here.device, Axis("shards")) as whole:
        here.step(whole, "a form", 0)
        monkeypatch.setattr(torch, "empty", refusing)
        assert [here.step(whole, "a form", 0) for _ in range(3)] == [2] * 3
        assert here.device.given_back == 2, "before the step that is measured, and before room is taken, once"
        whole.drop()
        given.clear()
        assert here.step(whole, "a form", 0) == 2, "a later run tries again"


@pytest.mark.parametrize("count", range(1, BLOCKS + 1))
def test_blocks_that_stay_lie_apart_and_more_of_them_are_the_same_and_others(count: int) -> None:
    """So each block that is gathered has about as many others to hide behind, and another room moves few."""
    shards = Alone(1).shards
    keep(shards, count)
    to_come, pending = shards.staying, dict(shards._rooms)
    shards._rooms, shards._staying = {}, pending
    assert shards.staying != to_come, "ranks of which one has them and another is yet to gather them are not alike"
    shards._rooms, shards._staying = pending, {}
    places = sorted(int(path.rpartition(".")[2]) for path in shards._rooms)
    gathered = [number for number in range(BLOCKS) if number not in places]
    runs = "".join("x" if number in gathered else " " for number in range(BLOCKS)).split()
    assert max(map(len, runs), default=0) <= -(-len(gathered) // count) + 1, places
    before = set(shards._rooms)
    shards.keep(count - 1)
    assert shards._rooms.keys() < before
