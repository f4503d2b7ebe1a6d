"""Blocks of ComfyUI's own classes by graphs, as tapes (tests/gpu/tape.py): the same to the bit, and which have none."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import tape

from parallel_runtime.models.hosted import block_graphs
from parallel_runtime.models.hosted.block_graphs import BlockGraphs, CannotRecordError, GraphRun
from parallel_runtime.models.hosted.call import TokenCall
from parallel_runtime.models.hosted.compiled import CompiledBlocks, Kind, blocks_of
from parallel_runtime.models.hosted.graphs import Watch
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.kept_state import alike_over, kept_state, numbers_over
from parallel_runtime.models.hosted.word_handlers import cutter
from parallel_runtime.models.specs import spec_of
from parallel_runtime.models.specs.words import parse
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.kernels import ATTENDED
from parallel_runtime.timing import RegionTimer

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .tiny import call

pytestmark = [pytest.mark.slow]
# Case, or how its name begins -> what is said of blocks that have no graph.
NONE = {
    "HiDream-I1": "makes as many rows as its values say, which no graph can",
    "Hunyuan3D 2.1": "tells the host a number, which no graph can",
    "Wan HuMo": "WanAttentionBlockAudio shares tokens inside, at Linear",
    "Wan-Animate 2": "the model calls its blocks by forward_pose and forward_gen",
}
# Blocks that write to what they are given; that are given objects; whose results are kept for later ones; and none.
QUICK = ("Flux.1, ControlNet", "LTX-2, a timestep for each frame", "HunyuanDiT, long skips", "HiDream-I1, experts")
QUIET = Watch(RegionTimer(torch.device("cpu"), on=False), lambda: None, lambda _: None)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
@in_ranks(2)
def test_blocks_by_graphs_are_the_blocks(group: GlooGroup, name: str) -> None:
    tape.install()
    model, inputs = CASES[name]()
    blocks = blocks_of(model)
    SharedModel(model, spec_of(type(model)), group)
    graphs, ran = BlockGraphs(blocks, tape.Tape), []
    with torch.inference_mode():
        ATTENDED.clear()
        want, most, attended = call(model, inputs), group.most_keys, set(ATTENDED)
        for _ in range(4):
            run, group.most_keys = GraphRun(graphs, version=0, watch=QUIET), 0
            ATTENDED.clear()
            with run.calling(group):
                assert torch.equal(call(model, inputs), want)
            assert group.most_keys == most > 0, "a proof asks for it, of blocks that are replayed too"
            assert ATTENDED == attended, "a report names the kernels of blocks that are replayed too"
            ran.append(run.report())
    said = next((said for begins, said in NONE.items() if name.startswith(begins)), "")
    assert said in ran[-1].reason and bool(said) == bool(ran[-1].reason), ran[-1].reason
    assert said or (ran[0].uncompiled_blocks, ran[-1].uncompiled_blocks) == (graphs.count, 0)


KEEPING = "Qwen-Image 2.1, 2 references in the text"  # which not every ComfyUI has
if KEEPING in CASES:

    @in_ranks(2)
    def test_blocks_that_are_given_what_the_class_kept_have_graphs_and_are_the_blocks(group: GlooGroup) -> None:
        """The first step of a run computes what is kept by blocks as they are, the later ones find it."""
        tape.install()
        model, inputs = CASES[KEEPING]()
        kept, blocks = kept_state(model), blocks_of(model)
        assert kept is not None
        SharedModel(model, spec_of(type(model)), group)
        graphs, counts = BlockGraphs(blocks, tape.Tape), list[int]()
        steps = [inputs | {"x": inputs["x"] + step} for step in range(3)]
        alike = alike_over(group, torch.device("cpu"))

        def runs(name: str, by_graphs: bool) -> list[torch.Tensor]:
            kept.begin(name)
            outs = []
            for step in steps:
                run = GraphRun(graphs, version=0, watch=QUIET)
                with kept.calling(alike), run.calling(group) if by_graphs else nullcontext():
                    outs.append(call(model, step))
                counts.append(run.report().uncompiled_blocks)
            assert kept.take_counted().found == len(steps) - 1
            return outs

        with torch.inference_mode():
            want = runs("as it is", by_graphs=False)
            assert not torch.equal(want[1], want[2])
            for name in ("first", "second"):
                counts.clear()
                assert all(map(torch.equal, runs(name, by_graphs=True), want))
        every = len(blocks.entrances)
        assert counts == [every, 0, 0] and graphs.count >= every


@dataclass(frozen=True)
class Given:
    """As a class's own arguments are."""

    name: str
    tensor: torch.Tensor


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_of_an_object_all_that_its_class_names_counts() -> None:
    """A graph of one serves another with other numbers, and none with another name or shape."""
    one, two = torch.ones(2), torch.zeros(2)

    def form(value: object) -> tuple[object, list[torch.Tensor]]:
        found: list[torch.Tensor] = []
        return block_graphs._form(value, found), found

    for kind in (lambda tensor: Given("a", tensor), Slotted):
        (first, tensors), (second, _), (wider, _) = (form(kind(each)) for each in (one, two, torch.ones(3)))
        assert first == second != wider and tensors[0] is one
        assert block_graphs._replaced(kind(one), lambda _: two).tensor is two
    assert form(Given("a", one))[0] != form(Given("b", one))[0]
    with pytest.raises(CannotRecordError, match="SimpleNamespace, of which no graph can be made"):
        form(SimpleNamespace(tensor=one))


