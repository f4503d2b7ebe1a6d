"""Which attention calls a share has, how long each takes, and what of its exchange shows over a link.

Owns the noting. What hides behind what is parallel/overlap.py's: ranks choose the number of chunks by it as well.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from parallel_runtime.parallel.attention import QKV, AttentionFunction, SequenceParallelAttention
from parallel_runtime.parallel.overlap import OverlapRates, SharedHeads, choose_chunks, chunked_s, ring_s
from parallel_runtime.planner.hardware import Interconnect


@dataclass(frozen=True)
class Attended:
    """One attention call of a rank that shares heads with others (`ring` 1), or keys around a ring; its own seconds."""

    heads: SharedHeads
    seconds: float
    ring: int = 1

    @property
    def num_bytes(self) -> float:
        """That this rank sends for it."""
        return self.heads.arriving_bytes + self.heads.returning_bytes

    def chunks(self, link: Interconnect) -> int:
        """Into how many chunks its heads go over this link."""
        if self.heads.ranks < 2 or self.seconds <= 0:
            return 1
        return choose_chunks(self.heads, self._rates(link))

    def shown_s(self, link: Interconnect, chunks: int | None = None) -> float:
        """Seconds of its exchange that nothing hides, latencies included."""
        if self.ring > 1:
            hop_s = self.heads.arriving_bytes / (self.ring - 1) / link.bandwidth + link.latency_s
            return ring_s(attend_s=self.seconds, hop_s=hop_s, ring=self.ring) - self.seconds
        rates = self._rates(link)
        whole = chunked_s(
            attend_s=self.seconds,
            arriving_s=self.heads.arriving_bytes / rates.bandwidth,
            returning_s=self.heads.returning_bytes / rates.bandwidth,
            latency_s=rates.latency_s,
            chunks=chunks or self.chunks(link),
        )
        return whole - self.seconds

    def _rates(self, link: Interconnect) -> OverlapRates:
        flops = self.heads.flops / self.seconds if self.seconds > 0 else math.inf
        together = link.all_to_all_bandwidth(self.heads.ranks)
        return OverlapRates(attention_flops=flops, bandwidth=together, latency_s=link.latency_s)


@contextmanager
def noting(sequence: SequenceParallelAttention, device: torch.device) -> Iterator[list[Attended]]:
    """Inside, each attention that the ranks of `sequence` share is noted; on a GPU its seconds are events'."""
    noted: list[tuple[SharedHeads, Clock]] = []
    found: list[Attended] = []
    attend = sequence.attend
    traffic = sequence.ulysses.traffic

    def noted_attend(kernel: AttentionFunction, qkv: QKV, **more: Any) -> torch.Tensor:  # noqa: ANN401
        q, k, v = qkv
        shapes, before, clock = (q.shape, k.shape, v.shape), traffic.num_bytes, Clock(device)

        def timed(*args: Any) -> torch.Tensor:  # noqa: ANN401
            with clock:
                return kernel(*args)

        around = sequence.ring.size > 1  # our kernels are inside; what they take with packing is nearly all of it
        del q, k, v
        if around:
            with clock:
                out = attend(kernel, qkv, **more)
        else:
            out = attend(timed, qkv, **more)
        sent = traffic.num_bytes - before
        noted.append((_heads(sequence, shapes, more, sent, out.element_size()), clock))
        return out

    sequence.attend = noted_attend  # type: ignore[method-assign]
    try:
        yield found
        found += [Attended(heads, clock.seconds(), sequence.ring.size) for heads, clock in noted]
    finally:
        del sequence.attend  # type: ignore[method-assign]


def shown_s(attended: Sequence[Attended], link: Interconnect) -> float:
    """Seconds of all their exchanges that nothing hides."""
    return sum(each.shown_s(link) for each in attended)


class Clock:
    """Seconds of all that ran inside, of a device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._spent = device, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        if isinstance(self._began, float):
            self._spent += time.perf_counter() - self._began
        else:
            self._events.append((self._began, self._now()))  # type: ignore[arg-type]

    def seconds(self) -> float:
        """Of all of it; waits for the device."""
        for began, ended in self._events:
            ended.synchronize()
            self._spent += began.elapsed_time(ended) / 1000
        self._events.clear()
        return self._spent

    def _now(self) -> "float | torch.cuda.Event":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _heads(
    sequence: SequenceParallelAttention,
    shapes: Sequence[torch.Size],
    more: dict[str, Any],
    sent: int,
    element_bytes: int,
) -> SharedHeads:
    (batch, heads, _, width), (_, groups, _, _), (_, _, _, value_width) = shapes
    ranks, ring = sequence.ulysses.size, sequence.ring.size
    queries, keys = sum(more["query_lengths"]) // ring, sum(more["key_lengths"])
    mine = math.ceil(groups / ranks) * (heads // groups) if groups >= ranks else heads / ranks
    # The output is as many numbers as queries with the width of values; of a ring nothing goes back.
    out = heads * value_width / (heads * (width + value_width) + groups * (width + value_width))
    returning = 0.0 if ring > 1 else sent * out
    return SharedHeads(
        groups=groups,
        ranks=ranks,
        keys=keys,
        head_dim=width,
        flops=2.0 * batch * mine * queries * keys * (width + value_width),
        arriving_bytes=sent - returning,
        returning_bytes=returning,
    )
