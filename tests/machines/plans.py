"""Which plans there are over several machines. Their models and comparison are worlds.py's."""

from collections.abc import Iterator, Sequence
from itertools import product

from parallel_runtime.plan import MAX_RANKS, ParallelPlan, refuse_unfit_machines

DEGREES = range(1, MAX_RANKS + 1)
ULYSSES = (1, 2, 4)
STAGES = (1, 2, 3)


def plans(ranks_by_machine: Sequence[int]) -> Iterator[ParallelPlan]:
    """All that use a further machine, with replicated weights and, where ranks can share them, sharded ones."""
    for data, cfg, pipefusion, ring, ulysses in product(DEGREES, (1, 2), STAGES, DEGREES, ULYSSES):
        if not ranks_by_machine[0] < data * cfg * pipefusion * ring * ulysses <= MAX_RANKS:
            continue
        degrees = {"data": data, "cfg": cfg, "pipefusion": pipefusion, "ring": ring, "ulysses": ulysses}
        for weights in ("replicated", "sharded"):
            try:
                plan = ParallelPlan(**degrees, weights=weights)
                refuse_unfit_machines(plan, ranks_by_machine)
            except ValueError:
                continue
            yield plan