def attending(keys: torch.Tensor, start: int, transformer_options: dict[str, Any]) -> Callable[..., Any]:
    """As HiDream-O1 and Qwen-Image 2.1 make one in each call, for their blocks."""

    def attend(q: torch.Tensor, heads: int = 2) -> object:
        return q + keys[start:], heads, transformer_options.get("block_type")

    return attend


def counting(started: int) -> Callable[[], None]:
    def count() -> None:
        nonlocal started
        started += 1

    return count


def test_of_a_function_that_a_call_makes_what_it_holds_counts() -> None:
    """A graph of one serves another that holds other numbers, and none with another constant, shape, default or code.

    What the blocks' options tell of a call alone tells no functions apart, unless they read it.
    """
    one, two = torch.ones(2), torch.zeros(2)
    kind = Kind("A", len, len, None, frozenset())

    def form(function: object) -> tuple[object, list[torch.Tensor]]:
        found: list[torch.Tensor] = []
        (mine,), named, _ = kind.read((function,), {"again": function})
        made = block_graphs._form(mine, found)
        assert (block_graphs._form(named["again"], found), len(found)) == (made, len(set(map(id, found))))
        return made, found

    told = {"uuids": [1], "block_index": 3, "block_type": "single", "patches": {}}
    (first, tensors), (second, _) = form(attending(one, 1, told)), form(attending(two, 1, {"block_type": "single"}))
    assert first == second and tensors == [one] and tensors[0] is one
    for other in (
        attending(one, 0, told),
        attending(torch.ones(3), 1, told),
        attending(one, 1, {**told, "block_type": "double"}),
        counting(1),
    ):
        assert form(other)[0] != first
    fewer_heads = attending(one, 1, told)
    fewer_heads.__defaults__ = (1,)
    assert form(fewer_heads)[0] != first
    assert block_graphs._replaced(attending(one, 1, told), lambda _: two)(one)[0].tolist() == [1.0, 1.0]
    assert kind.read((counting(1), attending(one, 1, told)), {})[2] is told, "patches are looked for in it, too"


def test_a_function_that_holds_what_cannot_be_compared_or_writes_to_what_it_holds_has_no_graph() -> None:
    """What a replay would leave out: the second count."""
    for held in (SimpleNamespace(), len, counting(1)):
        with pytest.raises(CannotRecordError, match="of which no graph can be made"):
            block_graphs._form(attending(held, 1, {}), [])  # type: ignore[arg-type]
    counted = counting(1)
    before = block_graphs._form(counted, [])
    counted()
    assert block_graphs._form(counted, []) != before


