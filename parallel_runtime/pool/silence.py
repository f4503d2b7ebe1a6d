"""When ranks are silent, and which of them is the one.

Owns the judgement by their signs: messages, heartbeats and pulses. Does not own how long they may be silent
(deadlines.py), the wording (failure.py), nor what becomes of it (supervisor.py).

A rank that waits for others has no heartbeat, and on a GPU nobody can tell it from one that computes. So the silence
that counts against the request's deadline is that of all ranks together: while one of them gets on, the others may wait
for it. One that hangs brings every other to its end or to a wait, and then nobody gets on.

A process that runs shows its pulse whatever it does (wire/pulse.py), also where it waits. So a missing pulse is the
silence of that rank alone: no other vouches for it, and a request with a long deadline, such as LOAD, does not make the
pool wait for it so long.
"""

import time
from collections.abc import Collection, Sequence

from ..wire.channel import SegmentTable
from ..wire.pulse import LEAST_S
from .failure import Failure, silence
from .rank_set import AnyRank


def listen_anew(ranks: Sequence[AnyRank]) -> None:
    """From now on silence counts: these ranks are asked something."""
    now_s = time.monotonic()
    for rank in ranks:
        rank.last_heard_s = rank.last_pulse_s = now_s


def least_s(deadline_s: float) -> float:
    """How long a rank may show no pulse, where a request may show no sign of life for `deadline_s`."""
    return max(deadline_s, LEAST_S)


def find_silence(
    asked: Sequence[AnyRank],
    answered: Collection[int],
    segments: SegmentTable,
    request: str,
    *,
    since_s: float,
    deadline_s: float,
    pulse_deadline_s: float,
) -> Failure | None:
    """The failure of a rank of those asked, which owes an answer to `request` and is silent; None while all are well.

    Silence counts from `since_s` on (monotonic clock) at the earliest.
    """
    now_s = time.monotonic()
    for rank in asked:
        _look_at(rank, segments, now_s)
    owing = [rank for rank in asked if rank.rank not in answered]
    if not owing:
        return None
    longest = min(owing, key=lambda rank: rank.last_pulse_s)
    without_s = now_s - max(since_s, longest.last_pulse_s)
    if without_s > pulse_deadline_s:
        return silence(longest, request, silent_s=without_s, deadline_s=pulse_deadline_s)
    if now_s - max(since_s, *(rank.last_heard_s for rank in asked)) <= deadline_s:
        return None
    # The one that the others most likely wait for: one that a signal holds, else one that does not wait itself, else
    # the longest silent.
    awaited = min(owing, key=lambda rank: (not rank.is_stopped(), segments.waits(rank.rank), rank.last_heard_s))
    return silence(awaited, request, silent_s=now_s - awaited.last_heard_s, deadline_s=deadline_s)


def _look_at(rank: AnyRank, segments: SegmentTable, now_s: float) -> None:
    """Note what a rank has shown since the last look. Before its first pulse its process tells whether it runs."""
    beats, pulses = segments.beats(rank.rank), segments.pulses(rank.rank)
    if beats != rank.last_beats:
        rank.last_beats, rank.last_heard_s = beats, now_s
    if pulses != rank.last_pulses or (pulses == 0 and not rank.is_stopped()):
        rank.last_pulses, rank.last_pulse_s = pulses, now_s
