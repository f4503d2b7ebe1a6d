"""What graphs of blocks are given, that others hear while one is made, and how a device's is recorded."""

import itertools
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.models.hosted import cuda_graphs, graphs
from parallel_runtime.models.hosted.compiled import TOLD, Kind, _form, _kind_of
from parallel_runtime.models.hosted.cuda_graphs import CudaRecorder
from parallel_runtime.models.hosted.graphs import Watch
from parallel_runtime.models.specs.spec import ShardingSpec
from parallel_runtime.timing import RegionTimer
from parallel_runtime.wire.replies import Compiling

CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)


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
    told = {"sigmas": 3, "block_index": 4, "minimax_h3_layout": UNKNOWN, "patches": {}, "other": 5}
    (*_, read), _, given_by_class = kind.read((torch.ones(2), [], told), {})
    assert (read, given_by_class) == ({"sigmas": 3, "other": 5}, told), "an object that no block reads has no form"
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
        assert beating.wait(300)
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


class Allocator:
    """As torch's, of a device's memory or of pinned memory: how many graphs have a pool, and which are recorded to."""

    def __init__(self) -> None:
        self.users, self.recording = Counter[int](), list[int]()

    def begin(self, pool: int) -> None:
        if pool in self.users and not self.users[pool]:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        self.users[pool] += 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.append(pool)

    def end(self, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, pool: int) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0, "memory of graphs that live would be another's"


class Cuda:
    """torch.cuda as far as graphs need it, as it was in a version of torch: notes what is asked of it, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] = (2, 13)) -> None:
        self.version, self.asked, self.pools = version, list[Any](), itertools.count(1)
        self.device, self.pinned = Allocator(), Allocator()
        self.invalid = self.full = False
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(self.pools))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.asked.append(("synchronize", device)))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
        for name in names:
            monkeypatch.delattr(torch._C, name, raising=False)
        monkeypatch.setattr(torch._C, names[version < (2, 8)], self.ends, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.releases, raising=False)

    def ends(self, index: int, pool: int) -> None:
        assert index == CARD.index
        self.device.end(pool)

    def releases(self, index: int, pool: int) -> None:
        assert index == CARD.index
        self.device.release(pool)

    @contextmanager
    def on(self, stream: str) -> Any:
        self.asked.append(stream)
        yield
        self.asked.append("left")

    def waits(self) -> None:
        """What a block does that waits for its device."""
        self.invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")

    def hides_it(self) -> None:
        """A block that waits and goes on."""
        self.invalid = True

    def is_refused(self) -> None:
        """A block of which no graph is wanted, while nothing is wrong with the recording."""
        raise RuntimeError("it returns other shapes than before")

    def is_too_large(self) -> None:
        """A block whose graph has no room on the device."""
        self.full = True


class Graph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.ended, self.made = cuda, False, False

    def capture_begin(self, **given: Any) -> None:
        self.cuda.asked.append(given)
        self.of = given["pool"]
        self.cuda.device.begin(self.of)
        if self.cuda.version >= (2, 11):
            self.cuda.pinned.begin(self.of)

    def capture_end(self) -> None:
        cuda = self.cuda
        cuda.asked.append("end")
        invalid, cuda.invalid = cuda.invalid, False
        if not invalid or cuda.version >= (2, 13):
            cuda.device.end(self.of)
            if cuda.version >= (2, 11):
                cuda.pinned.end(self.of)
        if invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.ended, full, cuda.full = True, cuda.full, False
        if full:
            raise RuntimeError("out of memory")
        self.made = True

    def pool(self) -> int:
        if not (self.made if self.cuda.version < (2, 8) else self.ended):
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.of

    def replay(self) -> None:
        self.cuda.asked.append("replay")

    def __del__(self) -> None:
        if self.ended:
            self.cuda.device.release(self.of)
            self.cuda.pinned.users[self.of] -= self.cuda.version >= (2, 11)


def test_a_graph_is_recorded_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, recorder = Cuda(monkeypatch), CudaRecorder(CARD)
    before = [("synchronize", CARD), "a stream of cuda:1", {"pool": 1, "capture_error_mode": "thread_local"}]
    replay = recorder.record(lambda: cuda.asked.append("function"))
    assert cuda.asked == [*before, "function", "end", "left"]
    cuda.asked.clear()
    other = recorder.record(lambda: None)
    assert cuda.asked[2] == before[2], "graphs share their memory"
    replay()
    assert cuda.asked[-1] == "replay"
    del replay, other
    cuda.asked.clear()
    recorder.record(lambda: None)
    assert cuda.asked[2]["pool"] == 2, "torch records nothing in a pool without graphs"
    assert CudaRecorder(CARD)._stream is recorder._stream, "torch keeps memory for each"


@pytest.mark.parametrize("version", [(2, 6), (2, 8), (2, 11), (2, 13)], ids=str)
@pytest.mark.parametrize("fails", ["waits", "hides_it", "is_refused", "is_too_large"])
@pytest.mark.parametrize("first", [True, False])
def test_behind_a_recording_that_failed_others_are_made_and_all_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], fails: str, first: bool
) -> None:
    cuda, recorder = Cuda(monkeypatch, version), CudaRecorder(CARD)
    graphs = [] if first else [recorder.record(lambda: None)]
    for _ in range(2):
        said = ""
        try:
            recorder.record(getattr(cuda, fails))
        except RuntimeError as error:
            said = str(error)
        assert said in (
            "operation not permitted when stream is capturing",
            "operation failed due to a previous error during capture",
            "it returns other shapes than before",
            "out of memory",
        ), "the first error says what is wrong"
        assert cuda.device.recording == [], "torch could give back no memory"
        graphs.append(recorder.record(lambda: None))
    assert sum(cuda.device.users.values()) == len(graphs), "each that lives counts, and nothing else does"
    graphs.clear()
    assert not any(cuda.device.users.values())


def test_a_recording_that_torch_does_not_begin_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, recorder = Cuda(monkeypatch, (2, 11)), CudaRecorder(CARD)
    cuda.pinned.recording.append(1)  # of a failure of another recorder's
    with pytest.raises(RuntimeError, match="already recording"):
        recorder.record(lambda: None)
    assert cuda.device.recording == []
    assert recorder.record(lambda: None)


@pytest.mark.parametrize("version", [(2, 6), (2, 13)], ids=str)
def test_a_torch_that_ends_recordings_by_other_names_goes_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    cuda, recorder = Cuda(monkeypatch, version), CudaRecorder(CARD)
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool"):
        monkeypatch.delattr(torch._C, name, raising=False)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(cuda.waits)


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_who_waits_for_the_device_is_found_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    """By torch's words for either vendor. Other warnings come, each once, of however many blocks."""
    Cuda(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_SAID", set())
    modes: list[Any] = [0]

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    recorder = CudaRecorder(CARD)

    def waits() -> None:
        if modes[-1] == "warn":
            said = f"called a synchronizing {vendor} operation (Triggered internally at /c10.cpp:1.)"
            warnings.warn(said, stacklevel=1)

    with pytest.warns(UserWarning) as others:
        for block in (1, 2, 2):
            with recorder.noting_waits() as noted:
                waits()
                warnings.warn(f"of block {block}", stacklevel=1)
                waits()
            assert len(noted) == 2
    assert [str(each.message) for each in others] == ["of block 1", "of block 2"]
    with recorder.noting_waits() as noted:
        pass
    assert noted == [] and modes == [0, *["warn", 0] * 4]
    with pytest.raises(ValueError, match="of the block"), recorder.noting_waits():
        raise ValueError("of the block")
    assert modes[-1] == 0
