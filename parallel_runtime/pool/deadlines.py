"""How long a request may show no sign of life before its ranks are ended.

Owns the numbers and what steps have taken so far. Does not watch anybody (supervisor.py): a sign of life is a message
or a heartbeat of any rank, given with every block of a step, every piece of a file and every weight that is changed.

Starting and loading have deadlines of their own: importing torch and the first bytes of a file may hang on a disk or a
network for minutes and be well. A step has the greater of the deadline and ten times the slowest of the last steps of
its shape: while that many of its like would fit in, its silence says nothing.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping

START_S = 600.0
LOAD_S = 600.0
REQUEST_S = 120.0
PEER_CHECK_S = 20.0  # a few MB between devices; where those cannot reach each other, copies may hang and not be damaged
TIMES = 10
VARIABLE = "PARALLEL_DIT_DEADLINE_S"  # what a user of ComfyUI sets
REMEMBERED_SHAPES = 64
REMEMBERED_STEPS = 8


class Pace:
    """How long the last steps of each shape took. A shape is whatever makes two steps take as long."""

    def __init__(self) -> None:
        self._seconds: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def note(self, shape: Hashable, seconds: float) -> None:
        """A step of that shape took `seconds`."""
        self._seconds.setdefault(shape, deque(maxlen=REMEMBERED_STEPS)).append(seconds)
        self._seconds.move_to_end(shape)
        if len(self._seconds) > REMEMBERED_SHAPES:
            self._seconds.popitem(last=False)

    def deadline_s(self, shape: Hashable, *, least_s: float) -> float:
        """The deadline of the next step of that shape, in seconds."""
        return max(least_s, TIMES * max(self._seconds.get(shape, (0.0,))))


def deadline_from(environment: Mapping[str, str]) -> float:
    """The deadline of a request that `environment` asks for, in seconds; 120 when it does not.

    Raises `ValueError` for anything but a positive number.
    """
    text = environment.get(VARIABLE, "")
    if not text.strip():
        return REQUEST_S
    try:
        return checked(float(text))
    except ValueError:
        raise ValueError(f"{VARIABLE}={text!r} is no positive number of seconds; use for example 300") from None


def checked(deadline_s: float) -> float:
    """The deadline itself. Raises `ValueError` unless it is a positive, finite number of seconds."""
    if not (deadline_s > 0 and math.isfinite(deadline_s)):
        raise ValueError(f"a deadline of {deadline_s} s; use a positive number of seconds")
    return deadline_s
