"""What ranks are asked so that they hold models, their changes and a VAE; a stand-in notes it and answers."""

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.plan import Layout
from parallel_runtime.pool import held_weights
from parallel_runtime.pool.arena import Arena
from parallel_runtime.pool.held_vae import MAX_NAMES, HeldVae, Tile, VaeWeights, _batches, assign_tiles
from parallel_runtime.pool.held_weights import HeldWeights, LoadResult, _sum_of
from parallel_runtime.weight_delta import PRISTINE, WeightDelta, WeightDeltas
from parallel_runtime.wire.channel import Segment, SegmentTable
from parallel_runtime.wire.replies import (
    Cancelled,
    DecodeReply,
    LoadReply,
    Memory,
    MemoryReply,
    Progress,
    StrengthsReply,
)
from parallel_runtime.wire.requests import ChangeWeights, DecodeTiles, HoldVae, Load, SetStrengths, Unload

MEMORY = Memory(resident_bytes=0)
SPEC, OTHER = (ModelSpec(f"/models/{name}.safetensors", "float32", 1, 2) for name in ("one", "other"))


def tiles(*sizes: int) -> list[Tile]:
    """Tiles of so many latent pixels."""
    return [Tile(latent=torch.empty(1, 1, 1, size), shape=(1,), dtype=torch.float32) for size in sizes]


def test_every_tile_is_decoded_once_and_the_largest_are_shared_first() -> None:
    shares = assign_tiles(tiles(8, 1, 1, 1, 5), num_ranks=2)
    assert shares == ((0,), (1, 2, 3, 4))
    for num_ranks in (1, 2, 3, 8):
        shares = assign_tiles(tiles(4, 4, 4, 2, 2, 1), num_ranks=num_ranks)
        assert sorted(number for share in shares for number in share) == list(range(6))
        sums = [sum((4, 4, 4, 2, 2, 1)[number] for number in share) for share in shares]
        assert max(sums) - min(sums) <= 4
    assert assign_tiles(tiles(3), num_ranks=3) == ((0,), (), ()), "a rank may have no tile"


def test_weights_go_in_order_in_messages_of_a_limited_size() -> None:
    large, small = torch.empty(40 << 20, dtype=torch.uint8), torch.empty(1)
    names = [list(batch) for batch in _batches({"a": large, "b": large, "c": small})]
    assert names == [["a"], ["b", "c"]]
    many = [list(batch) for batch in _batches({f"w{number}": small for number in range(MAX_NAMES + 1)})]
    assert [len(batch) for batch in many] == [MAX_NAMES, 1]


class Generation:
    """Two ranks: notes requests with their number of ranks, and says for each what `answers` has of it, else memory."""

    devices_by_machine = (2,)

    def __init__(self) -> None:
        segment, fd = Segment.create(1 << 16)
        os.close(fd)
        self.arena = Arena(SegmentTable(segment), announce=lambda *_: None)
        self.asked = list[tuple[Any, int]]()
        self.answers = dict[type, Any]()
        self.mapped = dict[int, ModelSpec]()

    def reach(self) -> int:
        return 2

    def ask(self, request: Any, check: Any, specs: Any = (), **told: Any) -> Any:
        ranks = told.get("num_ranks", 2)
        check()
        self.asked.append((request, ranks))
        answer = self.answers.get(type(request), lambda rank: MemoryReply(memory=MEMORY))
        if isinstance(answer, Exception):
            raise answer
        told.get("on_progress", lambda _: None)({1: Progress(done=2, total=8)})
        replies = [answer(rank) for rank in range(ranks)]
        told.get("on_done", lambda _: None)(replies)
        return replies

    def taken(self) -> list[Any]:
        """What was asked since this was called last."""
        found, self.asked = [request for request, _ in self.asked], []
        return found


def cancelled() -> None:
    """As a user's Cancel is told."""
    raise InterruptedError


def test_a_vae_is_brought_once_in_the_place_of_another_and_freed_where_it_may_be_there() -> None:
    generation: Any = Generation()
    held = HeldVae(generation, itertools.count(5), 1.0)
    held.free(int)
    assert generation.taken() == [], "no rank has any"
    weights = {f"w{number}": torch.zeros(1) for number in range(MAX_NAMES + 1)}
    told: Any = {"comfyui": ComfyUI("/c"), "dtype": torch.float32, "flags": {"x": True}, "metadata": {"y": "z"}}
    vae = VaeWeights(key="a", tensors=weights, **told)
    assert held.host_bytes(vae) == 2 * 4 * len(weights), "a copy for each rank"
    assert held.hold(vae, int).handle == 5 and held.host_bytes(vae) == 0
    first, last = generation.taken()
    assert [len(first.names), first.first, first.last] == [MAX_NAMES, True, False]
    rest = {"names": (f"w{MAX_NAMES}",), "first": False, "last": True, "flags": {"x": True}, "metadata": {"y": "z"}}
    assert last == HoldVae(vae=5, comfyui=ComfyUI("/c"), dtype="float32", **rest)
    assert (held.hold(vae, int), held.partly_held, generation.taken()) == ((5, 0.0), 0, [])
    other = VaeWeights(key="b", tensors={"w": torch.zeros(1)}, **told)
    generation.devices_by_machine = (1, 1)
    assert held.host_bytes(other) == 4, "a further machine has memory of its own"
    with pytest.raises(InterruptedError):
        held.hold(other, cancelled)
    assert (held.partly_held, generation.taken()) == (5, []), "nothing was asked, so ranks have the old one still"
    generation.answers[HoldVae] = InterruptedError()
    with pytest.raises(InterruptedError):
        held.hold(other, int)
    assert held.partly_held == 6 and generation.taken()[0] == Unload(model=5)
    held.free(int)
    held.free(int)
    assert (generation.taken(), held.partly_held) == ([Unload(model=6)], 0)
    del generation.answers[HoldVae]
    assert held.hold(vae, int).handle == 7
    generation.taken()
    held.free(int)
    assert (generation.taken(), held._held) == ([Unload(model=7)], None)


