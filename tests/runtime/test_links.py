"""Stages of a pipeline queue messages in an order, and in groups, with which a GPU cannot wait for itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from noted import FOLDER, Notes

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from runtime.in_worker_runs import make_run

# by plan: chunks of the run's four calls, of which the first is warm-up
PLANS = {
    "pipefusion=2": (1, 2, 2, 2),
    "pipefusion=3,patches=4": (1, 4, 4, 4),
    "pipefusion=3,patches=4,warmup_steps=3": (1, 1, 1, 1),
}
SIDES = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    here = str(Path(__file__).parent)
    devices = parse_devices("cpu:3").devices
    with Pool(devices, threads_per_rank=1, engine="link_engine:NotingEngine", python_path=(here, FOLDER)) as noting:
        yield noting


@pytest.fixture(scope="module", params=PLANS)
def stages(request: pytest.FixtureRequest, pool: Pool, deep: ModelSpec) -> tuple[tuple[int, ...], list[list]]:
    """The chunks of each call, and what each stage queued, in order."""
    run = make_run(FluxConfig.from_header(read_header(deep.path)), sides=(5, 7))
    plan = ParallelPlan.parse(request.param)
    with Notes() as notes:
        pool.sample(deep, plan, replace(run, conds=tuple(replace(cond, options=notes.option) for cond in run.conds)))
        return PLANS[request.param], notes.read()[: plan.ranks]


def test_each_direction_between_two_stages_has_a_group_of_its_own(stages: tuple[tuple[int, ...], list[list]]) -> None:
    _, issued = stages
    count, directions = len(issued), {}
    for rank, notes in enumerate(issued):
        for what, peer, members, name in (note for note in notes if len(note) > 1):
            assert sorted(members) == sorted((rank, peer)), "others' messages would queue behind these"
            assert peer == (rank + (1 if what == "send" else -1)) % count
            directions.setdefault(name, set()).add((rank, peer) if what == "send" else (peer, rank))
    assert len(directions) == count
    assert all(len(found) == 1 for found in directions.values()), "one communicator for both directions"


def test_a_receive_is_queued_after_the_work_that_its_message_depends_on(
    stages: tuple[tuple[int, ...], list[list]],
) -> None:
    chunks, (first, *others) = stages
    for rank, notes in enumerate(others, 1):
        whats, last = [note[0] for note in notes], rank == len(others)
        worked_on = 0
        for number in range(whats.count("receive")):
            at = _place_of(whats, "receive", number)
            worked_on = whats[:at].count("chunk")
            assert worked_on >= number, "received ahead of the work on the message before"
            if not last:
                assert whats[:at].count("send") >= number, "received ahead of what the next stage waits for"
        assert worked_on == whats.count("chunk") - 1 == sum(chunks) * SIDES - 1
    whats = [note[0] for note in first]
    for call, count in enumerate(chunks):
        for index in range(count):
            at = _place_of(whats, "receive", sum(chunks[:call]) + index)
            # X of a patch is made of that patch in the call before, or of the whole image
            of_the_call_before = min(index + 1, chunks[call - 1]) if call else 0
            needs = sum(chunks[: max(0, call - 1)]) + of_the_call_before
            assert whats[:at].count("chunk") >= needs * SIDES, "received ahead of the patch it is made of"
    assert whats.count("receive") == sum(chunks)


def test_the_last_stage_sends_the_next_latent_before_it_copies_a_preview(
    stages: tuple[tuple[int, ...], list[list]],
) -> None:
    chunks, (*_, last) = stages
    whats = [note[0] for note in last]
    assert whats[: whats.index("preview")].count("send") == sum(chunks[:2])
    assert all("preview" not in [note[0] for note in notes] for notes in stages[1][:-1])


def test_the_next_latent_travels_before_its_step_has_leave_to_start(stages: tuple[tuple[int, ...], list[list]]) -> None:
    """The two ends see leave at different moments: a send that waits for it, and a receive that does not, or the other
    way round, is in flight for as long as the other rank is held up by a kernel's first launch."""
    chunks, (first, *_, last) = stages
    for what, notes in (("receive", first), ("send", last)):
        whats = [note[0] for note in notes]
        before = [whats[: _place_of(whats, "step", step)].count(what) for step in range(3)]
        assert before == [0, *(sum(chunks[: call + 1]) for call in (1, 2))]  # the third step has two calls


def test_a_circle_of_stages_checks_its_links_though_each_first_send_waits_for_its_receive(pool: Pool) -> None:
    pool.deadline_s, usual_s = 10.0, pool.deadline_s
    try:
        for name in ("pipefusion=2", "pipefusion=3"):
            wrong = pool.exchange_pattern(ParallelPlan.parse(name))
            assert wrong == [0, 0, 0]
    finally:
        pool.deadline_s = usual_s


def _place_of(whats: list[str], what: str, number: int) -> int:
    """Where the `number`-th of its kind stands."""
    return [place for place, each in enumerate(whats) if each == what][number]
