"""What is counted of a class that keeps something between the calls of a run (`ShardingSpec.keeps`): the call that
fills it, the one that finds it, and what it takes.

Owns a module's state while it is counted. Does not own the counters (count.py), nor the state in a run (kept_state.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..specs.spec import Keeps
from .bytes_in import bytes_in
from .kept_state import is_pair

STORED = ("default", "int8", "int4")  # as options name them
MUCH = 1 << 60  # bytes


class Roomy:
    """Stands for ComfyUI's ModelPatcher where a class asks it how much memory is free: enough for whatever it keeps."""

    def get_free_memory(self, device: torch.device) -> int:
        """Bytes."""
        return MUCH


class KeepsOtherwiseError(Exception):
    """A class decides otherwise than its spec says: in ranks it keeps nothing."""


class FillsOnce:
    """Stands for the method of a class that decides: the first call fills, and all others find what it kept.

    The class would compare the values of two calls, and on the meta device there are none.
    """

    def __init__(self, decide: Callable[..., tuple[Any, bool]]) -> None:
        self._decide = decide
        self.state: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, bool]:  # noqa: ANN401
        """What is kept, and whether the call finds all that it needs. Raises KeepsOtherwiseError."""
        if self.state is not None:
            return self.state, True
        decided = self._decide(*args, **kwargs)
        if not is_pair(decided):
            raise KeepsOtherwiseError
        self.state, found = decided
        return self.state, found


@contextmanager
def filled_once(module: torch.nn.Module, keeps: Keeps) -> Iterator[FillsOnce]:
    """Inside, the first call of the module fills what its class keeps, and all others find it."""
    decide = FillsOnce(getattr(module, keeps.decide))
    reset = getattr(module, keeps.reset)
    setattr(module, keeps.patcher, Roomy())
    setattr(module, keeps.decide, decide)
    reset(True)
    try:
        yield decide
    finally:
        reset(False)
        delattr(module, keeps.decide)
        delattr(module, keeps.patcher)


def options_of(keeps: Keeps, stored: str) -> dict[str, Any]:
    """The transformer option by which a call keeps what it does on its device, in this format."""
    return {keeps.option: {"device": "gpu", "dtype": stored}}


def kept_bytes(module: torch.nn.Module, keeps: Keeps, call: Callable[..., object]) -> dict[str, float]:
    """Bytes that a call keeps, by the format, without those that this ComfyUI cannot store so."""
    found = {}
    for stored in STORED:
        try:
            with torch.no_grad(), filled_once(module, keeps) as filled:
                call(**options_of(keeps, stored))
                found[stored] = float(bytes_in(filled.state))
        except (NotImplementedError, RuntimeError):
            if stored == STORED[0]:
                raise
    return found