def test_tiles_go_to_ranks_and_their_pixels_come_back_in_order() -> None:
    generation, done = Generation(), list[int]()
    generation.answers[DecodeTiles] = lambda rank: DecodeReply(memory=MEMORY, num_tiles=rank, decode_s=1.0)
    vae = VaeWeights(key="a", comfyui=ComfyUI("/c"), dtype=torch.float32, tensors={"w": torch.zeros(1)})
    asked = [Tile(latent=torch.zeros(1, size), shape=(size,), dtype=torch.float16) for size in (1, 3)]
    held = HeldVae(generation, itertools.count(5), 1.0)  # type: ignore[arg-type]
    found = held.decode(vae, asked, int, method="decode", last=False, on_tiles=done.append)
    assert [(pixels.shape, pixels.dtype) for pixels in found.pixels] == [((1,), torch.float16), ((3,), torch.float16)]
    assert ([reply.num_tiles for reply in found.ranks], done) == ([0, 1], [2])
    assert generation.taken()[-1] == DecodeTiles(vae=5, method="decode", tiles=((1,), (0,)), last=False)


def loaded(rank: int) -> LoadReply:
    """Of a rank that had to evict model 1."""
    return LoadReply(memory=MEMORY, parameter_bytes=10 + rank, dtype="float32", load_s=1.0 + rank, evicted=(1,) * rank)


def test_a_model_is_loaded_on_the_ranks_that_lack_it_and_those_that_were_evicted_are_freed() -> None:
    generation: Any = Generation()
    held = HeldWeights(generation, itertools.count(1), load_deadline_s=1.0, budget_bytes=9)
    generation.answers[Load] = lambda rank: LoadReply(memory=MEMORY, parameter_bytes=5, dtype="float32", load_s=1.0)
    one, said = held.load(OTHER, Layout(ranks=2), int), list[tuple[int, int]]()
    assert one.result.rank_load_s == {0: 1.0, 1: 1.0}
    assert held.load(OTHER, Layout(ranks=1), int) is one
    generation.taken()
    generation.answers[Load] = loaded
    model = held.load(SPEC, Layout(ranks=1), int, progress=lambda *given: said.append(given))
    load = Load(
        model=2, spec=SPEC, layout=Layout(ranks=1), first_rank=0, plan=None, budget_bytes=9, eviction_order=(1,)
    )
    assert (generation.taken(), said, [each.handle for each in held]) == ([load], [(2, 8)], [1, 2])
    model = held.load(SPEC, Layout(ranks=2), int)
    more, freed = generation.taken()
    assert (more.model, more.first_rank, more.layout, freed) == (2, 1, Layout(ranks=2), Unload(model=1))
    assert (model.result.parameter_bytes, model.result.dtype, model.result.rank_load_s) == (
        [10, 11],
        "float32",
        {1: 2.0},
    )
    assert (list(held), generation.mapped, held.partly_held) == ([model], {2: SPEC}, {})
    generation.answers[Load] = lambda rank: Cancelled(evicted=()) if rank else loaded(0)
    with pytest.raises(RuntimeError, match="/models/other.safetensors was loaded and is not there"):
        held.load(OTHER, Layout(ranks=2), int)
    assert generation.taken()[1:] == [Unload(model=3)]
    held.unload(SPEC, Layout(ranks=2, shards=2), int)
    assert generation.taken() == [], "in no such layout"
    with pytest.raises(InterruptedError):
        held.unload(SPEC, None, cancelled)
    assert (generation.taken(), list(held), held.partly_held) == ([], [], {2: 2}), "ranks have it still"
    held.free_partly_held(int)
    assert (generation.taken(), generation.mapped, held.partly_held) == ([Unload(model=2)], {}, {})
    generation.answers[Load] = lambda _: LoadReply(memory=MEMORY, parameter_bytes=5, dtype="float32", load_s=1.0)
    for layout in (Layout(ranks=2), Layout(ranks=2, shards=2), Layout(ranks=2, offloaded=True)):
        held.load(SPEC, layout, int)
    generation.taken()
    held.unload(SPEC, Layout(ranks=2, shards=2), int)
    assert (generation.taken(), [each.handle for each in held]) == ([Unload(model=5)], [4, 6])
    held.unload(SPEC, None, int)
    assert (generation.taken(), list(held)) == ([Unload(model=4), Unload(model=6)], [])


