"""What graphs of blocks are given, that others hear while one is made, and how a device's is recorded."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.models.hosted import graphs
from parallel_runtime.models.hosted.compiled import TOLD, Kind, _form, _kind_of
from parallel_runtime.models.hosted.cuda_graphs import CudaRecorder
from parallel_runtime.models.hosted.graphs import Watch
from parallel_runtime.models.specs.spec import ShardingSpec
from parallel_runtime.timing import RegionTimer
from parallel_runtime.wire.replies import Compiling

CPU = torch.device("cpu")


def stock(*args: Any) -> None:
    """Stands for a block's forward."""


ROWS, BEGIN, END = torch.arange(5), 7, torch.tensor([1.0, 2.0, 3.0])
RANGES = [
    ([(0, 2, BEGIN), (2, 5, 9)], [(0, 5, [7, 7, 9, 9, 9])]),
    ([(0, 2, BEGIN), (2, 5, END)], [(0, 5, [7, 7, 1, 2, 3])]),
    ([(0, 4, 3)], [(0, 4, [3, 3, 3, 3])]),
    ([(0, 2, 7), (3, 5, 9)], None),  # a token is in none
    ([(1, 2, 7), (2, 5, 9)], None),
    ([], None),
    (None, None),
]


@pytest.mark.parametrize(("ranges", "one"), RANGES)
@pytest.mark.parametrize("by_name", [False, True])
def test_ranges_become_one_with_the_row_of_each_token(ranges: Any, one: Any, by_name: bool) -> None:
    kind = Kind("Block", stock, stock, None, frozenset(), ranges=(1, "ranges"))
    args, kwargs = ((ROWS,), {"ranges": ranges}) if by_name else ((ROWS, ranges, 4), {})
    taken, named, _ = kind.given(args, kwargs)
    found = named["ranges"] if by_name else taken[1]
    assert torch.equal(taken[0], ROWS) and (by_name or taken[2:] == (4,))
    assert kind.given((ROWS,), {})[0][1:] == ()
    if one is None:
        assert found is ranges or found == ranges
        return
    ((start, end, row),) = found
    assert [(start, end, row.tolist())] == one


@pytest.mark.parametrize("by_place", [True, False])
def test_a_graph_is_given_no_options_that_no_block_reads(by_place: bool) -> None:
    kind = Kind("Block", stock, stock, 1, frozenset(("sigmas",)))
    for patches, kept in (({}, {}), ({"a": [1]}, {"patches": {"a": [1]}})):
        options = {"sigmas": 1, "block": 2, "patches": patches}
        args, kwargs = ((3, options, 4), {}) if by_place else ((3,), {"transformer_options": options, "other": 5})
        taken, named, told = kind.read(args, kwargs)
        assert told is options and options.keys() == {"sigmas", "block", "patches"}
        read = {"block": 2} | kept
        assert (taken, named) == (((3, read, 4), {}) if by_place else ((3,), {"transformer_options": read, "other": 5}))
    assert kind.read((3,), {}) == ((3,), {}, None)
    assert Kind("Block", stock, stock, None, frozenset()).read((3, {"patches": {}}), {}) == (
        (3, {"patches": {}}),
        {},
        None,
    )
    assert Kind("Block", stock, stock, 0, frozenset()).read(({"a": 1}, 2), {}) == (({"a": 1}, 2), {}, {"a": 1})


def test_tensors_have_the_strides_of_their_shape_but_for_expanded_ones() -> None:
    kind = Kind("Block", stock, stock, None, frozenset())
    turned, expanded, one = (
        torch.ones(3, 4).t(),
        torch.ones(4, 1).expand(4, 3),
        torch.ones(4, 9)[:, None].transpose(0, 1),
    )
    ((a, [b]), named, _) = kind.given((turned, [expanded]), {"c": (one, "text")})
    assert a.stride() == (3, 1) and b is expanded and isinstance(named["c"], tuple) and named["c"][1] == "text"
    assert named["c"][0].shape == (1, 4, 9) and named["c"][0].stride() == (36, 9, 1)
    assert torch.equal(a, turned) and torch.equal(named["c"][0], one)


def test_a_graph_is_of_kinds_dtypes_and_lengths_of_one() -> None:
    assert _form((torch.ones(2, 1, 3), [torch.ones(1, dtype=torch.int64), "text"], None, 4)) == (
        *((torch.float32, (False, True, False)), ((torch.int64, (True,)), str), type(None), int),
    )


class Block(nn.Module):
    """Reads one of what is told in options, in a function of its module."""

    def forward(self, x: Tensor, ranges: Any, transformer_options: Any = None) -> Tensor:
        return x * read_of(transformer_options)


class Stateless(nn.Module):
    """Has no options, and asks what nobody knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * UNKNOWN(x)


def read_of(options: Any) -> Any:
    """As a helper of ComfyUI's."""
    return options["sigmas"]


class Unknown:
    """An object that is called."""

    def __call__(self, x: Tensor) -> Tensor:
        """Whatever."""
        return x


UNKNOWN = Unknown()


