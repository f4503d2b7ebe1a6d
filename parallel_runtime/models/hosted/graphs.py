"""Functions of tensors as graphs of torch's compiler, made when they are first needed.

Owns which calls share a graph, and that others are told while one is made. Owns no arithmetic: a model's own compiled
blocks say which functions and by which key (compiled.py).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...compiling import COMPILE_S
from ...timing import RegionTimer
from ...wire.replies import Compiling

BEAT_S = 1.0
FORMS_A_FUNCTION = 64  # graphs of one function, of all models that a rank has had
Function: TypeAlias = Callable[..., Any]


@dataclass
class Watch:
    """Told of graphs being made: `tell` says so to the parent, `beat` is a sign of life. What they took."""

    timer: RegionTimer
    beat: Callable[[], None]
    tell: Callable[[Compiling], None]
    compile_s: float = 0.0


class NoGraphError(Exception):
    """The compiler can make no graph of a function; in its words."""


class Graphs:
    """All graphs of one rank's process, which torch keeps for it. Imports the compiler on first use."""

    def __init__(self) -> None:
        self.made = 0
        self._whole: dict[Function, Function] = {}
        self._whole_known: dict[Function, dict[object, str]] = {}  # by form of the call; why it has no graph, if so
        self._watch: Watch | None = None
        self._telling = False
        self._backend = self._make  # one object: torch compares

    def whole(self, function: Function, form: object, watch: Watch, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """A function's result from a graph of all of it, for any lengths; `form`: what else tells calls apart.

        Raises `NoGraphError` with the compiler's own words where it can make none, before anything has run.
        """
        known = self._whole_known.setdefault(function, {})
        if said := known.get(form, ""):
            raise NoGraphError(said)
        self._watch = watch
        try:
            if form in known:
                return self._whole[function](*args, **kwargs)
            with self._told(watch):
                if function not in self._whole:
                    self._whole[function] = self._for_all_lengths(function)
                result = self._whole[function](*args, **kwargs)
        except _errors_of_compiler() as error:
            known[form] = str(error).strip().partition("\n")[0] or type(error).__name__
            raise NoGraphError(known[form]) from error
        known[form] = ""
        return result

    def _for_all_lengths(self, function: Function) -> Function:
        import torch._dynamo.config as config
        import torch._inductor.config as inductor
        from torch.fx.experimental import _config

        if hasattr(inductor, "reorder_for_peak_memory"):
            # by sizes, which differ by rank: two attentions that do not need each other would exchange in two orders
            inductor.reorder_for_peak_memory = False

        _config.use_duck_shape = False  # two lengths that are equal today need not be tomorrow
        limit = "recompile_limit" if "recompile_limit" in dir(config) else "cache_size_limit"
        setattr(config, limit, max(vars(config).get(limit, 0), FORMS_A_FUNCTION))
        return torch.compile(function, backend=self._backend, dynamic=True, fullgraph=True)

    @contextmanager
    def _told(self, watch: Watch) -> Iterator[None]:
        """Around the making of a graph, and another within it."""
        if self._telling:
            yield
            return
        self._telling = True
        try:
            with _making(watch):
                yield
        finally:
            self._telling = False

    def _make(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: TorchInductor, counted."""
        from torch._dynamo import lookup_backend

        with nullcontext() if self._watch is None else self._told(self._watch):
            compiled = lookup_backend("inductor")(graph, list(inputs))
        self.made += 1  # torch may begin again within, which raises
        return compiled


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
        watch.tell(Compiling(begins=False))  # also of a compiler that raises: what it was to compile runs as it is


def _errors_of_compiler() -> tuple[type[Exception], ...]:
    """What torch's compiler raises where it cannot make a graph; this torch's names."""
    import torch._dynamo.exc as tracing
    import torch._inductor.exc as lowering

    found = [vars(tracing).get(name) for name in ("TorchDynamoException", "FailOnRecompileLimitHit")]
    return tuple(each for each in (*found, vars(lowering).get("InductorError")) if each is not None)
