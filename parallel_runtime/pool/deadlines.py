"""How long a request may show no sign of life before its ranks are ended.

Owns the numbers. Does not own what steps have taken so far (calls.py), and does not watch anybody (supervisor.py): a
sign of life is a message or a heartbeat of any rank, given with every block of a step, every piece of a file and every
weight that is changed.

Starting and loading have deadlines of their own: importing torch and the first bytes of a file may hang on a disk or a
network for minutes and be well. That holds for a process that runs: one that does not has the deadline of any request,
whatever it does (silence.py). A step has the greater of the deadline and ten times the slowest of the last steps of
its shape: while that many of its like would fit in, its silence says nothing.
"""

import math
from collections.abc import Mapping

START_S = 600.0
LOAD_S = 600.0
REQUEST_S = 120.0
PEER_CHECK_S = 20.0  # a few MB between devices; where those cannot reach each other, copies may hang and not be damaged
VARIABLE = "PARALLEL_DIT_DEADLINE_S"  # what a user of ComfyUI sets


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
