"""What did not change is not sent again, and what changed by one bit is."""

import os
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_runtime.model_call import OUT, ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool import arena
from parallel_runtime.pool.arena import TWIN_BYTES, Arena
from parallel_runtime.wire.channel import CONTROL_BYTES, Segment, SegmentTable
from pool.echo_pool import make_spec, repeated, run_step

LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.reshape(8, 5).T,
    "strided": lambda x: x[::3],
    "expanded": lambda x: x[None].expand(4, 40),
    "negated": lambda x: torch._neg_view(x),
}


class Memory:
    """An arena without ranks, its tables, and what a rank would know: the bytes behind every number."""

    def __init__(self, num_bytes):
        segment, fd = Segment.create(num_bytes)
        self.files = [os.fdopen(fd)]
        self.table = SegmentTable(segment)
        self.arena = Arena(self.table, announce=lambda _, fd: self.files.append(os.fdopen(os.dup(fd))))
        self.known = {}

    def used_bytes(self):
        """Of memory, by segment."""
        return [os.fstat(file.fileno()).st_blocks * 512 for file in self.files]

    def place(self, tensors, results=()):
        """Place and look that all that a rank reads or knows is what was given; the inputs that were there before."""
        specs, before = self.arena.place(tensors, dict(results))
        for spec in specs[: len(tensors)]:
            assert torch.equal(self.table.tensor(spec), tensors[spec.name])
        for name, content in before.items():
            assert torch.equal(self.known.setdefault(content, tensors[name].clone()), tensors[name])
        for spec in specs[len(tensors) :]:
            self.table.tensor(spec).fill_(77)  # as the ranks write
        return before


