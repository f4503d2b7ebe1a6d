"""The cases, in groups of one world each: plans, what goes wrong while they run, and who can reach what."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path

from machines.hosts import Hosts
from machines.world import World
from machines.worlds import FILE, tiny_model
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import MAX_RANKS, ParallelPlan, refuse_unfit_machines
from parallel_runtime.pool.pool import Pool

from .faults import faults
from .reach import reach

Case = tuple[str, Callable[[], str]]
RATES = ("10gbit", "1gbit")
FAR_S = 0.02
EIGHT = [
    *(ParallelPlan(ring=8), ParallelPlan(ring=2, ulysses=4, weights="sharded"), ParallelPlan(cfg=2, ring=2, ulysses=2)),
    *(ParallelPlan(cfg=2, ulysses=4, weights="sharded"), ParallelPlan(data=2, cfg=2, ring=2)),
    *(ParallelPlan(pipefusion=2, ulysses=4), ParallelPlan(cfg=2, pipefusion=2, ring=2, weights="sharded")),
]
SOME = [ParallelPlan(ring=2), ParallelPlan(cfg=2), ParallelPlan(pipefusion=2)]
DEGREES, ULYSSES, STAGES = range(1, MAX_RANKS + 1), (1, 2, 4), (1, 2, 3)
TOLERANCE = 1e-5
WRONG = 1e-2  # at least, where the exchange is off


def groups(folder: Path) -> dict[str, Callable[[], Iterator[Case]]]:
    """Each group by its name; one is to be run to its end before the next begins."""
    return {
        "small": lambda: plans_over(Hosts(2), folder, (1, 1), only=[ParallelPlan(ring=2)]),
        "IPv6": lambda: plans_over(Hosts(2, ipv6=True), folder, (1, 1), only=SOME),
        "reach": lambda: reach(Hosts(3), folder),
        "faults": lambda: faults(Hosts(3), folder),
        "4+4": lambda: plans_over(Hosts(2), folder, (4, 4)),
        "4+2+2": lambda: plans_over(Hosts(3), folder, (4, 2, 2)),
        "2+2, slow": lambda: plans_over(Hosts(2), folder, (2, 2), rates=RATES),
        "2+1+1, slow": lambda: plans_over(Hosts(3), folder, (2, 1, 1), rates=RATES),
        "2+1+1, 20 ms": lambda: plans_over(Hosts(3, delay_s=FAR_S), folder, (2, 1, 1)),
        "4+4, slow": lambda: plans_over(Hosts(2), folder, (4, 4), only=EIGHT, rates=RATES),
    }


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


def plans_over(
    hosts: Hosts,
    folder: Path,
    ranks: tuple[int, ...],
    *,
    only: Sequence[ParallelPlan] = (),
    rates: Sequence[str | None] = (None,),
) -> Iterator[Case]:
    """Every plan over machines of so many ranks, at each rate, and a plan that is made wrong."""
    with hosts, World(hosts, folder) as world:
        model = tiny_model(world.models(1))
        world.copy(FILE)
        for host, count in enumerate(ranks[1:], start=2):
            world.join(host, f"cpu:{count}")
        named = f"{'+'.join(map(str, ranks))}{hosts.link}"
        devices = parse_devices(f"cpu:{ranks[0]}").devices
        with closing(Pool(devices, threads_per_rank=1, machines=lambda _: world.server.machines())) as pool:

            def exact(plan: ParallelPlan) -> str:
                error = model.error(pool, plan)
                return "" if error <= TOLERANCE else f"relative error {error:.1e}, at most {TOLERANCE:.0e}"

            def control() -> str:
                error = model.error(pool, ParallelPlan(ring=sum(ranks)), control=True)
                return "" if error > WRONG else f"without exchange the relative error is {error:.1e}"

            for rate in rates:
                hosts.rate(rate)
                for plan in only or plans(ranks):
                    name = f"{named}{f', {rate}/s' if rate else ''}: {plan.name}"
                    yield name, lambda plan=plan: exact(plan)
            hosts.rate(None)
            yield f"{named}: without exchange", control
