"""Ranks of a further machine count like local ones: what they compute, write, say and fail is the same."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from rounding import ROUNDING

from host.hosted_runs import asking, host_loop, make_run
from host.tiny_hosted import call
from host.workers import command
from machines.loopback import LoopbackMachine
from machines.worlds import Model, several_machines, tiny_model
from parallel_runtime.errors import PoolError
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.pool.worker_group import WorkerGroup
from parallel_runtime.process.signs import PASSED_ON_S
from parallel_runtime.proof import relative_error

TWO = ParallelPlan(ring=2)
MESSAGES_BYTES = 64 * 1024  # of a step, in blocks of 4 KiB
LARGE = (5, 20, 28)  # a latent of 180 KB an image, beside which messages are few
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return tiny_model(folder)


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[tuple[Pool, list[LoopbackMachine]]]:
    """One rank here, one on another machine."""
    with several_machines(folder, [1, 1]) as world:
        yield world


@pytest.fixture(scope="module")
def three(folder: Path) -> Iterator[tuple[Pool, list[LoopbackMachine]]]:
    """One rank here, one on each of two other machines."""
    with several_machines(folder, [1, 1, 1]) as world:
        yield world


@pytest.fixture
def pool(two: tuple[Pool, list[LoopbackMachine]]) -> Pool:
    return two[0]


PLANS = [
    ParallelPlan(ring=2),
    ParallelPlan(ring=2, weights="sharded"),
    ParallelPlan(cfg=2),
    ParallelPlan(data=2),
    ParallelPlan(pipefusion=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_step_over_two_machines_equals_one_process(pool: Pool, model: Model, plan: ParallelPlan) -> None:
    assert model.error(pool, plan) <= ROUNDING
    assert model.error(pool, plan) <= ROUNDING  # its text lies there from the step before


def test_inputs_that_were_placed_and_not_sent_are_sent_with_the_next_request(pool: Pool, model: Model) -> None:
    plan, given = ParallelPlan(ring=2), model.calls[0]
    other = changed(given, t2=given.tensors["t2"] * -1.5 + 0.3)  # its text
    (right,) = pool.run(model.spec, plan, [other]).outs
    assert relative_error(pool.run(model.spec, plan, [given]).outs[0], right) > 1e-2

    def cancel() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        pool.run(model.spec, plan, [other], check_cancelled=cancel)
    assert relative_error(pool.run(model.spec, plan, [other]).outs[0], right) <= ROUNDING


@pytest.mark.parametrize("plan", [ParallelPlan(ring=2), ParallelPlan(data=2)], ids=lambda plan: plan.name)
def test_without_exchange_it_does_not(pool: Pool, model: Model, plan: ParallelPlan) -> None:
    assert model.error(pool, plan, control=True) > 1e-2


def test_a_whole_run_shows_every_step_and_equals_one_process(pool: Pool, model: Model) -> None:
    run = make_run(batch=2, texts=(7, 3))
    expected, previews = host_loop(asking(pool, model.spec, ParallelPlan()), run)
    for plan in (ParallelPlan(ring=2), ParallelPlan(cfg=2), ParallelPlan(data=2)):
        shown: list[torch.Tensor] = []
        result = pool.sample(model.spec, plan, run, on_step=lambda _, latent, shown=shown: shown.append(latent))
        assert relative_error(result.out, expected) <= ROUNDING, plan
        assert [relative_error(*pair) <= ROUNDING for pair in zip(shown, previews, strict=True)] == [True] * 3, plan


def test_ulysses_stays_inside_a_machine(pool: Pool, model: Model) -> None:
    with pytest.raises(ValueError, match=r"ulysses=2 does not stay inside a machine, which have 1 \+ 1 ranks; use uly"):
        model.error(pool, ParallelPlan(ulysses=2))
    with pytest.raises(ValueError, match=r"needs 4 ranks, the machines that are there have 1 \+ 1 = 2; lower a degree"):
        model.error(pool, ParallelPlan(ring=4))


class EnoughError(Exception):
    """What a caller raises that wants no more."""


def test_a_run_that_is_cancelled_ends_on_every_machine_at_the_same_step(pool: Pool, model: Model) -> None:
    run = make_run()
    pool.start()
    generation = pool.generation

    def stop(step: int, _: torch.Tensor) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        pool.sample(model.spec, ParallelPlan(ring=2), run, on_step=stop)
    assert model.error(pool, ParallelPlan(ring=2)) <= ROUNDING
    assert pool.generation == generation


def test_of_a_steps_tensors_only_what_is_new_crosses_and_only_what_is_the_machines_own_comes_back(
    two: tuple[Pool, list[LoopbackMachine]], model: Model
) -> None:
    """By the bytes that the two processes which pass on write. The launcher's ranks have processes of their own."""
    pool, (machine,) = two
    plan, given = ParallelPlan(data=2), call(batch=2, size=LARGE)
    latent = given.tensors["t0"]
    pool.run(model.spec, plan, [given])
    before = relay_bytes(), machine.written_bytes()
    (out,) = pool.run(model.spec, plan, [changed(given, t0=latent + 1)]).outs
    down, up = (now - then for now, then in zip((relay_bytes(), machine.written_bytes()), before, strict=True))
    assert latent.nbytes < down < latent.nbytes + MESSAGES_BYTES
    assert out.nbytes / 2 <= up < out.nbytes / 2 + MESSAGES_BYTES


