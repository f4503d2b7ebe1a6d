"""Tasks of host code that take turns: one runs at any moment, and they switch only where a call goes to the pool.

ComfyUI's code is not made to run twice at once: samplers, ControlNets and caches keep state, and all share one random
number generator. So each task runs, in order, until it hands a call over or ends; then the calls of all go to the pool
in one request, and each task goes on with its own result. Owns the turns, and that no thread outlives them, nor keeps a
process that was interrupted. Knows nothing of ComfyUI, nor of what a call is.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from threading import Semaphore, Thread
from typing import Any, Protocol, TypeVar

import torch

AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class ThreadState:
    """The settings of one thread, to have them in another."""

    inference: bool
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def here(cls) -> "ThreadState":
        """Those of this thread. A CUDA that is not used yet stays untouched."""
        return cls(
            inference=torch.is_inference_mode_enabled(),
            grad=torch.is_grad_enabled(),
            autocast=tuple((k, torch.get_autocast_dtype(k)) for k in AUTOCAST if torch.is_autocast_enabled(k)),
            stream=torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have them in the thread of the block; a new thread has torch's defaults."""
        with ExitStack() as stack:
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))  # and its device
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


class RandomNumbers:
    """torch's global generators as `Kept`: the CPU's and, where CUDA is in use, its current device's."""

    def get(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Their states."""
        return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put(self, version: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Continue from these states."""
        cpu, cuda = version
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


T = TypeVar("T")


class Kept(Protocol):
    """State of the process that each task has a version of its own of, put in place for its turns alone."""

    def get(self) -> object:
        """The version in place."""

    def put(self, version: object) -> None:
        """Have this version in place."""


@dataclass(frozen=True)
class Handed:
    """One call of a model. Those of one `key` may go through `send` together, which returns their results in order."""

    key: Hashable
    send: Callable[[list[Any]], list[torch.Tensor]]
    call: Any


class TaskEndedError(BaseException):
    """Unwinds a waiting task after another one failed; its own error is discarded.

    No `Exception`, so that what catches those on its way does not take it for a failed call.
    """


def hand_over(calls: Sequence[Handed]) -> list[torch.Tensor]:
    """The results of `calls`, in order. In a task, the other tasks have their turns before anything is sent."""
    running = TASK.get()
    return _send(calls) if running is None else running.wait_for(calls)


def inside_a_task() -> bool:
    """Whether this code runs in a task, next to others."""
    return TASK.get() is not None


def run_in_turns(
    tasks: Sequence[Callable[[], T]], *, at_once: int, kept: Sequence[Kept] = (), at_end: Callable[[], None] = int
) -> list[T]:
    """Run the tasks, up to `at_once` of them begun and not ended at any time, and return their results in order.

    `at_end`: called last in each thread that was made for a task.

    Each has the caller's context variables and torch's settings of the caller's thread. The first error of any task is
    raised, once all others have ended too. A task may run tasks of its own.
    """
    if at_once == 1:
        return [_alone(task, kept) for task in tasks]
    results: dict[int, T] = {}
    ahead = deque(enumerate(tasks))
    present: dict[int, _RunningTask] = {}
    threads: list[Thread] = []
    try:
        while ahead or present:
            for number, running in list(present.items()):
                _go_on(number, running, present, results)
            while ahead and len(present) < at_once:
                number, task = ahead.popleft()
                present[number] = _RunningTask(task, threads, kept, at_end)
                _go_on(number, present[number], present, results)
            _exchange(list(present.values()))
    finally:
        for running in present.values():
            running.end()
        for thread in threads:
            thread.join()
    return [results[number] for number in range(len(tasks))]


class _RunningTask:
    """One task in a thread of its own, which runs only within `go_on` and `end`."""

    def __init__(
        self, task: Callable[[], Any], threads: list[Thread], kept: Sequence[Kept], at_end: Callable[[], None]
    ) -> None:
        self._task, self._at_end = task, at_end
        self._kept = [(each, each.get()) for each in kept]
        self._thread_state = ThreadState.here()
        self._turn, self._turn_is_over = Semaphore(0), Semaphore(0)
        self._stopped = False
        self.calls: list[Handed] = []
        self.outs: list[torch.Tensor] = []
        self.done: Future = Future()
        turn_is_over = self._turn_is_over  # not self: the task, and the MODEL in it, would live on in a cycle
        self.done.add_done_callback(lambda _: turn_is_over.release())
        # A daemon: Python waits at its end for threads of an executor, which would wait for the step that runs.
        given = [self.done, copy_context().run, self._run]
        thread = Thread(target=_note_result, args=(given,), name="parallel-dit-task", daemon=True)
        thread.start()
        threads.append(thread)

    def go_on(self) -> None:
        """Let the task run until it waits for calls, or is done."""
        with _in_place(self._kept):
            self._turn.release()
            self._turn_is_over.acquire()

    def end(self) -> None:
        """Have the task done, whatever it waits for; its own error is dropped."""
        self._stopped = True
        while not self.done.done():
            with _in_place(self._kept):
                self._turn.release()
                self._turn_is_over.acquire()
        del self.done  # whose error knows this task by its traceback

    def wait_for(self, calls: Sequence[Handed]) -> list[torch.Tensor]:
        """In the task's thread: give the turn away until the results are there."""
        if not self._stopped:
            self.calls = list(calls)
            self._turn_is_over.release()
            self._turn.acquire()
        if self._stopped:
            raise TaskEndedError
        outs, self.outs = self.outs, []
        return outs

    def _run(self) -> object:
        self._turn.acquire()
        TASK.set(self)
        try:
            with self._thread_state.restored():
                return self._task()
        finally:
            self._at_end()


def _note_result(given: list[Any]) -> None:
    """Run what is given behind the future, which has its result or error; nothing is held but the error."""
    done, run, task = given
    given.clear()
    try:
        result = run(task)
    except BaseException as error:  # noqa: BLE001  the future raises it where the task was begun
        done.set_exception(error)
        del done, run, task  # its traceback has this frame
    else:
        done.set_result(result)


TASK: ContextVar[_RunningTask | None] = ContextVar("parallel_dit_task", default=None)  # that this code runs in


def _go_on(number: int, running: _RunningTask, present: dict[int, _RunningTask], results: dict[int, Any]) -> None:
    """Raises the task's error."""
    running.go_on()
    if running.done.done():
        results[number] = running.done.result()
        del present[number]


def _exchange(all_running: list[_RunningTask]) -> None:
    """Send what all tasks wait for, through the task that this code runs in, if it does; each gets its own results."""
    if not all_running:
        return
    outs = deque(hand_over([handed for running in all_running for handed in running.calls]))
    for running in all_running:
        running.outs = [outs.popleft() for _ in running.calls]
        running.calls = []


def _send(calls: Sequence[Handed]) -> list[torch.Tensor]:
    """One request for each key, in the order of the keys' first calls."""
    numbers: dict[Hashable, list[int]] = {}
    for number, handed in enumerate(calls):
        numbers.setdefault(handed.key, []).append(number)
    outs: dict[int, torch.Tensor] = {}
    for together in numbers.values():
        answered = calls[together[0]].send([calls[number].call for number in together])
        outs.update(zip(together, answered, strict=True))
    return [outs[number] for number in range(len(calls))]


def _alone(task: Callable[[], T], kept: Sequence[Kept]) -> T:
    with _in_place([(each, each.get()) for each in kept]):
        return task()


@contextmanager
def _in_place(kept: list[tuple[Kept, Any]]) -> Iterator[None]:
    """A task's versions for the time of the block, then those of before; what the block made of the task's is kept."""
    others = [(each, each.get()) for each, _ in kept]
    for each, version in kept:
        each.put(version)
    try:
        yield
    finally:
        kept[:] = [(each, each.get()) for each, _ in kept]
        for each, version in others:
            each.put(version)