class Side:
    """Stands for a stream beside the one that computes: copies are made when one of them is waited for."""

    def __init__(self, device):
        self.device, self.queue, self.waits = device, [], 0

    def pinned(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def start(self, pinned, rows):
        self.queue.append((pinned, rows))
        return self

    def synchronize(self):
        self.waits += 1
        while self.queue:
            pinned, rows = self.queue.pop(0)
            pinned.copy_(rows)


def on_a_device(monkeypatch, made):
    """Inputs of the arena are taken for those of a device; its side stream is put into `made`."""

    def side(device):
        made.append(Side(device))
        return made[-1]

    monkeypatch.setattr(arena, "SideStream", side)
    monkeypatch.setattr(arena, "on_device", lambda _: True)
    monkeypatch.setattr(arena, "_is_plain", lambda _: False)


@pytest.fixture(params=["host", "device"])
def memory(request, monkeypatch):
    if request.param == "device":
        on_a_device(monkeypatch, [])
    return Memory(1 << 20)


class HostWaits(TorchDispatchMode):
    """Counts operators that bring a value of a tensor to Python: on a device, each waits for all that is queued."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
        return function(*args, **(kwargs or {}))


def test_pinned_memory_goes_back_when_a_run_ends_and_once(monkeypatch):
    given = []

    def give_back(device):
        given.append(device)
        raise RuntimeError("CUDA error: an illegal memory access")  # of a GPU that has failed: others have to tell it

    monkeypatch.setattr(arena, "give_back_pinned", give_back)
    monkeypatch.setattr(Segment, "give_back", lambda *_: None)
    memory = Memory(1 << 20)
    memory.place({"x": torch.zeros(3)})
    memory.arena.give_back()
    assert given == [], "none was pinned"
    on_a_device(monkeypatch, [])
    memory = Memory(1 << 20)
    memory.place({"x": torch.zeros(3)})
    for _ in range(2):
        memory.arena.give_back()
    assert given == [torch.device("cpu")]


def test_memory_of_segments_goes_back_and_results_stay_as_they_were():
    """However a request lay: in the first segment, whose control page stays, or in a further one."""
    memory, held = Memory(1 << 20), {}
    for number, size in enumerate((1 << 16, 1 << 21)):
        inputs = {"x": torch.full((size,), 1 + number, dtype=torch.uint8)}
        memory.place(inputs)
        (spec,), before = memory.arena.place(inputs)
        assert before and spec.segment == number
        held[number] = memory.arena.take(spec), memory.table.tensor(spec), spec
    memory.table.beat(2)
    memory.table.credit = 3
    used = memory.used_bytes()
    memory.arena.give_back()
    assert memory.used_bytes() == [CONTROL_BYTES, 0] and min(used) > 1 << 16
    for number, (taken, view, spec) in held.items():
        assert bool((taken == 1 + number).all()) and not view.any(), spec
    assert (memory.table.beats(2), memory.table.credit) == (1, 3)
    assert memory.place(inputs) == {} and memory.arena.place(inputs)[1], "it is not there, and then is"


def test_a_system_that_cannot_take_memory_back_leaves_it(monkeypatch):
    memory = Memory(CONTROL_BYTES)
    memory.arena.give_back()
    memory = Memory(1 << 20)
    (spec,), _ = memory.arena.place({"x": torch.ones(1 << 10)})
    monkeypatch.setattr("parallel_runtime.wire.channel.mmap.MADV_REMOVE", -1)
    memory.arena.give_back()
    assert memory.table.tensor(spec).all()


@pytest.mark.parametrize("way", ["beside", "plain"])
def test_a_step_waits_once_for_all_inputs_of_a_device(monkeypatch, way):
    """`plain`: the negative control, a comparison that waits for each input."""
    sides = []
    on_a_device(monkeypatch, sides)
    if way == "plain":
        monkeypatch.setattr(arena, "on_device", lambda _: False)
    memory = Memory(1 << 20)
    constant = {f"c{number}": torch.randn(3, 40) for number in range(6)}
    waits = []
    for _ in range(5):
        before = sides[0].waits if sides else 0
        with HostWaits() as found:
            clones = {name: each.clone() for name, each in constant.items()}
            _, there = memory.arena.place(clones | {"x": torch.rand(9)})
        waits.append(found.count + (sides[0].waits if sides else 0) - before)
    assert set(there) == set(constant)
    assert waits == ([1, 2, 1, 1, 1] if way == "beside" else [0, 7, 7, 7, 7])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_equal_input_is_not_sent_again_and_one_other_element_is(pool, layout):
    base = torch.arange(40.0)
    own = LAYOUTS[layout](base)
    run_step(pool, torch.zeros(3))
    assert repeated(run_step(pool, own).ranks) == [[], []]
    again = run_step(pool, LAYOUTS[layout](base.clone()))
    assert repeated(again.ranks) == [["0.x0"]] * 2
    assert torch.equal(again.out, own)
    base[3] += 1  # in place: the same object at the same address
    changed = run_step(pool, own)
    assert repeated(changed.ranks) == [[], []]
    assert torch.equal(changed.out, own)


def test_bits_are_compared_and_not_values(memory):
    given = torch.tensor([0.0, float("nan")])
    for layout in (lambda x: x, lambda x: x[None].expand(3, 2)):
        memory.arena.place({"x": layout(given)})
        assert set(memory.arena.place({"x": layout(given.clone())})[1]) == {"x"}
        assert memory.arena.place({"x": layout(given * -1)})[1] == {}


def test_each_call_of_a_request_keeps_its_own(pool):
    def run(*values):
        calls = [
            ModelCall(tensors={"x": torch.full((9,), value)}, out_shape=(9,), out_dtype=torch.float32)
            for value in values
        ]
        result = pool.run(make_spec(), ParallelPlan(cfg=2), calls)
        assert [out.unique().tolist() for out in result.outs] == [[value] for value in values]
        return repeated(result.ranks)[0]

    run(0.0, 0.0)
    assert run(1.0, 2.0) == []
    assert run(1.0, 2.0) == ["0.x", "1.x"]
    assert run(1.0, 3.0) == ["0.x"]
    assert run(3.0, 1.0) == []
    assert run(3.0) == ["0.x"]  # whose result overwrites call 1's input
    assert run(3.0, 1.0) == ["0.x"]


def test_other_requests_between_leave_nothing_wrong(pool):
    txt = torch.randn(1000)
    run_step(pool, txt, txt)
    assert torch.equal(run_step(pool, torch.zeros(1000), txt).out, txt)
    pool.exchange_pattern(ParallelPlan(ulysses=2))
    result = run_step(pool, torch.ones(1000), txt)
    assert (repeated(result.ranks)[0], torch.equal(result.out, txt + 1)) == (["0.x1"], True)
    run_step(pool, torch.full((3000,), 5.0))
    result = run_step(pool, torch.ones(1000), txt)
    assert (repeated(result.ranks)[0], torch.equal(result.out, txt + 1)) == ([], True)


def test_no_order_of_sizes_values_and_growing_segments_confuses_it(memory, monkeypatch):
    monkeypatch.setattr(arena, "GROWTH_BYTES", 1 << 18)
    draw, tables, repeats = random.Random(1), set(), 0  # noqa: S311  no secret
    values = [torch.randn(200_000) for _ in range(2)]
    sizes = {name: 10 for name in "abc"}
    for _ in range(150):
        if draw.random() < 0.2:
            sizes[draw.choice("abc")] = draw.choice([0, 10, 5000, 60_000, 200_000])
        chosen = [name for name in "abc" if draw.random() < 0.95]
        tensors = {name: draw.choice(values)[: sizes[name]] for name in chosen}
        if draw.random() < 0.1:
            tensors = {name: tensor[:, None].expand(-1, 2) for name, tensor in tensors.items()}
        repeats += len(memory.place(tensors, {OUT: torch.empty(draw.choice([5, 5, 9000]), device="meta")}))
        tables.add(tuple(memory.table.indices))
    assert repeats > 50
    assert len(tables) > 2


def test_a_copy_that_fails_leaves_nothing_that_counts_as_sent(memory):
    old = {"a": torch.ones(50), "b": torch.ones(50), "c": torch.ones(50)}
    memory.place(old)
    with pytest.raises(NotImplementedError):
        memory.arena.place({"a": torch.zeros(50), "b": torch.zeros(50, device="meta"), "c": torch.zeros(50)})
    assert memory.place(old) == {}
    assert set(memory.place(old)) == {"a", "b", "c"}


def test_what_is_kept_to_compare_with_has_a_limit(memory):
    wide = {name: torch.ones(1, 1).expand(TWIN_BYTES // 8, 1) for name in ("a", "b", "c")}
    memory.place(wide)
    assert set(memory.place(wide)) == {"a", "b"}
