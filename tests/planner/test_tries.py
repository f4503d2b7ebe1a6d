"""Tries: which plans are worth one, how many steps each gets, which plan is kept, and the file that keeps it."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import Prediction, graphs_gain_s
from parallel_runtime.planner.cost import Cost
from parallel_runtime.planner.kept_plans import KEPT, KeptPlans, TriesKey
from parallel_runtime.planner.memory import PlannedMemory
from parallel_runtime.planner.tries import (
    CHANGE,
    KeptPlan,
    Tries,
    changed_text,
    graphs_pay,
    graphs_pay_at_once,
    in_words,
    kept_of,
    near,
    proof_pays,
    tried_in_s,
    worth_trying,
)

ULYSSES, RING, CFG, SINGLE = (ParallelPlan(**degrees) for degrees in ({"ulysses": 2}, {"ring": 2}, {"cfg": 2}, {}))
STAGES = ParallelPlan(pipefusion=2)
KEY = TriesKey(
    devices=("cuda:0 NVIDIA L4", "cuda:1 NVIDIA L4"),
    driver="580.1",
    torch="2.13.0",
    comfyui="0.30.0",
    pack="1.0",
    model="comfy.ldm.flux.model.Flux 23802932552",
    weights="bfloat16",
    kernels="",
    work=(("batch", "1"), ("image_tokens", "4096")),
)


def table(fits: bool = True, **seconds: float) -> list[Prediction]:
    """Predictions of plans by their first letters, quickest first."""
    names = {"ulysses": ULYSSES, "ring": RING, "cfg": CFG, "single": SINGLE, "stages": STAGES}
    memory = PlannedMemory(**{each.name: 0 for each in fields(PlannedMemory)})
    rows = []
    for name, step_s in sorted(seconds.items(), key=lambda each: each[1]):
        cost = Cost(step_s=step_s, compute_s=step_s, communication_s=0.0, launch_s=0.0, warmup_step_s=step_s)
        rows.append(Prediction(plan=names[name], cost=cost, memory=memory, run_s=20 * step_s, fits=fits))
    return rows


@pytest.mark.parametrize(
    ("steps", "seconds", "tried"),
    [
        (20, {"ulysses": 1.0, "ring": 1.0}, (ULYSSES, RING)),
        (20, {"ulysses": 1.0, "ring": 1.0, "cfg": 1.01, "single": 1.02}, (ULYSSES, RING, CFG)),
        (15, {"ulysses": 1.0, "ring": 1.0}, ()),  # too short a run
        (16, {"ulysses": 1.0, "ring": 1.0}, (ULYSSES, RING)),
        (16, {"ulysses": 271.0, "ring": 305.0}, ()),  # gains what the try of ulysses takes, to the second
        (20, {"ulysses": 0.09, "ring": 0.09}, ()),  # of too short steps
        (20, {"ulysses": 1.0, "ring": 1.19}, ()),  # could gain 5 % of 80 steps, and 6.6 steps would be spent
        (1000, {"ulysses": 1.0, "ring": 1.19}, (ULYSSES, RING)),  # pays in a long run
        (1000, {"ulysses": 1.0, "single": 1.25}, ()),  # predicted to be too far behind for any run
        (1000, {"ulysses": 1.0, "stages": 0.5}, ()),  # not exact
        (1000, {"ring": 1.0}, ()),  # what runs was not weighed
        (20, {"ulysses": 1.0}, ()),  # nothing to compare
    ],
)
def test_a_plan_is_tried_where_what_it_may_gain_pays(steps: int, seconds: dict, tried: tuple) -> None:
    assert worth_trying(table(**seconds), ULYSSES, steps=steps, asynchronous=False) == tried


def test_while_nobody_waits_more_plans_are_tried_for_as_long_as_ten_seconds() -> None:
    near = {"ulysses": 1.0, "ring": 1.0, "cfg": 1.0, "single": 1.01}
    for step_s, count in ((1.0, 4), (4.0, 3)):
        rows = table(**{name: step_s * seconds for name, seconds in near.items()})
        assert len(worth_trying(rows, ULYSSES, steps=20, asynchronous=False, idle=True)) == count
        assert len(worth_trying(rows, ULYSSES, steps=20, asynchronous=False)) == 3
    for cfg_s, asynchronous, tried in ((3.0, True, (ULYSSES, CFG)), (3.01, False, ())):  # ten seconds; twice as long
        rows = table(ulysses=1.5, cfg=cfg_s)
        assert worth_trying(rows, ULYSSES, steps=1, asynchronous=asynchronous, idle=True) == tried


@pytest.mark.parametrize(("step_s", "copies", "kept"), [(0.1, 15, RING), (1.5, 3, RING), (4.0, 2, ULYSSES)])
def test_while_nobody_waits_near_plans_take_turns_and_medians_decide(step_s: float, copies: int, kept: object) -> None:
    """The second copy of the quicker is slowed: two say nothing against the plan predicted best, medians of more do."""
    seconds, order = {ULYSSES: 1.0, RING: 0.95, CFG: 2.0}, []
    tries = Tries(tuple(seconds), warm=frozenset(seconds), idle=True)
    while (plan := tries.due) is not None:
        order.append(plan)
        tries.note(plan, step_s * seconds[plan] * (1.3 if (plan, order.count(plan)) == (RING, 2) else 1.0))
    assert order == [ULYSSES, RING, CFG, *(ULYSSES, RING) * (copies - 1)] and tries.best() == kept


def test_while_nobody_waits_one_slow_copy_is_no_reason_against_a_plan() -> None:
    tries = Tries((ULYSSES, RING), warm=frozenset((ULYSSES, RING)), idle=True)
    for plan, seconds in ((ULYSSES, 1.0), (RING, 1.3), (ULYSSES, 1.0), (RING, 1.3)):
        assert tries.due == plan
        tries.note(plan, seconds)
    assert tries.due is None


def test_setting_a_plan_up_counts_and_what_does_not_fit_is_not_tried() -> None:
    rows = table(ulysses=0.1, ring=0.11)
    assert worth_trying(rows, ULYSSES, steps=20, asynchronous=False) == (ULYSSES, RING)
    assert worth_trying(rows, ULYSSES, steps=20, asynchronous=True) == ()  # groups take longer than the whole run
    slow = table(ulysses=5.0, ring=5.0)
    assert worth_trying(slow, ULYSSES, steps=20, asynchronous=True) == (ULYSSES, RING)
    assert worth_trying(slow, ULYSSES, steps=20, asynchronous=True, compiled=True) == ()
    dear = table(ulysses=4.475, ring=5.0)  # gains 14.4 s, where three steps of ulysses take 13.4 s
    assert worth_trying(dear, ULYSSES, steps=16, asynchronous=True) == (ULYSSES, RING)
    even = table(ulysses=4.25, ring=4.0, cfg=5.0)  # cfg gains what its own try takes, to the second
    assert worth_trying(even, ULYSSES, steps=16, asynchronous=True) == (ULYSSES, RING)
    assert worth_trying(table(fits=False, ulysses=1.0, ring=1.0), ULYSSES, steps=20, asynchronous=False) == ()


def test_all_near_plans_are_tuned_whatever_that_takes_the_most_promising_first() -> None:
    rows = table(ulysses=1.0, ring=1.2, cfg=1.1, single=1.25, stages=0.5)
    plans = near(rows, ULYSSES)
    assert plans == (ULYSSES, CFG, RING)
    assert tried_in_s(rows, plans, asynchronous=False) == pytest.approx([3.0, 6.3, 9.9])
    assert tried_in_s(rows, plans, asynchronous=True, compiled=True) == pytest.approx([64.0, 128.3, 192.9])
    assert near(rows, STAGES) == () == near(table(fits=False, ulysses=1.0), ULYSSES)


@pytest.mark.parametrize(
    ("seconds", "warm", "copies", "kept"),
    [
        ((1.0, 0.95, 1.5), False, 5, None),  # each was started
        ((1.0, 0.95, 1.5), False, 6, None),  # ring, which may be the quickest, was counted once
        ((1.0, 0.95, 1.5), False, 7, None),  # of two that are near one was counted twice
        ((1.0, 0.95, 1.5), False, 8, RING),  # all that are near
        ((1.0, 0.95, 1.0), True, 5, RING),  # two are known, whatever the third is
        ((0.95, 1.0), True, 3, None),  # one alone says nothing
    ],
)
def test_what_is_half_measured_when_time_is_up_counts_for_nothing_and_two_that_are_known_are_compared(
    seconds: tuple, warm: bool, copies: int, kept: object
) -> None:
    took = dict(zip((ULYSSES, RING, CFG), seconds, strict=False))
    tries = Tries(tuple(took), warm=frozenset(took if warm else ()))
    while tries.copies < copies and (plan := tries.due) is not None:
        tries.note(plan, took[plan])
    tries.give_up()
    found = kept_of(tries)
    assert tries.due is None and (found.plan if found else None) == tries.best() == kept


def run(tries: Tries, seconds: dict[ParallelPlan, float], noise: tuple[float, ...] = (1.0,)) -> Tries:
    """Compute what is due, `noise` times as long; a first copy takes half as long again."""
    started = set(tries.warm)
    while (plan := tries.due) is not None:
        factor = noise[tries.copies % len(noise)]
        tries.note(plan, factor * seconds[plan] * (1 if plan in started else 1.5))
        started.add(plan)
    return tries


@pytest.mark.parametrize(
    ("seconds", "warm", "copies", "kept"),
    [
        ({ULYSSES: 1.0, RING: 0.95}, (), 6, RING),  # near: two are counted of each
        ({ULYSSES: 1.0, RING: 2.0}, (), 4, ULYSSES),  # far behind after one
        ({ULYSSES: 2.0, RING: 1.0}, (ULYSSES,), 3, RING),  # its proof was the first copy
        ({ULYSSES: 1.0, RING: 1.05, CFG: 1.5}, (), 8, ULYSSES),
    ],
)
def test_the_first_copy_is_not_counted_then_two_are(seconds: dict, warm: tuple, copies: int, kept: object) -> None:
    tries = run(Tries(tuple(seconds), warm=frozenset(warm)), seconds)
    assert (tries.copies, tries.best()) == (copies, kept)
    assert tries.seconds == seconds  # first copies, which take longer, are not in here


@pytest.mark.parametrize(
    ("seconds", "cold", "copies", "kept"),
    [
        ({ULYSSES: 1.0, RING: 1.02}, None, (1, 1), ULYSSES),  # slower at once
        ({ULYSSES: 1.05, RING: 1.0}, None, (1, 1), ULYSSES),
        ({ULYSSES: 1.0, RING: 0.97}, None, (1, 1), ULYSSES),  # quicker by less than few copies can tell
        ({ULYSSES: 1.0, RING: 0.9}, None, (2, 1), RING),  # and once more the one that was predicted best
        ({ULYSSES: 1.0, RING: 1.02, CFG: 0.5}, None, (1, 1, 0), ULYSSES),  # a third would take it too long
        ({ULYSSES: 1.0, RING: 0.97, CFG: 0.96}, None, (1, 1, 1), ULYSSES),  # too near for single copies
        ({ULYSSES: 1.0, RING: 0.97, CFG: 0.9}, None, (1, 1, 1), CFG),
        ({ULYSSES: 1.0, RING: 0.9}, 1.5, (1, 2), RING),  # a first copy connects groups
        ({ULYSSES: 1.0, RING: 0.6}, 1.5, (2, 1), RING),  # quicker all the same
    ],
)
def test_a_run_that_waits_for_its_tries_takes_three_steps_longer_at_most(
    seconds: dict, cold: float | None, copies: tuple, kept: object
) -> None:
    """`cold`: how many times as long a first copy takes, on devices that run ahead of the host."""
    tries = Tries(tuple(seconds), warm=frozenset({ULYSSES}), limit=3.0, asynchronous=cold is not None)
    made, started = dict.fromkeys(seconds, 0), set(tries.warm)
    while (plan := tries.due) is not None:
        tries.note(plan, seconds[plan] * (1 if plan in started or cold is None else cold))
        made[plan] += 1
        started.add(plan)
    assert (tuple(made.values()), tries.best()) == (copies, kept)
    assert tries.spent_s <= 3.0 + (0 if cold is None else seconds[RING] * (cold - 1))


def test_no_copy_begins_that_the_three_steps_do_not_hold_once_a_plan_failed() -> None:
    for took_s, due in ((1.0, CFG), (1.1, None)):  # what it took with the workers that start again
        tries = Tries((ULYSSES, RING, CFG), limit=3.0, asynchronous=False)
        tries.note(ULYSSES, 1.0)
        tries.fail(RING, "out of memory", took_s=took_s)
        assert tries.due == due and tries.best() == ULYSSES and tries.left
    tries = Tries((ULYSSES, RING, CFG), limit=3.0, asynchronous=False)
    tries.fail(ULYSSES, "lost", took_s=2.0)
    assert tries.due == RING, "the run needs a plan"
    tries.note(RING, 1.0)
    assert tries.due is None and tries.best() == RING
    for took_s, due in ((0.0, CFG), (0.5, None)):  # its first copy, which makes groups, and one that counts
        tries = Tries((ULYSSES, RING, CFG), warm=frozenset({ULYSSES}), limit=3.0)
        tries.note(ULYSSES, 1.0)
        tries.fail(RING, "lost", took_s=took_s)
        assert tries.due == due
    for limit, due in ((2.5, (ULYSSES,)), (5.0, (ULYSSES,)), (2.4, ())):  # once more where a step is left
        tries = Tries((ULYSSES, RING), limit=limit, asynchronous=False)
        for plan, seconds in ((ULYSSES, 1.0), (RING, 0.5), *((plan, 1.0) for plan in due)):
            assert tries.due == plan
            tries.note(plan, seconds)
        assert tries.due is None
    tries = Tries((ULYSSES, RING), warm=frozenset({ULYSSES}), limit=3.0)
    for plan in (ULYSSES, RING):
        tries.note(plan, 1.0)
    assert tries.seconds == {ULYSSES: 1.0}, "a first copy that is not quicker counts where no step is left for another"
    tries = Tries((ULYSSES, RING), limit=3.0)
    for plan, seconds in ((ULYSSES, 1.5), (ULYSSES, 1.0), (RING, 1.5)):  # none failed, and no proof was a first copy
        assert tries.due == plan
        tries.note(plan, seconds)
    assert tries.due is None and tries.seconds[RING] == 1.5


def test_a_quicker_plan_is_proven_in_this_run_where_that_and_its_tries_take_three_steps_less_what_it_gains() -> None:
    tries = Tries((ULYSSES, RING, CFG), limit=3.0, asynchronous=False)
    for plan, seconds in ((ULYSSES, 1.0), (RING, 0.8), (ULYSSES, 1.0)):
        tries.note(plan, seconds)
    told = {"own": ULYSSES, "steps": 16}
    assert proof_pays(tries, RING, **told) and not proof_pays(tries, RING, **told | {"steps": 14})  # 2.8 + 3.2 - 3.2
    assert not proof_pays(tries, RING, **told, times=2) and proof_pays(
        replace(tries, limit=None), RING, **told, times=2
    )
    even = replace(tries, spent_s=2.5, _counted={ULYSSES: [1.0], RING: [0.5]})  # 2.5 + 2.0 less half a second a step
    assert proof_pays(even, RING, own=ULYSSES, steps=3) and not proof_pays(even, RING, own=ULYSSES, steps=2)
    assert proof_pays(tries, CFG, **told, times=9), "it cuts no tokens, so it has no proof"


@given(st.floats(0.2, 5.0), st.lists(st.floats(0.98, 1.02), min_size=6, max_size=6).map(tuple))
def test_what_is_kept_is_the_quickest_or_near_it_whatever_the_noise(ratio: float, noise: tuple[float, ...]) -> None:
    seconds = {ULYSSES: 1.0, RING: ratio}
    kept = run(Tries((ULYSSES, RING)), seconds, noise=noise).best()
    assert seconds[kept] <= 1.05 * min(seconds.values())


@pytest.mark.parametrize(
    ("copies", "kept"),
    [
        ({ULYSSES: (1.3, 1.0), RING: (1.0, 1.1)}, ULYSSES),  # one copy was slowed
        ({ULYSSES: (1.3, 1.2), RING: (1.0, 1.25)}, ULYSSES),  # one was quicker, one was not
        ({ULYSSES: (1.3, 1.2), RING: (1.0, 1.1)}, RING),
        ({ULYSSES: (1.0, 1.0), RING: (0.9, 1.0)}, ULYSSES),
        ({ULYSSES: (1.0, 0.5), RING: (1.1, 0.4)}, ULYSSES),  # whose first copies were near
    ],
)
def test_a_slow_copy_alone_is_no_reason_against_the_plan_predicted_best(copies: dict, kept: object) -> None:
    tries, left = Tries((ULYSSES, RING), warm=frozenset((ULYSSES, RING))), {p: list(s) for p, s in copies.items()}
    while (plan := tries.due) is not None:
        tries.note(plan, left[plan].pop(0))
    assert tries.best() == kept and not any(left.values())


def test_a_plan_that_is_hopeless_in_its_first_copy_gets_no_other() -> None:
    tries = Tries((ULYSSES, RING))
    for plan, seconds in ((ULYSSES, 2.0), (ULYSSES, 1.0), (RING, 4.1)):
        assert tries.due == plan
        tries.note(plan, seconds)
    assert tries.due is None and tries.best() == ULYSSES
    tries = Tries((ULYSSES, RING))
    for plan, seconds in ((ULYSSES, 2.0), (ULYSSES, 1.0), (RING, 4.0)):  # making groups may take as long
        tries.note(plan, seconds)
    assert tries.due == RING


def test_a_plan_that_fails_is_kept_out_and_the_others_go_on() -> None:
    tries = Tries((ULYSSES, RING))
    tries.note(ULYSSES, 3.0)
    tries.note(ULYSSES, 1.0)
    tries.fail(RING, "out of memory")
    assert tries.due is None
    kept = kept_of(tries)
    assert kept is not None and kept.text == "tried ring 2: out of memory, kept ulysses 2"
    tries.fail(ULYSSES, "lost")
    assert kept_of(tries) is None and tries.due is None and not tries.left


def test_the_line_says_how_fast_the_others_are_beside_the_one_kept() -> None:
    kept = kept_of(run(Tries((RING, ULYSSES, SINGLE)), {RING: 1.0, ULYSSES: 0.92, SINGLE: 2.0}))
    assert kept is not None and kept.text == "tried ring 2: 0.92x, one device: 0.46x, kept ulysses 2"
    assert in_words(ParallelPlan(cfg=2, ulysses=2, weights="sharded")) == "cfg 2 x ulysses 2 sharded"


def test_blocks_run_as_graphs_where_a_try_shows_a_clear_gain(tmp_path: Path) -> None:
    kept, store = KeptPlan(plan=ULYSSES, seconds={ULYSSES: 1.0}, expected_s=1.0), KeptPlans(tmp_path / "plans.json")
    for graphs_s, by_graphs in (({}, False), ({ULYSSES: 0.98}, False), ({ULYSSES: 0.97}, True)):
        found = replace(kept, graphs_s=graphs_s)
        assert found.by_graphs is by_graphs and found.text.endswith("with graphs of blocks") is by_graphs
        store.save(KEY, found)
        assert store.load(KEY) == found
    assert found.text == "tried graphs of blocks: 1.03x, kept ulysses 2 with graphs of blocks"
    content = json.loads(store.path.read_text())
    content["plans"][KEY.digest]["graphs_s"] = 0.97  # as versions before wrote it
    store.path.write_text(json.dumps(content))
    assert store.load(KEY) == kept


@pytest.mark.parametrize(
    ("graphs_s", "kept", "line"),
    [
        ({}, SINGLE, "tried ulysses 2: 0.91x, ring 2: 0.80x, kept one device"),
        ({ULYSSES: 0.6}, ULYSSES,
         "tried one device: 0.60x, ring 2: 0.48x, graphs of blocks: 1.83x, kept ulysses 2 with graphs of blocks"),
        ({ULYSSES: 0.6, SINGLE: 0.5}, SINGLE,
         "tried ulysses 2: 0.83x, ring 2: 0.40x, graphs of blocks: 2.00x, kept one device with graphs of blocks"),
        ({ULYSSES: 1.09}, SINGLE, "tried ulysses 2: 0.91x, ring 2: 0.80x, kept one device"),  # too little for graphs
    ],
)  # fmt: skip
def test_what_a_plan_takes_by_graphs_decides_which_is_kept(graphs_s: dict, kept: ParallelPlan, line: str) -> None:
    tries = run(Tries((SINGLE, ULYSSES, RING), idle=True), {SINGLE: 1.0, ULYSSES: 1.1, RING: 1.25})
    tries.graphs_s |= graphs_s
    found = kept_of(tries)
    assert found is not None and (found.plan, found.text) == (kept, line)
    assert found.expected_s == graphs_s.get(kept, 1.0) and found.graphs_s == graphs_s
    assert found.again is False
    slower_s = 1.2 * max(found.expected_s, found.taken_s(ULYSSES), found.taken_s(SINGLE))
    assert found.after_run(slower_s).again and not found.after_run(1.05 * found.expected_s).again
    if kept == ULYSSES:
        assert changed_text(replace(found, plan=SINGLE), found).endswith(", measured again: 1.67x as fast")
    tries.fail(kept, "lost")
    assert kept_of(tries).plan == (ULYSSES if kept == SINGLE else SINGLE)  # type: ignore[union-attr]


def test_where_graphs_decide_they_are_what_plans_are_tried_for_and_their_copies_count() -> None:
    """Two plans whose launches bind both: by graphs one is twice as quick."""
    rows = table(ulysses=0.5, single=1.0)
    rows = [replace(row, without_graphs=replace(row.cost, step_s=1.1)) if row.plan == ULYSSES else row for row in rows]
    assert worth_trying(rows, SINGLE, steps=4, asynchronous=True, idle=True) == (SINGLE, ULYSSES)
    assert tried_in_s(rows, (ULYSSES,), asynchronous=False) == [3 * 1.1 + 4 * 0.5]
    doubled = [
        replace(row, cost=replace(row.cost, step_s=step_s)) for row, step_s in zip(rows, (1.98, 2.0), strict=True)
    ]
    slow = [replace(doubled[0], without_graphs=replace(rows[0].cost, step_s=2.2)), doubled[1]]  # 16.5 s to gain 6.7
    assert worth_trying(slow, SINGLE, steps=4, asynchronous=True, idle=True) == ()


def test_a_run_waits_for_graphs_where_it_ends_sooner_all_the_same() -> None:
    """A try is three copies without graphs and four with them, beside what making them takes of a run."""
    (row,) = table(ulysses=1.0)
    row = replace(row, cost=replace(row.cost, step_s=0.5), without_graphs=row.cost)
    assert graphs_pay_at_once(row, steps=12) and not graphs_pay_at_once(row, steps=11)
    assert not graphs_pay_at_once(table(ulysses=1.0)[0], steps=1000)


def test_graphs_pay_in_a_run_that_gains_more_than_making_them_takes() -> None:
    """Two steps make them for four runs, and one of these takes the host as long again."""
    assert graphs_pay(1.0, 0.5, steps=2) and not graphs_pay(1.0, 0.5, steps=1)
    assert graphs_pay(1.0, 0.98, steps=20) and not graphs_pay(1.0, 0.99, steps=20)
    assert [graphs_gain_s(1.0, 0.25, steps=steps) for steps in (1, 4)] == [0.125, 2.375]


def test_the_best_plan_without_graphs_is_tried_beside_those_that_are_predicted_best_by_them() -> None:
    """Where graphs turn out to be of no use, it is the one to keep."""
    rows = table(ulysses=10.0, ring=10.5, cfg=10.6, single=15.0)
    rows = [row if row.plan == SINGLE else replace(row, without_graphs=replace(row.cost, step_s=20.0)) for row in rows]
    tried = worth_trying(rows, ULYSSES, steps=100, asynchronous=False, idle=True)
    assert tried == (ULYSSES, RING, CFG, SINGLE)
    rows = [replace(row, without_graphs=None) for row in rows]
    assert worth_trying(rows, ULYSSES, steps=100, asynchronous=False, idle=True) == (ULYSSES, RING, CFG)


def test_graphs_that_were_of_no_use_when_tried_again_are_not_kept_and_those_without_time_are() -> None:
    before = KeptPlan(plan=ULYSSES, seconds={ULYSSES: 1.0, RING: 0.9}, graphs_s={ULYSSES: 0.5}, expected_s=0.5)
    for graphs_s, kept, again_s in (({}, ULYSSES, {ULYSSES: 0.5}), ({ULYSSES: math.inf}, RING, {})):
        tries = run(Tries(before.plans, idle=True, graphs_s=dict(before.graphs_s)), {ULYSSES: 1.0, RING: 0.8})
        tries.graphs_s |= graphs_s
        found = kept_of(tries, before)
        assert found is not None and (found.plan, found.graphs_s) == (kept, again_s)


def test_a_kept_plan_changes_between_runs_by_more_than_ten_percent_alone() -> None:
    kept = KeptPlan(plan=ULYSSES, seconds={ULYSSES: 1.0, RING: 1.08}, expected_s=1.0)
    assert not kept.after_run(1.09).again and kept.after_run(0.9).expected_s == 0.9
    assert not replace(kept, seconds={ULYSSES: 1.0, RING: 0.5}).after_run(CHANGE).again
    assert not replace(kept, seconds={ULYSSES: 0.5, RING: 1.0}, expected_s=0.5).after_run(CHANGE).again
    assert changed_text(kept, kept) == ""
    slower = kept.after_run(1.2)  # 1.11 times what ring took in its try
    assert slower.again and slower.plan == ULYSSES  # tried again first: what else runs may have slowed both
    assert not replace(kept, seconds={ULYSSES: 1.0, RING: 1.5}).after_run(1.2).again
    for ring_s, plan in ((1.2 / CHANGE + 0.02, ULYSSES), (1.2 / CHANGE - 0.02, RING)):
        found = kept_of(run(Tries(slower.plans), {ULYSSES: 1.2, RING: ring_s}), slower)
        assert found is not None and found.plan == plan and not found.again
        assert bool(changed_text(slower, found)) == (plan == RING)
    assert "changed from ulysses 2 to ring 2, measured again: 1.12x as fast" == changed_text(slower, found)
    assert run(Tries(slower.plans), {ULYSSES: CHANGE, RING: 1.0}).best(ULYSSES) == ULYSSES


def test_runs_that_are_always_slower_than_tries_are_not_tried_again_and_again() -> None:
    kept = KeptPlan(plan=ULYSSES, seconds={ULYSSES: 1.0, RING: 1.05}, expected_s=1.0).after_run(1.3)
    before = replace(kept, graphs_s={ULYSSES: 0.9})
    tries = Tries(kept.plans, graphs_s=dict(before.graphs_s))
    again = kept_of(run(tries, {ULYSSES: 1.0, RING: 1.05}), before)
    assert again is not None and not again.after_run(1.35).again and again.after_run(1.5).again
    assert again.by_graphs, "what was found of graphs of blocks stays with the plan"


def test_what_is_kept_is_found_again_and_only_for_the_very_same_kind(tmp_path: Path) -> None:
    store = KeptPlans(tmp_path / "folder" / "plans.json")
    kept = KeptPlan(plan=RING, seconds={RING: 0.4, ULYSSES: 0.5}, failed={CFG: "out of memory"}, expected_s=0.4)
    assert store.load(KEY) is None
    store.save(KEY, kept)
    assert store.load(KEY) == kept and json.loads(store.path.read_text())["version"] == 1
    for each in fields(TriesKey):
        value = getattr(KEY, each.name)
        other = replace(KEY, **{each.name: (*value, value[0]) if isinstance(value, tuple) else value + "x"})
        assert store.load(other) is None, each.name
    assert [path.name for path in store.path.parent.iterdir()] == ["plans.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"plan": "ulysses=2"},  # of which there are no seconds
        {"plan": "ulysses=99"},
        {"plan": None},
        {"seconds": {"ring=2": 0.0}},
        {"seconds": {"ring=2": "0.4"}},
        {"seconds": {"ring=two": 0.4}},
        {"seconds": []},
        {"failed": {"cfg=2": 3}},
        {"again": 1},
        {"expected_s": True},
        {"graphs_s": {"ring=2": 0.0}},
        {"graphs_s": {"ring=two": 0.4}},
        {"key": {}},
    ],
)
def test_an_entry_with_anything_wrong_in_it_is_not_believed(change: dict, tmp_path: Path) -> None:
    store = KeptPlans(tmp_path / "plans.json")
    store.save(KEY, KeptPlan(plan=RING, seconds={RING: 0.4}, expected_s=0.4))
    content = json.loads(store.path.read_text())
    content["plans"][KEY.digest] |= change
    store.path.write_text(json.dumps(content))
    assert store.load(KEY) is None


def test_the_oldest_entries_go_and_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog) -> None:
    store = KeptPlans(tmp_path / "plans.json")
    kept = KeptPlan(plan=RING, seconds={RING: 0.4}, expected_s=0.4)
    store.save(KEY, kept)
    content = json.loads(store.path.read_text())
    content["plans"] |= {str(number): {} for number in range(KEPT - 1)}
    store.path.write_text(json.dumps(content))
    store.save(replace(KEY, torch="2.14"), kept)
    assert store.load(KEY) is None and len(json.loads(store.path.read_text())["plans"]) == KEPT
    (tmp_path / "file").write_text("")
    assert store.save(KEY, kept) and not KeptPlans(tmp_path / "file" / "plans.json").save(KEY, kept)
    assert "XDG_CACHE_HOME" in caplog.text
