"""What ranks hold and send of weights that they share out, by arithmetic of its own from the file's header.

The rule is the design's: a unit is a block, or all that is in no block; in it every weight begins at a multiple of 64
bytes, and each rank has an equal range of it, a multiple of 64 bytes too. Owns the figures; shares no code with the
engine, whose figures they judge.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping

STEP = 64
BESIDE = ("_scale", ".comfy_quant")  # of a weight in fp8: its scale, and that it is one
BLOCK = re.compile(r"(?:double|single)_blocks\.\d+\.")


def weight_bytes(path: str, *, itemsize: int | None = None) -> dict[str, int]:
    """Each weight's bytes by its name: those in the file, or of elements of `itemsize`."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__" and not name.endswith(BESIDE):
            begin, end = entry["data_offsets"]
            found[name] = end - begin if itemsize is None else math.prod(entry["shape"]) * itemsize
    return found


def named(weights: Mapping[str, int], *starts: str) -> dict[str, int]:
    """Of the weights those whose names begin with one of the words in `starts`, and a dot."""
    wanted = tuple(f"{start}." for words in starts for start in words.split())
    return {name: num_bytes for name, num_bytes in weights.items() if name.startswith(wanted)}


def unit_of(name: str) -> str:
    """The unit that a weight is in; what is in no block is in ""."""
    block = BLOCK.match(name)
    return block[0] if block else ""


def ranges(weights: Mapping[str, int], shards: int) -> dict[str, int]:
    """Bytes of each rank's range of every unit."""
    steps: dict[str, int] = defaultdict(int)
    for name, num_bytes in weights.items():
        steps[unit_of(name)] += -(-num_bytes // STEP)
    return {unit: -(-count // shards) * STEP for unit, count in steps.items()}


def sent(units: Mapping[str, int], shards: int, *, passes: int) -> tuple[int, int]:
    """Gathers, and bytes that a rank sends to the others, in so many passes through the blocks.

    What is in no block is gathered before the first pass and after each.
    """
    if shards == 1 or not passes:
        return 0, 0
    outside, blocks = units[""], sum(units.values()) - units[""]
    calls = passes * len(units) + 1
    return calls, (shards - 1) * (passes * (blocks + outside) + outside)
