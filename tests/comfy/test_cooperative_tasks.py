"""Host code in tasks: turns in order, one request for all, thread states of their own, nothing left by an error."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import ModuleType

import pytest
import torch

WORD: ContextVar[str] = ContextVar("word", default="")


@pytest.fixture(scope="module")
def turns(module_of_pack) -> ModuleType:
    return module_of_pack("nodes.host.tasks.cooperative_tasks")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


# What the interpreter waits for as it ends comes last, and would wait for ever where a thread that it joins is left.
INTERRUPTED = """
import importlib.util, signal, sys, threading
signal.alarm(120)
found = importlib.util.spec_from_file_location("turns", sys.argv[2])
sys.modules["turns"] = turns = importlib.util.module_from_spec(found)
found.loader.exec_module(turns)
held = threading.Event()

def send(calls):
    held.set()
    threading.Event().wait()

def call():
    return turns.hand_over([turns.Handed("", send, 0)])

threading.Thread(target=turns.run_in_turns, args=([call, call],), kwargs={"at_once": 2}, daemon=True).start()
held.wait()
threading._shutdown()
"""


class Requests:
    """Stands where the pool is called; doubles what it gets and remembers each request."""

    def __init__(self, tasks: ModuleType) -> None:
        self.tasks = tasks
        self.seen: list[list[int]] = []

    def send(self, calls: list[int]) -> list[torch.Tensor]:
        self.seen.append(calls)
        return [torch.tensor(2 * call) for call in calls]

    def call(self, value: int, key: str = "model") -> int:
        (out,) = self.tasks.hand_over([self.tasks.Handed(key, self.send, value)])
        return int(out)


@pytest.fixture
def requests(turns: ModuleType) -> Requests:
    return Requests(turns)


def test_calls_of_all_tasks_go_in_one_request_and_each_gets_its_own_result(turns, requests) -> None:
    tasks = [lambda k=k: [requests.call(k), requests.call(10 + k)] for k in range(3)]
    assert turns.run_in_turns(tasks, at_once=3) == [[0, 20], [2, 22], [4, 24]]
    assert requests.seen == [[0, 1, 2], [10, 11, 12]]
    inside = [turns.inside_a_task] * 2
    assert [turns.run_in_turns(inside, at_once=count) for count in (2, 1)] == [[True] * 2, [False] * 2]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_each_thread_that_a_task_has_ends_with_what_it_is_told(turns, at_once: int) -> None:
    where: dict[str, list[object]] = {"ran": [], "ended": []}

    def task(error: bool) -> None:
        where["ran"].append(threading.current_thread())
        if error:
            raise ZeroDivisionError

    told = {"at_once": at_once, "at_end": lambda: where["ended"].append(threading.current_thread())}
    turns.run_in_turns([partial(task, False)] * 3, **told)
    with pytest.raises(ZeroDivisionError):
        turns.run_in_turns([partial(task, True)], **told)
    assert where["ended"] == ([] if at_once == 1 else where["ran"])


def test_what_a_tasks_thread_keeps_is_gone_once_the_tasks_have_ended(turns, requests) -> None:
    kept, gone = threading.local(), list[int]()

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.05)
            gone.append(1)

    def task() -> None:
        kept.here = Slow()
        requests.call(1)

    turns.run_in_turns([task, task], at_once=2)
    assert gone == [1, 1]


def test_a_thread_that_the_system_refuses_is_the_error_and_those_that_run_end(turns, requests, monkeypatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def first_alone(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", first_alone)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        turns.run_in_turns([lambda: requests.call(1), lambda: requests.call(2)], at_once=2)
    assert requests.seen == [] and not started[0].is_alive()


def test_one_runs_at_any_moment_in_order_and_switches_only_where_it_calls(turns, requests) -> None:
    log: list[str] = []

    def task(k: int) -> None:
        for turn in range(2):
            log.append(f"{k} before {turn}")
            requests.call(k)
            log.append(f"{k} after {turn}")

    turns.run_in_turns([lambda: task(0), lambda: task(1)], at_once=2)
    assert log == [
        *("0 before 0", "1 before 0"),
        *("0 after 0", "0 before 1", "1 after 0", "1 before 1"),
        *("0 after 1", "1 after 1"),
    ]


def test_as_one_ends_the_next_begins(turns, requests) -> None:
    tasks = [lambda k=k, n=n: [requests.call(k) for _ in range(n)] for k, n in enumerate([1, 3, 2, 0, 1])]
    results = turns.run_in_turns(tasks, at_once=2)
    assert [len(result) for result in results] == [1, 3, 2, 0, 1]
    assert requests.seen == [[0, 1], [1, 2], [1, 2], [4]]


def test_calls_that_cannot_travel_together_go_in_requests_of_their_own(turns, requests) -> None:
    tasks = [lambda k=k: requests.call(k, key="ab"[k % 2]) for k in range(4)]
    assert turns.run_in_turns(tasks, at_once=4) == [0, 2, 4, 6]
    assert requests.seen == [[0, 2], [1, 3]]


def test_tasks_inside_tasks_send_all_calls_together(turns, requests) -> None:
    def inner(k: int) -> list[int]:
        return turns.run_in_turns([lambda: requests.call(k), lambda: requests.call(k + 1)], at_once=2)

    assert turns.run_in_turns([lambda: inner(0), lambda: inner(10)], at_once=2) == [[0, 2], [20, 22]]
    assert requests.seen == [[0, 1, 10, 11]]


def test_one_at_once_needs_no_thread(turns, requests) -> None:
    tasks = [lambda k=k: (requests.call(k), threading.current_thread()) for k in range(2)]
    assert turns.run_in_turns(tasks, at_once=1) == [(0, threading.current_thread()), (2, threading.current_thread())]
    assert requests.seen == [[0], [1]]


def test_a_task_has_the_settings_of_the_callers_thread(turns, requests) -> None:
    def seen() -> tuple:
        requests.call(0)
        kinds = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")]
        return (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), WORD.get(), *kinds)

    def both() -> list:
        return [seen(), *turns.run_in_turns([seen, seen], at_once=2)]

    given = WORD.set("the caller's")
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert both() == [(True, False, "the caller's", True, torch.bfloat16)] * 3
        with torch.no_grad():
            assert [each[:4] for each in both()] == [(False, False, "the caller's", False)] * 3
        assert [each[:4] for each in both()] == [(False, True, "the caller's", False)] * 3
    finally:
        WORD.reset(given)


def test_a_task_has_the_stream_of_the_callers_thread(turns, monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[str] = []

    @contextmanager
    def stream(of: str) -> Iterator[None]:
        put.append(of)
        yield
        put.append("back")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with turns.ThreadState.here().restored():
        assert put == ["the caller's"]
    assert put == ["the caller's", "back"]


def noisy(requests: Requests, seed: int, calls: int = 3) -> Callable[[], torch.Tensor]:
    """A task that draws from torch's global generator before, between and after its calls."""

    def task() -> torch.Tensor:
        torch.manual_seed(seed)
        drawn = [torch.rand(2)]
        for _ in range(calls):
            requests.call(seed)
            drawn.append(torch.rand(2))
        return torch.cat(drawn)

    return task


