"""How much of the exchange of heads attention hides: models' sizes on two and four cards, over links of 22, 10, 6 GB/s.

    python -m benchmarks.head_chunks [--tokens 512] [--wall] [--write FILE]

A card attends with CARD FLOP/s. Its attention is computed here on one core, with fewer tokens; the link is slowed down
so that an exchange takes as many times the attention as it does there. Two ranks are two processes that write into each
other's memory, four are the share of one of them. `wait()` returns when the link would have delivered
(emulated_link.py). Without --wall the clock is each rank's own CPU time and what it waits, which other programs do not
lengthen.

Each case runs in one chunk and in the number that ranks choose, in turn. What is exposed is what the rank waits, as a
part of what the link takes for one chunk: in one chunk all of it, which is the control. It may be 1 / chunks, or what
attention is too short to hide (1 - attention / exchange), and 5 points. "by the formula" is what overlap.py predicts.

Images attend for a shorter time than their exchange takes, so most of it shows whatever the number of chunks. Copies,
which are linear in the tokens, weigh more here than on the card: where exchange and attention are about equal, more is
exposed than the formula says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.emulated_link import EmulatedAxis, Mailboxes, ThreadClock, WallClock
from parallel_runtime.parallel.attention import QKV, SequenceParallelAttention
from parallel_runtime.parallel.overlap import OverlapRates, SharedHeads, choose_chunks, chunked_s
from parallel_runtime.parallel.shard import split_lengths

CARD, LATENCY_S = 140e12, 40e-6
LINKS = {"PCIe 4.0, peer to peer": 22e9, "through host memory": 10e9, "PCIe 3.0": 6e9}
ROUNDS = 5
HEAD = (
    "| model | cards | link | exchange : attention | chunks | exposed in 1 | exposed | by the formula | may be |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Case:
    """Attention of a model as one of `ranks` cards has it, in bf16."""

    model: str
    tokens: int
    heads: int
    ranks: int
    bandwidth: float
    head_dim: int = 128

    @property
    def shared(self) -> SharedHeads:
        """As the ranks see it."""
        sent = 2.0 * self.tokens / self.ranks * self.heads * self.head_dim * (self.ranks - 1) / self.ranks
        return SharedHeads(
            groups=self.heads,
            ranks=self.ranks,
            keys=self.tokens,
            head_dim=self.head_dim,
            flops=4.0 * self.tokens**2 * self.heads * self.head_dim / self.ranks,
            arriving_bytes=3 * sent,
            returning_bytes=sent,
        )

    @property
    def attend_s(self) -> float:
        """Of one attention."""
        return self.shared.flops / CARD

    @property
    def chunks(self) -> int:
        """As the ranks choose."""
        return choose_chunks(
            self.shared, OverlapRates(attention_flops=CARD, bandwidth=self.bandwidth, latency_s=LATENCY_S)
        )

    def exchange_s(self, chunks: int) -> float:
        """What the link takes."""
        return 2 * chunks * LATENCY_S + (self.shared.arriving_bytes + self.shared.returning_bytes) / self.bandwidth

    def exposed(self, chunks: int) -> float:
        """By the formula: the part of an exchange in one chunk that attention does not hide."""
        both = chunked_s(
            attend_s=self.attend_s,
            arriving_s=self.shared.arriving_bytes / self.bandwidth,
            returning_s=self.shared.returning_bytes / self.bandwidth,
            latency_s=LATENCY_S,
            chunks=chunks,
        )
        return (both - self.attend_s) / self.exchange_s(1)

    def allowed(self, chunks: int) -> float:
        """What may be exposed: the first and the last chunk, or what attention is too short for; and 5 points."""
        return max(1 / chunks, 1 - self.attend_s / self.exchange_s(1)) + 0.05


SIZES = (("Flux.1 1024", 4608, 24), ("Qwen-Image", 7000, 24), ("Wan 2.2 14B 480p", 32760, 40), ("H3", 60000, 56))
CASES = [Case(*size, ranks, bandwidth) for ranks in (2, 4) for size in SIZES for bandwidth in LINKS.values()]


def kernel(qkv: QKV, heads: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention on the CPU."""
    q, k, v = qkv
    qkv.clear()
    return F.scaled_dot_product_attention(q, k, v)


