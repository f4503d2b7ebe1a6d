"""Functions of tensors as graphs of torch's compiler, made when they are first needed.

Owns which calls share a graph, and that others are told while one is made. Owns no arithmetic: a model's own compiled
blocks say which functions and by which key (the model's compiled.py).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..compiling import COMPILE_S
from ..timing import RegionTimer
from ..wire.replies import Compiling

BEAT_S = 1.0
GRAPHS_A_FUNCTION = 8  # torch's own limit, beyond which it would run a function uncompiled
Values = tuple[torch.Tensor, ...]
Half: TypeAlias = Callable[..., Values | None]  # the second half of a block writes to its tokens
Marks: TypeAlias = Sequence[tuple[torch.Tensor, int]]  # dimensions of which a graph must know no number


@dataclass
class Watch:
    """Who is told of graphs being made: `tell` says so to the parent, `beat` is a sign of life. What they took."""

    timer: RegionTimer
    beat: Callable[[], None]
    tell: Callable[[Compiling], None]
    compile_s: float = 0.0


class Graphs:
    """All graphs of one rank's process, which torch keeps for it. Imports the compiler on first use."""

    def __init__(self) -> None:
        self.made = 0
        self._compiled: dict[Half, Half] = {}
        self._known: dict[Half, set[object]] = {}

    def call(
        self, function: Half, key: object, marks: Callable[[], Marks], watch: Watch, *arguments: object
    ) -> Values | None:
        """A function's result from its graph for `key`. `marks` is asked when that graph is to be made."""
        known = self._known.get(function)
        if known is not None and key in known:
            return self._compiled[function](*arguments)
        return self._first_call(function, key, marks(), watch, arguments)

    def _first_call(
        self, function: Half, key: object, marks: Marks, watch: Watch, arguments: tuple[object, ...]
    ) -> Values | None:
        with _making(watch):
            import torch._dynamo
            from torch._dynamo.exc import TorchDynamoException
            from torch.fx.experimental import _config

            _config.use_duck_shape = False  # two lengths that are equal today need not be tomorrow
            if len(self._known.get(function, ())) >= GRAPHS_A_FUNCTION:
                torch.compiler.reset()
                self._known.clear()
            for tensor, dim in marks:
                torch._dynamo.mark_dynamic(tensor, dim)
            if function not in self._compiled:
                self._compiled[function] = torch.compile(function, backend=self._make)
            try:
                result = self._compiled[function](*arguments)
            except TorchDynamoException as error:
                said = str(error).strip().partition("\n")[0]
                raise RuntimeError(f"a block cannot be compiled: {said}; switch compiling off") from error
        self._known.setdefault(function, set()).add(key)
        return result

    def _make(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: TorchInductor, counted."""
        from torch._dynamo import lookup_backend

        self.made += 1
        return lookup_backend("inductor")(graph, list(inputs))


@contextmanager
def _making(watch: Watch) -> Iterator[None]:
    """Say that a graph is being made, and show life meanwhile, for as long as making one may take."""
    began = time.perf_counter()
    done = threading.Event()

    def show_life() -> None:
        while not done.wait(BEAT_S) and time.perf_counter() - began < COMPILE_S:
            watch.beat()

    watch.tell(Compiling(begins=True))
    thread = threading.Thread(target=show_life, name="compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        watch.compile_s += time.perf_counter() - began
        watch.timer.spent("compile", time.perf_counter() - began)
    watch.tell(Compiling(begins=False))
