"""Stages of a pipeline queue messages in groups with which a GPU cannot wait for itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from noted import FOLDER, Notes

from host.hosted_runs import WAN, euler, make_run
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

PLANS = ("pipefusion=2", "pipefusion=3,patches=4", "pipefusion=3,patches=4,warmup_steps=3")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    here = str(Path(__file__).parent)
    devices = parse_devices("cpu:3").devices
    with Pool(devices, threads_per_rank=1, engine="link_engine:NotingEngine", python_path=(here, FOLDER)) as noting:
        yield noting


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return WAN.write(tmp_path_factory.mktemp("links"))


@pytest.mark.parametrize("plan", PLANS)
def test_each_direction_between_two_stages_has_a_group_of_its_own(pool: Pool, model: ModelSpec, plan: str) -> None:
    run = make_run(WAN, recurrence=euler(4, timesteps=1.0), texts=(7, 12))
    with Notes() as notes:
        noted = replace(run, conds=tuple(replace(cond, options=cond.options | notes.option) for cond in run.conds))
        pool.sample(model, ParallelPlan.parse(plan), noted)
        issued = notes.read()[: ParallelPlan.parse(plan).ranks]
    count, directions = len(issued), {}
    for rank, notes in enumerate(issued):
        for what, peer, members, name in (note for note in notes if len(note) > 1):
            assert sorted(members) == sorted((rank, peer)), "others' messages would queue behind these"
            assert peer == (rank + (1 if what == "send" else -1)) % count
            directions.setdefault(name, set()).add((rank, peer) if what == "send" else (peer, rank))
    assert len(directions) == count
    assert all(len(found) == 1 for found in directions.values()), "one communicator for both directions"


def test_a_circle_of_stages_checks_its_links_though_each_first_send_waits_for_its_receive(pool: Pool) -> None:
    pool.deadline_s, usual_s = 10.0, pool.deadline_s
    try:
        for name in ("pipefusion=2", "pipefusion=3"):
            wrong = pool.exchange_pattern(ParallelPlan.parse(name))
            assert wrong == [0, 0, 0]
    finally:
        pool.deadline_s = usual_s
