"""`python -m faults.fuzz --inputs 1000000`: fuzz everything and print a table; with `python -O` too. Ends with 1 when
something broke, after printing the inputs that did it.
"""

import argparse
import tempfile
import time
from pathlib import Path

from .fuzzer import fuzz
from .targets import control, header, records, wire


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults.fuzz", description="Fuzz the parsers of the pack.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each parser")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the random changes")
    options = parser.parse_args()
    print(f"seed {options.seed}, {'assertions on' if __debug__ else 'python -O'}", flush=True)  # noqa: T201
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for target in (wire(), records(), control(), header(Path(folder))):
            found = fuzz(target, inputs=options.inputs, seed=options.seed)
            print(found.line(), flush=True)  # noqa: T201
            for data, what in found.broken:
                print(f"    {what}\n    {data!r}")  # noqa: T201
                status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