@pytest.mark.parametrize(
    ("free", "gone"), [([5000, 5000], []), ([4999, 5000], [1]), ([0, 4999, 5000], [1, 3]), ([0, 0, 0], [1, 3])]
)
def test_models_in_host_memory_give_way_to_another_one_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch, free: list[int], gone: list[int]
) -> None:
    generation: Any = Generation()
    generation.answers[Load] = lambda rank: LoadReply(memory=MEMORY, parameter_bytes=5, dtype="float32", load_s=1.0)
    held = HeldWeights(generation, itertools.count(1), load_deadline_s=1.0, budget_bytes=None)
    monkeypatch.setattr(held_weights, "HOST_LEFT_BYTES", 1000)
    monkeypatch.setattr(held_weights, "host_memory", lambda: (10**6, 10**6))
    there = Layout(ranks=2, shards=2, offloaded=True)
    files = [replace(SPEC, path=f"/models/{name}", size_bytes=4000) for name in "abcd"]
    for file, layout in zip(files, (there, Layout(ranks=2), there), strict=False):
        held.load(file, layout, int)
    generation.taken()
    monkeypatch.setattr(held_weights, "host_memory", lambda: (free.pop(0), 10**6))
    held.load(files[1], Layout(ranks=2), int)
    held.load(files[3], there, int)
    *unloads, load = generation.taken()
    assert (unloads, load.model, load.layout) == ([Unload(model=handle) for handle in gone], 4, there)
    assert [model.handle for model in held] == [handle for handle in (1, 3, 2, 4) if handle not in gone]
    monkeypatch.setattr(held_weights, "host_memory", lambda: (0, 10**6))
    held.load(files[3], there, int)
    assert generation.taken() == [], "it is there"


def test_weights_are_changed_once_and_strengths_alone_where_nothing_is_merged() -> None:
    def deltas(name: str, strength: float, values: torch.Tensor) -> WeightDeltas:
        delta = WeightDelta(key="a.weight", kind="diff", strength=strength, values=(values,))
        return WeightDeltas(name, (delta,), side_branch=True)

    generation: Any = Generation()
    held, values = HeldWeights(generation, itertools.count(1), load_deadline_s=1.0, budget_bytes=None), torch.ones(2)
    generation.answers[Load] = loaded
    model = held.load(SPEC, Layout(ranks=1), int)
    generation.taken()
    held.apply_deltas(model, PRISTINE, int)
    assert generation.taken() == []
    first, other = deltas("first", 1.0, values), deltas("other", 0.5, values)
    held.apply_deltas(model, first, int)
    (change,) = generation.taken()
    assert (type(change), change.side_branch, change.first, change.last) == (ChangeWeights, True, True, True)
    assert model.deltas == first.applied()
    for changed, asked in ((True, [SetStrengths]), (False, [SetStrengths, ChangeWeights])):
        generation.answers[SetStrengths] = lambda rank, changed=changed: StrengthsReply(memory=MEMORY, changed=changed)
        held.apply_deltas(model, other, int)
        assert ([type(each) for each in generation.taken()], model.deltas) == (asked, other.applied())
        first, other = other, first
    with pytest.raises(ZeroDivisionError):  # cancelled as the tensors are looked at: nothing was asked yet
        held.apply_deltas(model, deltas("third", 1.0, values + 1), lambda: 1 / 0)
    assert (generation.taken(), model.deltas) == ([], first.applied())
    merged = replace(first, name="merged", side_branch=False)
    held.apply_deltas(model, merged, int)
    assert (model.deltas.name, model.deltas.side_branch) == ("merged", False)
    generation.taken()
    for name in ("merged", "of a node that was executed again"):
        held.apply_deltas(model, replace(merged, name=name), int)
        assert (generation.taken(), model.deltas.name) == ([], name)
    generation.answers[ChangeWeights] = InterruptedError()
    with pytest.raises(InterruptedError):
        held.apply_deltas(model, PRISTINE, int)
    assert model.deltas is None


def test_a_load_has_to_come_what_other_ranks_say_where_one_has_said_nothing() -> None:
    said = {0: Progress(done=3, total=10), 2: Progress(done=4, total=20)}
    assert _sum_of(said, num_ranks=3) == (7, 50)
    assert _sum_of(said, num_ranks=2) == (7, 30)
    ranks = [LoadReply(memory=MEMORY, dtype="bfloat16"), LoadReply(memory=MEMORY, load_s=2.0)]
    assert (LoadResult(ranks, 1.0).rank_load_s, LoadResult(ranks, 1.0).dtype) == ({1: 2.0}, "bfloat16")
