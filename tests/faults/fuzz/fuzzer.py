"""A coverage-guided fuzzer for parsers of bytes: inputs that reach something new are kept and changed further.

After AFL (https://lcamtuf.coredump.cx/afl/technical_details.txt): edges, a queue of inputs, stacked random changes.
"""

import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .marking import Edges

INTERESTING = (0, 1, 2, 7, 8, 31, 32, 63, 64, 127, 128, 255, 256, 1024, 4095, 4096, 65535, 65536)
INTERESTING += tuple(2**bits - less for bits in (31, 32, 40, 53, 63, 64) for less in (0, 1))
WIDTHS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}
STACKED = (1, 1, 1, 2, 3, 6)
MAX_BYTES = 4096
SLOW_S = 1.0
# What a parser may raise by mistake. Anything else ends the fuzzer itself, which is a finding too.
FINDINGS = (ArithmeticError, AssertionError, AttributeError, BufferError, LookupError, MemoryError, OSError)
FINDINGS += (RuntimeError, TypeError, ValueError, struct.error)


@dataclass(frozen=True)
class Target:
    """What is fuzzed. `run` returns whether it accepted the input and raises `AssertionError` or anything unforeseen.

    `words` are pieces that the format knows; `seeds` are inputs that it accepts.
    """

    name: str
    edges: Edges
    run: Callable[[bytes], bool]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()


@dataclass
class Findings:
    """What came of fuzzing: `broken` are inputs with what they did, `slowest_s` the most of the processor for one."""

    name: str
    inputs: int = 0
    accepted: int = 0
    edges: int = 0
    corpus: int = 0
    slowest_s: float = 0.0
    wall_s: float = 0.0
    broken: list[tuple[bytes, str]] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"{self.name:24} {self.inputs:>9} inputs, {self.accepted:>8} accepted, {self.edges:>4} edges, "
            f"{self.corpus:>4} kept, slowest {self.slowest_s * 1e3:6.1f} ms, {self.wall_s:6.1f} s, "
            f"{len(self.broken)} broken"
        )


def fuzz(target: Target, *, inputs: int, seed: int, max_broken: int = 5) -> Findings:
    """Try that many inputs; ends early after `max_broken` that broke something."""
    chance = random.Random(seed)  # noqa: S311  no secret
    found, queue = Findings(target.name), list(target.seeds)
    began = time.perf_counter()
    for number in range(inputs):
        known = number < len(target.seeds)
        data = queue[number] if known else change(chance.choice(queue), queue, target.words, chance)
        target.edges.begin()
        before = time.thread_time()  # of the processor: a machine that stands still is no finding
        try:
            found.accepted += target.run(data)
        except FINDINGS as error:
            found.broken.append((data, f"{type(error).__name__}: {error}"))
        taken = time.thread_time() - before
        found.inputs += 1
        found.slowest_s = max(found.slowest_s, taken)
        if taken > SLOW_S:
            found.broken.append((data, f"took {taken:.1f} s"))
        if target.edges.new and not known:
            queue.append(data)
        if len(found.broken) >= max_broken:
            break
    found.edges, found.corpus, found.wall_s = len(target.edges.seen), len(queue), time.perf_counter() - began
    return found


def change(data: bytes, queue: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> bytes:
    """`data` with one to six random changes."""
    changed = bytearray(data)
    for _ in range(chance.choice(STACKED)):
        chance.choice(CHANGES)(changed, queue, words, chance)
    return bytes(changed[:MAX_BYTES])


Change = Callable[[bytearray, Sequence[bytes], Sequence[bytes], random.Random], None]


def _flip(data: bytearray, _queue: Sequence[bytes], _words: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _replace(data: bytearray, _queue: Sequence[bytes], _words: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _number(data: bytearray, _queue: Sequence[bytes], _words: Sequence[bytes], chance: random.Random) -> None:
    """A number that limits are near of, little endian, over what is there."""
    width = chance.choice(tuple(WIDTHS))
    if len(data) >= width:
        value = chance.choice(INTERESTING) & (1 << 8 * width) - 1
        struct.pack_into(WIDTHS[width], data, chance.randint(0, len(data) - width), value)


def _word(data: bytearray, _queue: Sequence[bytes], words: Sequence[bytes], chance: random.Random) -> None:
    if words:
        word, at = chance.choice(words), chance.randint(0, len(data))
        data[at : at + (len(word) if chance.random() < 0.5 else 0)] = word


def _delete(data: bytearray, _queue: Sequence[bytes], _words: Sequence[bytes], chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    del data[at : at + chance.choice((1, 2, 4, 28, 60))]


def _repeat(data: bytearray, _queue: Sequence[bytes], _words: Sequence[bytes], chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    data[at:at] = data[at : at + chance.choice((1, 4, 28, 60, len(data)))]


def _cut(data: bytearray, _queue: Sequence[bytes], _words: Sequence[bytes], chance: random.Random) -> None:
    del data[chance.randint(0, len(data)) :]


def _splice(data: bytearray, queue: Sequence[bytes], _words: Sequence[bytes], chance: random.Random) -> None:
    other = chance.choice(queue)
    data[chance.randint(0, len(data)) :] = other[chance.randint(0, len(other)) :]


CHANGES: tuple[Change, ...] = (_flip, _replace, _number, _number, _word, _word, _delete, _repeat, _cut, _splice)