def changed(given: ModelCall, **tensors: torch.Tensor) -> ModelCall:
    """The same call with other numbers."""
    return replace(given, tensors={**given.tensors, **tensors})


def relay_bytes() -> int:
    """What the process that passes on for this one has written so far."""
    relays = [child for child in psutil.Process().children() if "parallel_runtime.machines.relay" in command(child)]
    return sum(relay.io_counters().write_chars for relay in relays)


def test_a_killed_rank_is_one_error_that_names_its_machine_and_the_next_request_works(
    two: tuple[Pool, list[LoopbackMachine]], model: Model
) -> None:
    pool, (machine,) = two
    run = make_run()
    pool.start()

    def kill(step: int, _: torch.Tensor) -> None:
        for pid in machine.pids():
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(
        PoolError, match=r"rank 1 \(cpu:0 of machine host-2 \(127.0.0.1:7\)\): killed by SIGKILL; the next"
    ):
        pool.sample(model.spec, ParallelPlan(ring=2), run, on_step=kill)
    assert model.error(pool, ParallelPlan(ring=2)) <= ROUNDING


def test_launchers_end_with_ranks_that_are_asked_to_end(
    two: tuple[Pool, list[LoopbackMachine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves: what has not ended after STOP_S is killed."""
    pool, (machine,) = two
    monkeypatch.setattr("parallel_runtime.pool.generation.STOP_S", 300.0)
    pool.start()
    pool.close()
    assert machine.ends[-1].code == 0


def test_a_machine_that_a_plan_leaves_out_is_sent_nothing_not_waited_for_and_not_missed(
    three: tuple[Pool, list[LoopbackMachine]], model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (_, unused) = three
    given = call(size=LARGE)
    pool.run(model.spec, ParallelPlan(ring=3), [given])  # an earlier test may have ended ranks
    pool.run(model.spec, TWO, [given])
    generation = pool.generation
    for pid in unused.pids():
        os.kill(pid, signal.SIGSTOP)
    seen = [unused.written_bytes()]
    while len(seen) < 6 or len({*seen[-6:]}) > 1:  # until what its launcher had seen of them has been passed on
        time.sleep(PASSED_ON_S)
        seen.append(unused.written_bytes())
    written = seen[-1], relay_bytes()
    latent = given.tensors["t0"] * 2
    pool.run(model.spec, TWO, [changed(given, t0=latent)])
    assert unused.written_bytes() == written[0]
    # one machine's share of the step: with inputs for the other one, too, it would be twice the latent
    assert relay_bytes() - written[1] < 1.5 * latent.nbytes + MESSAGES_BYTES
    for pid in unused.pids():
        os.kill(pid, signal.SIGCONT)
    # the third rank has none of what the two were given last
    assert model.error(pool, ParallelPlan(ring=3)) <= ROUNDING
    assert (model.error(pool, TWO), pool.generation) == (pytest.approx(0.0, abs=ROUNDING), generation)
    pool.sample(model.spec, TWO, make_run(), on_step=lambda step, _: unused.kill_ranks() if step == 0 else None)
    assert (model.error(pool, TWO), pool.generation) == (pytest.approx(0.0, abs=ROUNDING), generation)
    (said,) = [each.getMessage() for each in caplog.records if "goes on without it" in each.getMessage()]
    assert re.match(
        r"machine host-3 \(127.0.0.1:7\) is not used by this plan, which goes on without it: (.*SIGKILL|ended)", said
    )


def test_a_machine_lost_between_the_requests_of_a_new_plan_is_not_missed(
    three: tuple[Pool, list[LoopbackMachine]], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, (_, unused) = three
    pool.close()
    generation, made = pool.generation, WorkerGroup.make_mesh

    def make_mesh(workers: WorkerGroup, plan: ParallelPlan, check: Callable[[], None]) -> None:
        monkeypatch.undo()
        unused.kill_ranks()
        workers.trim((), check)  # a request that does without it
        made(workers, plan, check)

    monkeypatch.setattr(WorkerGroup, "make_mesh", make_mesh)
    assert (model.error(pool, TWO), pool.generation) == (pytest.approx(0.0, abs=ROUNDING), generation + 1)


@pytest.mark.full  # of ranks here, faults/test_silent_ranks.py has it
def test_a_stopped_rank_that_a_plan_leaves_out_is_found_by_its_silence_once_another_plan_asks_it_to_load(
    three: tuple[Pool, list[LoopbackMachine]], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by the deadline of loading, which is 600 s: no file is to blame for a process that does not run."""
    pool, (_, unused) = three
    pool.close()
    assert model.error(pool, TWO) <= ROUNDING
    generation = pool.generation
    for pid in unused.pids():
        os.kill(pid, signal.SIGSTOP)
    assert (model.error(pool, TWO), pool.generation) == (pytest.approx(0.0, abs=ROUNDING), generation)
    monkeypatch.setattr(pool, "deadline_s", 6.0)  # no earlier: where others work, a rank that runs may rest so long
    with pytest.raises(PoolError) as caught:
        model.error(pool, ParallelPlan(ring=3))
    said = str(caught.value).partition("\n")[0]
    assert said.startswith("rank 2 (cpu:0 of machine host-3 (127.0.0.1:7)): no answer to LOAD and no heartbeat for")
    assert "the deadline is 6 s; the next prompt starts fresh workers" in said
