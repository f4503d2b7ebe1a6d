"""Experiment 7: how much of a slow link's exchange hides, by chunks of heads and around a ring.

One rank's share whose exchanges are there when the named link would have delivered them (benchmarks/share/exchange.py):
on a GPU a kernel on a stream of its own runs as long, while attention does. Beside each step stands what overlap.py
predicts. All of it twice: with attention at once, and with a head start for the exchange that it is to hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.share.attended import Attended, noting
from benchmarks.share.bound import link_named
from benchmarks.share.exchange import at_most, local_sequence
from benchmarks.share.rank import OneRank, timed_runs
from parallel_runtime.model_call import ModelCall
from parallel_runtime.planner.hardware import Interconnect

from .setting import Result, Setting

RATES = ("6", "10", "22")  # GB/s: PCIe 3.0, through host memory, PCIe 4.0 with peer access
MODELS = ("flux.1", "wan 14b")
MOST = (1, 2, 4, 8)
NEAR = 1.02  # what counts as the quickest
OF_THE_HOST = 1.1  # times as long a step may take by its chunks alone; above it, it waits for the host
RANKS = 2
HEAD_START = 10_000  # cycles: 5 us. On one card 2,000 let half of the chunks pass and 40,000 no more than these
WORTH = 1.01  # times as quick as without a head start
HEAD = ("model", "link", "head start", "way", "ms a step", "of it exchange that shows", "predicted")


@dataclass(frozen=True)
class Timed:
    """Seconds of a step with so many chunks at most, or around a ring, and what of its exchange shows."""

    way: str
    link: Interconnect
    seconds: float
    shown_s: float
    predicted_s: float


@dataclass(frozen=True)
class OneLink:
    """The ways of one model over one link, with or without a head start; `by_host`: its steps wait for the host."""

    by_chunks: dict[int, Timed]
    around: Timed
    by_host: bool

    @property
    def quickest(self) -> int:
        """The fewest chunks that count as the quickest."""
        least = min(each.seconds for each in self.by_chunks.values())
        return min(most for most, each in self.by_chunks.items() if each.seconds <= NEAR * least)

    @property
    def hiding_s(self) -> float:
        """Seconds of the steps that have something to hide behind."""
        return self.around.seconds + sum(each.seconds for most, each in self.by_chunks.items() if most > 1)


def run(setting: Setting) -> Result:
    """Every model, link and way."""
    lines = [f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|"]
    found: dict[int, list[OneLink]] = {cycles: [] for cycles in ((0, HEAD_START) if setting.capability else (0,))}
    for name in setting.model_names()[:1] if setting.small else MODELS:
        rank = setting.rank(name)
        call = rank.call(setting.size(name))
        for link in map(link_named, RATES[:1] if setting.small else RATES):
            for cycles, links in found.items():
                links.append(one_link(rank, call, link, setting, cycles))
                lines += rows(name, cycles, links[-1])
    pairs = [each for each in zip(*found.values(), strict=True) if not any(one.by_host for one in each)]
    if not pairs:
        return Result(table=lines, decided="steps wait for the host, the more the more chunks: nothing is chosen")
    seconds = [sum(each.hiding_s for each in links) for links in zip(*pairs, strict=True)]
    gain, most = seconds[0] / seconds[-1], max(found)
    chosen = most if gain >= WORTH else 0
    quickest = [each[list(found).index(chosen)].quickest for each in pairs]
    decided = (
        f"{gain:.2f}x by a head start of {most} cycles, so exchanges have {chosen}; fewest chunks within 2 % "
        f"of the quickest, where the host does not hold up: {min(quickest)} to {max(quickest)}"
    )
    choices = {"most_chunks": max(quickest), "head_start_cycles": chosen} if setting.capability else {}
    return Result(table=lines, decided=decided, choices=choices)


def one_link(rank: OneRank, call: ModelCall, link: Interconnect, setting: Setting, cycles: int) -> OneLink:
    """A model over a link."""
    timed = by_chunks(rank, call, link, (1, 2) if setting.small else MOST, setting.steps, cycles)
    without = [each.seconds - each.shown_s for each in timed.values()]
    around = around_a_ring(rank, call, link, setting.steps, cycles)
    return OneLink(timed, around, by_host=max(without) > OF_THE_HOST * min(without))


def rows(name: str, cycles: int, measured: OneLink) -> list[str]:
    """A row for each way."""
    lines = []
    for each in (*measured.by_chunks.values(), measured.around):
        times = (f"{1e3 * seconds:.2f}" for seconds in (each.seconds, each.shown_s, each.predicted_s))
        lines.append(f"| {' | '.join((name, each.link.name, f'{cycles}', each.way, *times))} |")
    return lines


def by_chunks(
    rank: OneRank, call: ModelCall, link: Interconnect, most: Sequence[int], steps: int, cycles: int
) -> dict[int, Timed]:
    """With at most 1, 2, ... chunks."""
    found = {}
    for count in most:
        without, attended = _step(rank, call, None, steps, count, cycles)
        seconds, _ = _step(rank, call, link, steps, count, cycles)
        predicted = sum(each.shown_s(link, at_most(each.heads, count)) for each in attended)
        found[count] = Timed(f"{count} chunk(s)", link, seconds, seconds - without, predicted)
    return found


def around_a_ring(rank: OneRank, call: ModelCall, link: Interconnect, steps: int, cycles: int) -> Timed:
    """The same ranks around a ring."""
    told = {"ring": RANKS, "device": rank.device, "head_start_cycles": cycles}
    alone, slow = (local_sequence(**told, link=each) for each in (None, link))
    times = [timed_runs(rank.step(call, each), steps)[0] for each in (alone, slow)]
    with noting(alone, rank.device) as attended:
        rank.step(call, alone)()
    predicted = sum(each.shown_s(link) for each in attended)
    return Timed(f"ring {RANKS}", link, times[1], times[1] - times[0], predicted)


def _step(
    rank: OneRank, call: ModelCall, link: Interconnect | None, steps: int, count: int, cycles: int
) -> tuple[float, list[Attended]]:
    told = {"device": rank.device, "link": link, "head_start_cycles": cycles}
    sequence = local_sequence(ulysses=RANKS, chunks=count, **told)
    run = rank.step(call, sequence)
    seconds, _ = timed_runs(run, steps)
    with noting(sequence, rank.device) as attended:
        run()
    return seconds, attended
