"""`python -m gpu.pretend_cuda`: plans on pretend devices, memory refused, and mistakes to be found.

The last line counts each, and the exit status is 0, when all is well. `--only` runs one part.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from gpu.cases import CHOICES, PLANS, ROUNDS, Reference, drawn, write_model
from gpu.pretend_cuda.mistakes import MISTAKES, Mistake
from gpu.pretend_cuda.pool import PretendPool, Trial, pretending
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool

TOLD = CHOICES | {"launches_wait": (False, True)}
# Where the loop is in the ranks, the last stage sends to the first one, and a circle may close at a launch.
CIRCLES = tuple(
    Trial(plan=plan, run="two sides of unequal texts, two images", launches_wait=True)
    for plan in PLANS
    if "pipefusion" in plan
)
SHARING = tuple(Trial(plan=plan, shared=True) for plan in ("ulysses=2", "ring=2", "cfg=2", "pipefusion=2"))
# What is run to find where memory is allocated, and again with each place refused.
ALLOCATING = (
    *(Trial(plan="ulysses=2"), Trial(plan="ring=2", run="two sides of unequal texts, two images")),
    *(Trial(plan="cfg=2", weights="sharded", run="a mask, an odd length"), Trial(plan="pipefusion=2")),
    *(Trial(plan="ulysses=2", weights="offloaded"), Trial(plan="pipefusion=2", worker_loop=False)),
)
# ComfyUI's split attention tries again in smaller parts; where there is no room for it, a block does not stay whole.
GOES_ON = ("stock_attention", "block_shards.make_rooms")
LEAST_SITES = 190  # of 203 with torch 2.13 and ComfyUI 0.30


def cases(folder: Path, reference: Reference, match: str, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Run all of them; the name of each and what is wrong."""
    trials = [*(Trial(**row) for row in drawn(TOLD, rounds=ROUNDS, chance=chance)), *CIRCLES]
    for ranks, shared, run in ((4, False, trials), (2, True, SHARING)):
        with PretendPool(ranks, folder, shared=shared) as pool:
            for trial in run:
                if match in str(trial):
                    yield str(trial), pool.wrong(reference, trial)


def refusals(folder: Path, reference: Reference, match: str, _: random.Random) -> Iterator[tuple[str, str]]:
    """Refuse memory at each place of the product that allocates: one clear error, and the next prompt works."""
    known: dict[str, Trial] = {}
    with PretendPool(2, folder) as pool:
        for trial in ALLOCATING:
            pool.close()  # loading allocates too
            if said := pool.wrong(reference, trial, record=True):
                yield str(trial), said
            known.update((site, trial) for site in pool.sites() if site not in known)
        few = f"at least {LEAST_SITES} are known to" if len(known) < LEAST_SITES else ""
        yield f"{len(known)} places allocate", few
        for site, trial in known.items():
            if match in site:
                if not site.startswith(("STEP ", "SAMPLE ")):
                    pool.close()  # what is asked once a start is asked again
                yield site, refused(pool, reference, trial, site)


def refused(pool: PretendPool, reference: Reference, trial: Trial, site: str) -> str:
    """What is wrong when memory is refused at one place."""
    said = pool.wrong(reference, trial, refuse=site)
    if not said:  # what the run before sent too is not copied again
        pool.close()
        said = pool.wrong(reference, trial, refuse=site)
    if not said and any(name in site for name in GOES_ON):
        return ""
    state = (pool.state, pool.status()["pids"])
    if "out of memory" not in said.lower() or "rank " not in said or ";" not in said:
        return f"said {said or 'nothing, and went on'}"
    if state != ("failed", []):
        return f"left {state}"
    after = pool.wrong(reference, trial)
    return after and f"the next prompt {after}"


def mistakes(folder: Path, reference: Reference, match: str, _: random.Random) -> Iterator[tuple[str, str]]:
    """Make each; that is wrong which its trial does not find, or finds where nothing is spoilt."""
    by_pool: dict[tuple[int, bool], list[Mistake]] = defaultdict(list)
    for mistake in MISTAKES:
        if match in mistake.name:
            by_pool[mistake.trial.parallel_plan.ranks, mistake.trial.shared].append(mistake)
    for (ranks, shared), some in by_pool.items():
        with PretendPool(ranks, folder, shared=shared) as pool:
            sound: set[Trial] = set()
            for name, trial, *spoilt in some:
                if trial not in sound and (said := pool.wrong(reference, trial)):
                    yield name, f"not spoilt, and {said}"
                sound.add(trial)
                pool.close()
                said = pool.wrong(reference, trial, mistake=spoilt)
                pool.close()
                yield f"{name}: {said[:160]}", "" if said else "not found"


PARTS = {"cases": cases, "refusals": refusals, "mistakes": mistakes}


def main() -> int:
    """Run what the command line chooses; the exit status."""
    parser = argparse.ArgumentParser(prog="gpu.pretend_cuda", description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--match", default="", metavar="TEXT", help="those with this in their name")
    options = parser.parse_args()
    counts, wrongs, began = [], [], time.monotonic()
    with pretending(), tempfile.TemporaryDirectory(prefix="pretend-cuda-") as name:
        with Pool(parse_devices("cpu:4").devices, threads_per_rank=1) as plain:
            reference = Reference(plain, write_model(Path(name)))
            for part, run in PARTS.items():
                found, last = [], time.monotonic()
                if options.only in (None, part):
                    for what, wrong in run(Path(name), reference, options.match, random.Random(1)):  # noqa: S311
                        print(wrong and "WRONG", f"{time.monotonic() - last:.1f} s", what, wrong, flush=True)  # noqa: T201
                        found, last = [*found, wrong], time.monotonic()
                    counts.append(f"{part}: {len(found)}, {sum(map(bool, found))} wrong")
                    wrongs += [each for each in found if each]
    print(f"{'; '.join(counts)}; {time.monotonic() - began:.0f} s")  # noqa: T201
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