def test_random_numbers_of_a_task_do_not_depend_on_those_beside_it(turns, requests) -> None:
    alone = [noisy(requests, seed)() for seed in range(4)]
    torch.manual_seed(99)
    before = torch.get_rng_state()
    kept = (turns.RandomNumbers(),)
    beside = turns.run_in_turns([noisy(requests, seed) for seed in range(4)], at_once=3, kept=kept)
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    shared = turns.run_in_turns([noisy(requests, seed) for seed in range(4)], at_once=3)
    assert not all(torch.equal(one, other) for one, other in zip(alone, shared, strict=True)), "this shows nothing"


def test_the_first_error_is_raised_and_the_others_unwind_in_turn(turns, requests) -> None:
    log: list[str] = []

    def task(k: int) -> None:
        try:
            requests.call(k)
            if k == 1:
                raise ValueError("one is wrong")
            requests.call(k)
        finally:
            log.append(f"{k} ends")
            if k == 2:
                raise RuntimeError("ending was wrong too")

    with pytest.raises(ValueError, match="one is wrong"):
        turns.run_in_turns([lambda k=k: task(k) for k in range(4)], at_once=3)
    assert log == ["1 ends", "0 ends", "2 ends"]
    assert requests.seen == [[0, 1, 2]], "a task began after the error"


