"""The bound of a step over several ranks: one rank's share, measured, and what its exchange adds over a named link.

    max(host, device) + exposed bytes / link + latencies        a device that runs ahead of its host
    device            + all bytes / link + latencies            a CPU, whose share has the host in it

No rank is quicker than its share and no link delivers sooner, so no step over such ranks takes less: it is a bound,
and no measurement of several devices. Owns the formula and the tables. What is exposed is attended.py's, as
parallel/overlap.py models it.
"""

from collections.abc import Sequence

from parallel_runtime.planner.hardware import Interconnect
from parallel_runtime.planner.known import known_link

from .rank import Share

RATE_LATENCY_S = 40e-6  # of a link that is told by its rate alone: that of PCIe in the planner's table
SWAPS = 2  # messages of an attention call that is sent whole: q, k, v there, the output back
LINKS = ("nvlink4", "pcie4", "pcie3", "10")


def link_named(text: str) -> Interconnect:
    """A link of the planner's table, or one of so many GB/s. Raises `ValueError` for neither."""
    try:
        rate = float(text)
    except ValueError:
        return known_link(text)
    if not 0 < rate < 1e6:
        raise ValueError(f"--links {text}: a rate is in GB/s, above 0; use 10, or a name such as nvlink4")
    return Interconnect(name=f"{rate:g} GB/s", bandwidth=rate * 1e9, latency_s=RATE_LATENCY_S)


def exchange_s(share: Share, link: Interconnect) -> float:
    """Seconds that the link takes for all of a step's exchange, latencies included, as if nothing hid any of it."""
    return _sent_s(share, share.num_bytes, link) + share.messages * link.latency_s


def shown_s(share: Share, link: Interconnect) -> float:
    """Seconds of a step's exchange that nothing hides: of attention what overlap.py says, of gathers all.

    Ranks on a CPU copy by themselves, so there nothing hides.
    """
    if not share.asynchronous:
        return exchange_s(share, link)
    attended = share.repeated * sum(each.shown_s(link) for each in share.attended)
    in_attention = share.repeated * sum(each.num_bytes for each in share.attended)
    messages = share.repeated * len(share.attended) * (share.ring - 1 if share.ring > 1 else SWAPS)
    others = _sent_s(share, max(0.0, share.num_bytes - in_attention), link)
    return attended + others + max(0.0, share.messages - messages) * link.latency_s


def bound_s(share: Share, link: Interconnect) -> float:
    """Seconds below which no step of such a rank is, over this link."""
    return share.computing_s + shown_s(share, link)


def _sent_s(share: Share, num_bytes: float, link: Interconnect) -> float:
    together = link.bandwidth if share.ring > 1 else link.all_to_all_bandwidth(share.ranks)
    return num_bytes / together


def shares_table(shares: Sequence[Share]) -> list[str]:
    """What was measured, a row for each number of ranks."""
    lines = [
        "| ranks | tokens | device ms a block | host ms a block | MB a block | device ms a step | host ms a step | "
        "clock ms a step | MB a step | messages |",
        "| --- " * 10 + "|",
    ]
    for each in shares:
        per_block = each.num_bytes / 1e6 / max(1, each.blocks)
        lines.append(
            f"| {_ranks(each)} | {each.tokens} | {1e3 * each.block[0]:.3f} | {1e3 * each.block[1]:.3f} | "
            f"{per_block:.2f} | {1e3 * each.device_s:.2f} | {1e3 * each.host_s:.2f} | {1e3 * each.clock_s:.2f} | "
            f"{each.num_bytes / 1e6:.1f} | {each.messages} |"
        )
    return lines


def bounds_table(shares: Sequence[Share], links: Sequence[Interconnect]) -> list[str]:
    """Bound ms a step by link, what of the exchange shows, and how often the bound goes into one rank's step."""
    alone = next((each.computing_s for each in shares if each.ranks == 1), None)
    lines = [
        "| bound, ms a step | " + " | ".join(link.name for link in links) + " |",
        "| --- " * (1 + len(links)) + "|",
    ]
    for share in shares:
        cells = []
        for link in links:
            seconds, whole = bound_s(share, link), exchange_s(share, link)
            shown = f", {100 * shown_s(share, link) / whole:.0f} % of {1e3 * whole:.2f} shown" if whole else ""
            times = "" if alone is None or share.ranks == 1 else f", at most {alone / seconds:.2f}x one rank"
            cells.append(f"{1e3 * seconds:.2f}{shown}{times}")
        lines.append(f"| {_ranks(share)} | " + " | ".join(cells) + " |")
    return lines


def _ranks(share: Share) -> str:
    ring = f", ring {share.ring}" if share.ring > 1 else ""
    return f"{share.ranks}{ring}"