@pytest.mark.parametrize("other", [[(0, 5, 0), (5, 12, 1)], [(0, 3, 2), (3, 12, 1)]])
def test_calls_whose_ranges_differ_on_one_rank_differ_on_all(other: list[tuple[int, int, int]]) -> None:
    """The second rank is given the same of both, and would record a graph in another call than the first."""
    found = []
    for ranges in ([(0, 3, 0), (3, 12, 1)], other, [(0, 3, 0), (3, 12, 1)]):
        call = TokenCall(SequenceParallelAttention(ulysses=Axis("ulysses", size=2, index=1)), "Tiny")
        call.introduce("img", 12)
        cut = cutter(parse("ranges:img"))(call, ranges)
        found.append((block_graphs._form(cut, []), block_graphs._tokens(call)))
    (form, tokens), (other_form, other_tokens), again = found
    assert form == other_form and tokens != other_tokens and again == found[0]


def first(
    run: Callable[[], torch.Tensor], tensors: list[torch.Tensor], *, call: Any = None, waits: Sequence[str] = ()
) -> str:
    """Why a block A that computes `run`, given these tensors, has no graph on a CPU."""
    recorder = SimpleNamespace(device=torch.device("cpu"), noting_waits=lambda: nullcontext(waits))
    graphs = SimpleNamespace(outs=block_graphs.Buffers())
    of: Any = SimpleNamespace(_recorder=recorder, _graphs=graphs)
    kind: Any = SimpleNamespace(title="A")
    return GraphRun._first(of, kind, call, run, tensors, block_graphs.WAITED)[0].reason


def test_a_block_that_finds_what_a_block_before_it_kept_has_no_graph() -> None:
    finds = SimpleNamespace(attention=SimpleNamespace(again=True), inside={})
    assert first(lambda: torch.ones(1), [], call=finds) == "attention in A finds keys of a block before it"
    assert block_graphs._remembers(finds)
    assert block_graphs._remembers(SimpleNamespace(attention=None, inside={"a": SimpleNamespace(again=True)}))
    assert not block_graphs._remembers(SimpleNamespace(attention=None, inside={"a": SimpleNamespace(again=False)}))


def test_a_block_that_waits_for_its_device_or_has_tensors_elsewhere_is_not_tried() -> None:
    """A recording of the first fails, which torch may not get over; one of the others keeps the number that it saw."""
    there, elsewhere = torch.ones(1), torch.ones((), device="meta")
    assert first(lambda: there * 2, [there]) == ""
    assert first(lambda: there * 2, [there], waits=["once"]) == "A has the host wait for its device, which no graph can"
    for given, out in ((elsewhere, there), (there, elsewhere)):
        assert first(lambda out=out: out, [given]) == "A has tensors on meta, and graphs are of cpu"


def test_what_python_reads_of_a_tensor_is_a_wait_on_a_tape() -> None:
    with tape.Tape().noting_waits() as noted:
        found = torch.ones(2)
        torch.tensor(0.5) * found
    assert noted == []
    for reads in (found.tolist, found.numpy, lambda: torch.tensor([1, 2], device=found.device)):
        with tape.Tape().noting_waits() as noted:
            reads()
        assert len(noted) == 1


def test_ranks_ask_each_other_on_the_device_of_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends nothing of a CPU's."""
    card, asked = torch.device("cuda", 1), list[torch.device]()
    monkeypatch.setattr(block_graphs, "numbers_over", lambda _, device, number: asked.append(device) or [number])
    run = GraphRun(BlockGraphs(CompiledBlocks(), lambda: SimpleNamespace(device=card)), version=0, watch=QUIET)
    kind: Any = SimpleNamespace(title="A")
    with run.calling(SequenceParallelAttention()):
        seen = block_graphs.Seen([], reason="of its form", of=block_graphs.OF_FORM)
        assert run._recorded(kind, len, (), {}, [torch.ones(1)], seen) == "of its form"
    assert asked == [card]