def waited(case: Case, tokens: int, chunks: int, axis: EmulatedAxis, *, slow: float | None) -> tuple[float, float]:
    """Seconds that one attention computes and waits by the axis' clock.

    `slow`: how many times longer than on the card all takes; None: nothing is waited.
    """
    lengths = split_lengths(tokens, case.ranks)
    qkv = [torch.randn(1, case.heads, lengths[axis.index], case.head_dim) for _ in range(3)]
    numbers = lengths[0] * case.heads * case.head_dim * (case.ranks - 1) / case.ranks * 4 * 4  # bytes, in fp32
    sent_s = case.exchange_s(1) - 2 * LATENCY_S
    axis.bandwidth, axis.latency_s = (
        (float("inf"), 0.0) if slow is None else (numbers / (slow * sent_s), slow * LATENCY_S)
    )
    sequence = SequenceParallelAttention(ulysses=axis, chunks=lambda _: chunks)
    began_s, before_s = axis.clock.now(), axis.clock.waited_s
    sequence.attend(kernel, qkv, query_lengths=lengths, key_lengths=lengths)
    waited_s = axis.clock.waited_s - before_s
    return axis.clock.now() - began_s - waited_s, waited_s


def measured(case: Case, tokens: int, axis: EmulatedAxis, agreed: torch.Tensor) -> dict[str, float]:
    """The parts of the exchange that are exposed in one chunk and in as many as ranks choose: medians of pairs.

    `agreed`: shared by the ranks, where the first one writes how much slower than on the card all is.
    """
    exposed: dict[int, list[float]] = {n: [] for n in (1, case.chunks)}
    for number in range(ROUNDS + 1):  # the first one warms up
        attend_s = waited(case, tokens, case.chunks, axis, slow=None)[0]
        if axis.index == 0:
            agreed[0] = attend_s / case.attend_s
        waited(case, case.ranks, 1, axis, slow=None)  # of a token a rank: the other one has read it after
        slow = float(agreed[0])
        for n, found in exposed.items():
            share = waited(case, tokens, n, axis, slow=slow)[1] / (slow * case.exchange_s(1))
            found += [share] if number else []
    return {str(n): statistics.median(each) for n, each in exposed.items()}


def rank_main(rank: int, ranks: int, tokens: int, mailboxes: Mailboxes | None, agreed: torch.Tensor, path: str) -> None:
    """All cases of so many cards on one of them; the first one writes what it found."""
    torch.set_num_threads(1)
    rows = []
    for case in (each for each in CASES if each.ranks == ranks):
        clock = WallClock() if "--wall" in sys.argv else ThreadClock()
        axis = EmulatedAxis("ulysses", ranks, rank, clock=clock, mailboxes=mailboxes)
        if mailboxes is not None:
            axis.number = int(mailboxes.posted[rank])
        rows.append(measured(case, tokens, axis, agreed))
    if rank == 0:
        Path(path).write_text(json.dumps(rows), encoding="utf-8")


def run(ranks: int, tokens: int) -> list[dict[str, float]]:
    """Two ranks in processes of their own, more as the share of the first."""
    processes = 2 if ranks == 2 else 1
    most = max(split_lengths(tokens, 2)[0] * 3 * case.head_dim * -(-case.heads // 2) for case in CASES)
    mailboxes = Mailboxes(most) if processes == 2 else None
    agreed = torch.zeros(1, dtype=torch.float64).share_memory_()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/found.json"
        children = []
        for rank in range(processes):
            child = os.fork()
            if child == 0:
                try:
                    with torch.inference_mode():
                        rank_main(rank, ranks, tokens, mailboxes, agreed, path)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        found: list[dict[str, float]] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print the table, and write it with its description where told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--wall", action="store_true", help="by the wall's clock, on an idle machine")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    names = {bandwidth: name for name, bandwidth in LINKS.items()}
    rows = [HEAD]
    for ranks in (2, 4):
        for case, found in zip(
            (each for each in CASES if each.ranks == ranks), run(ranks, options.tokens), strict=True
        ):
            n, beside = case.chunks, case.exchange_s(1) / case.attend_s
            rows.append(
                f"| {case.model} | {ranks} | {names[case.bandwidth]} | {beside:.2f} | {n} | "
                f"{found['1']:.0%} | {found[str(n)]:.0%} | {case.exposed(n):.0%} | {case.allowed(n):.0%} |"
            )
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    if options.write:
        about = (__doc__ or "").partition("\n\n")[2]
        text = "\n".join(
            ["# Heads in chunks", "", about, f"torch {torch.__version__}, {options.tokens} tokens.", "", *rows]
        )
        options.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
