"""The cases: plans, faults, and who can reach what, each group in a world of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

from machines.hosts import Hosts
from machines.plans import Flux, plans
from machines.world import World
from parallel_runtime.cli.verify import FP32_TOLERANCE
from parallel_runtime.devices import Device
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

Case = tuple[str, Callable[[], str]]
DEADLINE_S = 10.0


def groups(hosts: Hosts, folder: Path, *, small: bool) -> Iterator[Iterator[Case]]:
    """Each group is to be run to its end before the next is asked for."""
    yield plans_over(hosts, folder, (4, 4), small=small)
    yield plans_over(hosts, folder, (4, 2, 2), small=small)


def cpus(count: int) -> tuple[Device, ...]:
    return tuple(Device("cpu", index) for index in range(count))


def plans_over(hosts: Hosts, folder: Path, ranks: tuple[int, ...], *, small: bool) -> Iterator[Case]:
    """Every plan of Flux over machines of so many ranks, and a plan that is made wrong."""
    named = "+".join(map(str, ranks))
    with World(hosts, folder) as world:
        model = Flux(world.models(1) / "sample.safetensors")
        world.copy("sample.safetensors")
        for host, count in enumerate(ranks[1:], start=2):
            world.join(host, f"cpu:{count}")
        with Pool(cpus(ranks[0]), threads_per_rank=1, machines=lambda _: world.server.machines()) as pool:
            every = list(plans(ranks))
            for plan in every[:: len(every) // 6] if small else every:
                yield f"{named} {plan.name}", lambda plan=plan: model.problem(pool, plan)
            control = ParallelPlan(ring=sum(ranks))

            def found() -> str:
                error = model.error(pool, control, wrong=True)
                return "" if error > 100 * FP32_TOLERANCE else f"the exchange is off and the error is {error:.1e}"

            yield f"{named} negative control", found