def test_a_kind_of_block_is_known_by_its_forward() -> None:
    given: dict[str, Any] = {"attention": {}, "cut": {"blocks.0": {"x": "img"}}, "gather": {"blocks.-1": "img"}}
    kind = _kind_of(Block(), ShardingSpec(**given, row_ranges={"blocks": "ranges"}), "blocks")
    assert (kind.title, kind.forward, kind.options, kind.ranges) == ("Block", Block.forward, 2, (1, "ranges"))
    assert kind.unread == TOLD - {"sigmas"} and kind.reason == ""
    assert torch.equal(kind.with_loras("form", Block(), torch.ones(2), [], {"sigmas": 3}), torch.full((2,), 3.0))
    other = _kind_of(Stateless(), ShardingSpec(**given, row_ranges={"blocks": "ranges"}), "blocks")
    assert (other.options, other.ranges, other.unread) == (None, None, frozenset())
    given["cut"] = {"blocks.*:forward_gen": {"x": "img"}, "blocks.*:forward_pose": {"x": "img"}}
    reason = _kind_of(Block(), ShardingSpec(**given), "blocks").reason
    assert reason == "the model calls its blocks by forward_gen and forward_pose, and their forward alone is compiled"


def watched() -> tuple[Watch, list[Any]]:
    """A watch, and what it is told."""
    told: list[Any] = []
    return Watch(RegionTimer(CPU, on=True), lambda: told.append("beat"), told.append), told


def test_while_a_graph_is_made_there_are_signs_of_life_and_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "BEAT_S", 0.0)
    watch, told = watched()
    beating = threading.Event()

    def beat() -> None:
        beating.set()
        time.sleep(0.05)
        told.append("beat")

    watch.beat = beat
    with graphs._making(watch):
        assert beating.wait(20)
    assert told[0] == Compiling(begins=True) and told[-1] == Compiling(begins=False)
    assert len(told) > 2 and set(told[1:-1]) == {"beat"}, "the last of them has come before the end is told"
    assert watch.timer.seconds()["compile_s"] >= watch.compile_s >= 0.05
    began = len(told)
    monkeypatch.setattr(graphs, "COMPILE_S", 0.0)
    with graphs._making(watch):
        time.sleep(0.02)
    assert told[began:] == [Compiling(begins=True), Compiling(begins=False)], (
        "no life is shown for longer than it takes"
    )
    with pytest.raises(RuntimeError), graphs._making(watch):
        raise RuntimeError("of the compiler")
    assert told[-2:] == [Compiling(begins=True), Compiling(begins=False)]


def test_a_graph_that_is_made_while_another_is_made_is_told_with_it() -> None:
    watch, told = watched()
    made = graphs.Graphs()
    for _ in range(2):
        told.clear()
        with made._told(watch), made._told(watch):
            pass
        assert told == [Compiling(begins=True), Compiling(begins=False)]


def test_the_order_of_two_attentions_in_a_graph_is_no_matter_of_sizes_which_differ_by_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    if hasattr(inductor, "reorder_for_peak_memory"):
        monkeypatch.setattr(inductor, "reorder_for_peak_memory", True)
    assert graphs.Graphs()._for_all_lengths(len) is len
    assert not getattr(inductor, "reorder_for_peak_memory", False)


class Cuda:
    """torch.cuda as far as graphs need it: notes what is asked of the device, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.asked.append(("synchronize", device)))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocating, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        self.replay, self.ends = object(), True

    def release(self, *of: Any) -> None:
        self.asked.append(("released", *of))

    def end_allocating(self, *of: Any) -> None:
        if not self.ends:
            raise RuntimeError("not currently recording to mempool_id")
        self.asked.append(("ended", *of))

    @contextmanager
    def on(self, stream: str) -> Any:
        self.asked.append(stream)
        yield
        self.asked.append("left")

    def capture_begin(self, **given: Any) -> None:
        self.asked.append(given)

    def capture_end(self) -> None:
        self.asked.append("end")
        if "failed" in self.asked:
            raise RuntimeError("nothing was captured")


def test_a_graph_is_recorded_when_the_device_is_done_and_ended_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, card = Cuda(monkeypatch), torch.device("cuda", 1)
    recorder = CudaRecorder(card)
    before = [("synchronize", card), "a stream of cuda:1", {"pool": "pool", "capture_error_mode": "thread_local"}]
    assert recorder.record(lambda: cuda.asked.append("function")) is cuda.replay
    assert cuda.asked == [*before, "function", "end", "left"]

    def fails() -> None:
        cuda.asked.append("failed")
        raise ValueError("the first error")

    for ended in ([("ended", 1, "pool"), ("released", 1, "pool")], []):  # by us; by a torch that has done it
        cuda.asked.clear()
        cuda.ends = bool(ended)
        with pytest.raises(ValueError, match="the first error"):
            recorder.record(fails)
        assert cuda.asked == [*before, "failed", "end", *ended]
    assert CudaRecorder(card)._stream is recorder._stream, "torch keeps memory for each"
