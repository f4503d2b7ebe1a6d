"""`python -m machines.cases`: several machines as network namespaces of this one. `make machines` runs it.

Prints a line a case, and last `N cases, 0 wrong`. A kernel that refuses namespaces is a failure, unless the variable
PARALLEL_DIT_NO_NAMESPACES declares that it does. `--groups` and `--only` choose.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from machines.hosts import DECLARED, NoNamespacesError, enter_namespaces

Case = tuple[str, Callable[[], str]]


def main() -> int:
    """Run the cases; 1 when one is wrong."""
    parser = argparse.ArgumentParser(prog="machines.cases", description="Several machines in network namespaces.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="cases whose name holds one of these")
    parser.add_argument("--groups", nargs="+", metavar="NAME", help="of groups.py (default: all)")
    options = parser.parse_args()
    try:
        enter_namespaces()
    except NoNamespacesError as error:
        print(f"{error}; set {DECLARED}=1 where that is so")  # noqa: T201
        print("0 cases, 0 wrong" if os.environ.get(DECLARED) else "0 cases, 1 wrong")  # noqa: T201
        return 0 if os.environ.get(DECLARED) else 1
    from machines.groups import groups  # here: it imports much, and this may be another process by now

    count = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        every = groups(Path(folder))
        for group in options.groups or every:
            for name, problem, seconds in _run(group, every[group](), options.only):
                count, wrong = count + 1, wrong + bool(problem)
                verdict = "WRONG" if problem else "ok"
                print(f"{verdict}  {name}  {seconds:.1f} s  {problem}".rstrip(), flush=True)  # noqa: T201
    print(f"{count} cases, {wrong} wrong")  # noqa: T201
    return min(wrong, 1)


def _run(group: str, cases: Iterator[Case], words: list[str]) -> Iterator[tuple[str, str, float]]:
    """Name, problem and seconds of each case; a group that does not begin, or end, is a wrong case of its name."""
    while True:
        name, began = f"all of {group}", time.monotonic()
        try:
            name, case = next(cases)
            if not any(word in name for word in words):
                continue
            began = time.monotonic()
            problem = case()
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  one case's failure, which is counted
            traceback.print_exc(file=sys.stdout)
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        yield name, problem, time.monotonic() - began


if __name__ == "__main__":
    raise SystemExit(main())
