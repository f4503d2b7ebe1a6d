"""`python -m gpu.pretend_cuda`: plans on pretend devices, memory refused and given back, and mistakes to be found.

The last line counts each, and the exit status is 0, when all is well. `--only` runs one part.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpu.cases import RUNS, Reference, is_plan, pairs
from gpu.pretend_cuda import memory
from gpu.pretend_cuda.forked import fork_ranks
from gpu.pretend_cuda.library import library
from gpu.pretend_cuda.mutants import MUTANTS, Scratch
from gpu.pretend_cuda.pool import PretendPool
from gpu.pretend_cuda.trial import Trial, write_model, wrong
from parallel_runtime.devices import parse_devices
from parallel_runtime.pool.pool import Pool

CHOICES = {
    "plan": (
        *("ulysses=1", "ulysses=2", "ulysses=3", "ring=2", "ring=3", "ulysses=2,ring=2", "cfg=2,ulysses=2"),
        *("data=2,cfg=2", "pipefusion=2", "pipefusion=3,patches=4", "pipefusion=2,ring=2", "pipefusion=2,ulysses=2"),
    ),
    "weights": ("replicated", "sharded", "offloaded"),
    "capability": ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0)),
    "dtype": ("float32", "bfloat16", "float16"),
    "run": tuple(RUNS),
    "in_workers": (True, False),
    "lazy": (False, True),
    "launches_wait": (False, True),
}
SHARING = tuple(Trial(plan=plan, shared=True) for plan in ("ulysses=2", "ring=2", "cfg=2", "pipefusion=2"))
# What is run to find where memory is allocated, and again with each place refused.
ALLOCATING = (
    *(Trial(plan="ulysses=2"), Trial(plan="ring=2", run="two sides of unequal texts, two images")),
    *(Trial(plan="cfg=2", weights="sharded", run="a mask, an odd length"), Trial(plan="pipefusion=2")),
    *(Trial(plan="ulysses=2", weights="offloaded"), Trial(plan="pipefusion=2", in_workers=False)),
)
LEAST_SITES = 60


def cases(folder: Path, reference: Reference, match: str) -> tuple[int, list[str]]:
    """Run all of them; how many they are, and what is wrong."""
    found = []
    trials = [trial for row in pairs(CHOICES, allowed=is_plan) if match in str(trial := Trial(**row))]
    sharing = [trial for trial in SHARING if match in str(trial)]
    for ranks, shared, run in ((4, False, trials), (2, True, sharing)):
        with PretendPool(ranks, folder, shared=shared) as pool:
            for trial in run:
                began = time.monotonic()
                said = wrong(pool, reference, trial)
                pool.forgive()
                say(f"{said or 'right'}, {time.monotonic() - began:.1f} s: {trial}")
                found += [said] if said else []
    return len(trials) + len(sharing), found


def refusals(folder: Path, reference: Reference, match: str) -> tuple[int, list[str]]:
    """Refuse memory at each place of the product that allocates: one clear error, and the next prompt works."""
    found, known = [], {}
    with PretendPool(2, folder) as pool:
        for trial in ALLOCATING:
            pool.close()  # loading allocates too
            said = wrong(pool, reference, trial, record=True)
            found += [f"{trial}: {said}"] if said else []
            for site in pool.sites():
                known.setdefault(site, trial)
        say(f"{len(known)} places allocate")
        chosen = {site: trial for site, trial in known.items() if match in site}
        for site, trial in sorted(chosen.items(), key=lambda item: ALLOCATING.index(item[1])):
            if not site.startswith(("STEP ", "RUN ")):
                pool.close()  # what is asked once a start is asked again
            for text in broken(pool, reference, trial, site):
                say(f"wrong: {text}")
                found.append(text)
    if len(known) < LEAST_SITES:
        found.append(f"only {len(known)} places allocate; at least {LEAST_SITES} are known to")
    return len(chosen), found


def broken(pool: PretendPool, reference: Reference, trial: Trial, site: str) -> Iterator[str]:
    """What is wrong when memory is refused at one place."""
    said = wrong(pool, reference, trial, refuse=site)
    if not said:  # what the run before sent too is not copied again
        pool.close()
        said = wrong(pool, reference, trial, refuse=site)
    if "out of memory" not in said.lower() or "rank " not in said or ";" not in said:
        yield f"{site}: said {said or 'nothing, and went on'}"
    if said and (pool.state != "failed" or pool.status()["pids"]):
        yield f"{site}: left {pool.state} with {pool.status()['pids']}"
    pool.forgive()
    after = wrong(pool, reference, trial)
    if after:
        yield f"{site}: the next prompt {after}"
    say(f"{said.partition(';')[0][:110]}: {site}")


def mutants(folder: Path, reference: Reference, match: str) -> tuple[int, list[str]]:
    """Try them all; how many they are, and which survive."""
    scratch, found = Scratch(folder / "copy"), []
    chosen = [mutant for mutant in MUTANTS if match in mutant.name]
    for trial in dict.fromkeys(mutant.trial for mutant in chosen):
        if said := scratch.wrong(reference, trial):
            found.append(f"not spoilt, and {said}: {trial}")
    for mutant in chosen:
        began = time.monotonic()
        said = scratch.found(reference, mutant)
        say(f"{'caught' if said else 'SURVIVED'}, {time.monotonic() - began:.0f} s, {mutant.name}: {said[:160]}")
        found += [] if said else [mutant.name]
    return len(chosen), found


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


PARTS = {
    "cases": (cases, "{} cases, {} wrong"),
    "refusals": (refusals, "{} allocation sites refused, {} wrong"),
    "memory": (memory.checks, "{} decodes after a run, {} wrong"),
    "mutants": (mutants, "{} mutants, {} survived"),
}


def main() -> int:
    """Run what the command line chooses; the exit status."""
    parser = argparse.ArgumentParser(prog="gpu.pretend_cuda", description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--match", default="", metavar="TEXT", help="cases, places and mutants with this in their name")
    options = parser.parse_args()
    library()
    fork_ranks()
    results, wrongs, began = [], [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pretend-cuda-") as name:
        model = write_model(Path(name))
        with Pool(parse_devices("cpu:4").devices, threads_per_rank=1) as plain:
            reference = Reference(plain, model)
            for part, (run, words) in PARTS.items():
                if options.only in (None, part):
                    count, found = run(Path(name), reference, options.match)
                    results.append(words.format(count, len(found)))
                    wrongs += found
    for text in wrongs:
        say(f"wrong: {text}")
    say(f"{'; '.join(results)}; {time.monotonic() - began:.0f} s")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