def test_a_task_that_is_ended_unwinds_in_one_turn_with_what_is_kept_of_it(turns, requests) -> None:
    class Place:
        """Whose version is in place, and how often one was put there."""

        version, puts = "of the caller", 0

        def get(self) -> str:
            return self.version

        def put(self, version: str) -> None:
            self.version, self.puts = version, self.puts + 1

    place, seen = Place(), list[str]()

    def waiting() -> None:
        place.version = "of the one that waits"
        try:
            requests.call(1)
        finally:
            place.puts = 0
            time.sleep(0.05)
            seen.append(place.version)

    def failing() -> None:
        raise ValueError("it is wrong")

    with pytest.raises(ValueError, match="it is wrong"):
        turns.run_in_turns([waiting, failing], at_once=2, kept=(place,))
    assert (seen, place.version, place.puts) == (["of the one that waits"], "of the caller", 1)


class Model:
    """What tasks have of ComfyUI's."""


def test_nothing_that_tasks_had_outlives_them(turns, requests) -> None:
    """A MODEL that Python's search for cycles has yet to find is one without a patcher to ComfyUI's manager."""

    def task(model: Model, *, fails: bool) -> Model:
        requests.call(0)
        if fails:
            raise ValueError("wrong")
        return model

    gc.collect()
    gc.disable()
    try:
        for failing in (False, True):
            model = Model()
            there = weakref.ref(model)
            tasks = [lambda k=k, model=model: task(model, fails=failing and k == 1) for k in range(3)]  # noqa: B023
            with pytest.raises(ValueError, match="wrong") if failing else nullcontext():
                turns.run_in_turns(tasks, at_once=2)
            del model, tasks
            assert there() is None, "after an error" if failing else "after results"
    finally:
        gc.enable()


def test_a_request_that_fails_or_is_cancelled_ends_every_task(turns) -> None:
    class Cancelled(BaseException):
        """As ComfyUI's interrupt: no Exception."""

    ended: list[int] = []

    def send(calls: list[int]) -> list[torch.Tensor]:
        raise Cancelled

    def task(k: int) -> None:
        try:
            turns.hand_over([turns.Handed("model", send, k)])
        except Exception:  # noqa: BLE001, S110 - what packs do around a call must not keep a task alive
            pass
        finally:
            ended.append(k)

    with pytest.raises(Cancelled):
        turns.run_in_turns([lambda k=k: task(k) for k in range(3)], at_once=3)
    assert ended == [0, 1, 2]


def test_a_task_that_swallows_even_its_end_cannot_call_again(turns, requests) -> None:
    ends: list[type] = []

    def stubborn() -> None:
        for _ in range(3):
            try:
                requests.call(0)
            except BaseException as error:  # noqa: BLE001 - the worst that code between us and the sampler may do
                ends.append(type(error))

    def failing() -> None:
        requests.call(1)
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        turns.run_in_turns([failing, stubborn], at_once=2)
    assert ends == [turns.TaskEndedError] * 3
    assert requests.seen == [[1, 0]]


def test_an_error_in_tasks_inside_tasks_ends_them_all(turns, requests) -> None:
    ended: list[int] = []

    def inner(k: int) -> None:
        try:
            requests.call(k)
            if k == 11:
                raise ValueError("eleven")
        finally:
            ended.append(k)

    def outer(k: int) -> None:
        turns.run_in_turns([lambda: inner(k), lambda: inner(k + 1)], at_once=2)

    with pytest.raises(ValueError, match="eleven"):
        turns.run_in_turns([lambda: outer(10), lambda: outer(20)], at_once=2)
    assert sorted(ended) == [10, 11, 20, 21]


def test_a_process_that_is_interrupted_does_not_wait_for_the_request_that_tasks_wait_for(turns, in_comfyui) -> None:
    """As ComfyUI is by Ctrl-C: its thread that runs prompts is a daemon, too."""
    in_comfyui(INTERRUPTED, turns.__file__)