def test_of_a_blocks_graphs_the_one_that_was_not_used_for_the_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = BlockGraphs(CompiledBlocks(), lambda: SimpleNamespace(device=torch.device("cpu")))
    run = GraphRun(graphs, version=0, watch=QUIET)
    monkeypatch.setattr(block_graphs, "installed", lambda: SimpleNamespace(call=None))
    monkeypatch.setattr(run, "_first", lambda *_: (block_graphs.Seen([]), "computed"))
    monkeypatch.setattr(run, "_recorded", lambda *_: object())
    monkeypatch.setattr(run, "_again", lambda *_: "replayed")
    kind: Any = SimpleNamespace(title="A", reason="", read=lambda args, kwargs: (args, kwargs, {}))

    def ask(rows: int) -> str:
        return run._by_graph(0, kind, len, (torch.ones(rows),), {})[1]

    with run.calling(SequenceParallelAttention()):
        for rows in (1, 2, 3, 4):
            assert (ask(rows), ask(rows)) == ("computed", "replayed")
        assert (ask(1), ask(5), ask(1)) == ("replayed", "computed", "replayed")
        assert ask(2) == "computed", "it was forgotten for the fifth"


@in_ranks(2)
def test_a_wait_in_its_first_call_alone_costs_a_block_no_graph(group: GlooGroup) -> None:
    """As where one rank builds a table on its device; ranks agree which call is looked at again."""
    tape.install()
    waiting: list[str] = []

    class Waits(tape.Tape):
        def noting_waits(self) -> Any:
            return nullcontext(waiting)

    model, inputs = CASES["Flux.1, ControlNet"]()
    graphs = BlockGraphs(blocks_of(model), Waits)
    SharedModel(model, spec_of(type(model)), group)
    every, refused = len(graphs.blocks.entrances), "has the host wait" if group.index else "on another rank"
    with torch.inference_mode():
        want = call(model, inputs)
        for calls, count, why in ((0, every, ""), (1, every, ""), (2, 0, refused)):
            graphs.drop()
            for number in range(4):
                waiting[:] = ["a table"] if group.index and number < calls else []
                run = GraphRun(graphs, version=0, watch=QUIET)
                with run.calling(group):
                    assert torch.equal(call(model, inputs), want)
                assert graphs.count == (0 if number <= calls else count)
            assert run.report().uncompiled_blocks == every - count
            assert why in run.report().reason and bool(why) == bool(run.report().reason)
            assert not graphs.refused, "other forms of the kind may have graphs"


@in_ranks(2)
def test_where_one_rank_has_no_memory_for_a_graph_no_rank_has_one_nor_tries_the_kind_again(group: GlooGroup) -> None:
    tape.install()
    tried, held = list[object](), list[weakref.ref[torch.Tensor]]()

    class Full(tape.Tape):
        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            replay, room = super().record(function), torch.empty(1)
            tried.append(function)
            held.append(weakref.ref(room))
            if group.index == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore")
            return replay

    def asked(*given: Any) -> list[int]:
        assert not any(room() is not None for room in held), "memory is kept while ranks wait for each other"
        return numbers_over(*given)

    model, inputs = CASES["Flux.1, ControlNet"]()
    graphs, most_bytes = BlockGraphs(blocks_of(model), Full), block_graphs.LARGEST_BYTES
    SharedModel(model, spec_of(type(model)), group)
    block_graphs.numbers_over, counts = asked, list[int]()
    try:
        with torch.inference_mode():
            want = call(model, inputs)
            for bytes_of_form in (0, 0, most_bytes, most_bytes, most_bytes):
                if len(counts) == 2:  # what was wrong with a form is no reason for others of the kind
                    graphs.known.clear()
                block_graphs.LARGEST_BYTES = bytes_of_form
                run = GraphRun(graphs, version=0, watch=QUIET)
                with run.calling(group):
                    assert torch.equal(call(model, inputs), want)
                counts.append(len(tried))
    finally:
        block_graphs.numbers_over, block_graphs.LARGEST_BYTES = numbers_over, most_bytes
    assert counts == [0, 0, 0, 2, 2], "one block of each of two kinds"
    why = "CUDA out of memory. Tried to allocate 2.00 MiB." if group.index else "on another rank"
    assert run.report().reason.count(why) == 2 and graphs.count == 0
