"""Auto over several machines: which axes cross, whether a further machine pays, and what was measured of the link."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime.devices import Device, ranks_by_machine
from parallel_runtime.plan import ParallelPlan, auto_plan, refuse_unfit_machines
from parallel_runtime.planner.automatic import automatic_plan, usual_work
from parallel_runtime.planner.choose import choose_plan
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.hardware import Calibration, Interconnect
from parallel_runtime.planner.known import known_calibration, known_link
from parallel_runtime.trials.calibrate import calibrate

FLUX = usual_counted().model
FREE = 80 << 30
INFINITE = Interconnect(name="no wire at all", bandwidth=math.inf, latency_s=0.0)


def over(link: Interconnect, machines: tuple[int, ...] = (2, 2)) -> Calibration:
    """H100s on two machines."""
    return replace(known_calibration("H100", devices=machines[0]), between=link, machines=machines)


def chosen(link: Interconnect, **work: int) -> tuple[ParallelPlan, str]:
    choice = choose_plan(FLUX, replace(usual_work(), **work), [FREE] * 4, over(link))
    assert choice.plan is not None
    return choice.plan, "; ".join(choice.reasons)


def test_it_says_that_a_second_machine_pays_for_prompt_and_negative_and_for_a_batch_but_not_for_one_image() -> None:
    plan, why = chosen(known_link("ethernet1"))
    assert plan.ranks <= 2
    assert "a further machine does not pay" in why and "over ethernet1, 0.92 Gbit/s" in why
    plan, why = chosen(known_link("ethernet10"), guided=True)
    assert (plan.cfg, plan.parts, plan.ranks) == (2, 2, 4)
    assert "a further machine pays" in why
    plan, why = chosen(known_link("ethernet1"), batch=2)
    assert (plan.data, plan.ranks) == (2, 4), "images of a batch cross any link"
    assert "a further machine pays" in why


@pytest.mark.parametrize("machines", [(1, 1), (2, 2), (3, 2), (4, 4), (2, 3, 3)])
def test_no_plan_that_is_weighed_has_ulysses_between_machines(machines: tuple[int, ...]) -> None:
    choice = choose_plan(FLUX, usual_work(), [FREE] * sum(machines), over(INFINITE, machines))
    assert choice.table
    for row in choice.table:
        refuse_unfit_machines(row.plan, machines)
    everything = auto_plan(sum(machines), FLUX.heads, ranks_by_machine=machines)
    assert everything.ranks == sum(machines)
    refuse_unfit_machines(everything, machines)


def test_devices_of_unknown_speed_are_all_used_without_ulysses_between_machines() -> None:
    devices = (Device("cuda", 0), Device("cuda", 1), Device("cuda", 0, "b"), Device("cuda", 1, "b"))
    assert ranks_by_machine(devices) == (2, 2)
    decision = automatic_plan(FLUX, usual_work(), devices, [FREE] * 4, None)
    assert (decision.plan.ulysses, decision.plan.ring) == (2, 2)


@pytest.mark.full
def test_the_link_between_machines_is_measured(tmp_path: Path) -> None:
    from machines.loopback import LoopbackMachine

    from parallel_runtime.pool.pool import Pool

    machine = LoopbackMachine("shelf", ("cpu:0",), (str(tmp_path),))
    devices = (Device("cpu", 0), Device("cpu", 0, "shelf"))
    with Pool(devices, threads_per_rank=1, machines=lambda _: [machine]) as pool:
        found = calibrate(pool)
    assert found.machines == (1, 1)
    assert found.between is not None and 1e7 < found.between.bandwidth < 1e11
