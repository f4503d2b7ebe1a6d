"""The choice: the fastest plan that fits and runs, one device where more do not help, and reasons in words."""

from dataclasses import asdict, replace

import pytest

from parallel_runtime.exchange_formats import EXACT
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import EQUAL, HEADROOM, choose_plan, useful_plans
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.hardware import GIB
from parallel_runtime.planner.known import known_calibration, known_link
from parallel_runtime.planner.work import Work, image_tokens

FLUX = usual_counted().model
LARGE = Work(image_tokens=image_tokens(2048, 2048), text_tokens=512)


def test_a_large_image_on_nvlink_is_shared_by_all_devices() -> None:
    choice = choose_plan(FLUX, LARGE, [80 * GIB] * 8, known_calibration("H100"))
    assert choice.plan == ParallelPlan(ulysses=8)
    assert choice.seconds_per_step == choice.chosen.cost.step_s
    single = next(row for row in choice.table if row.plan == ParallelPlan())
    assert single.run_s / choice.chosen.run_s > 4
    assert choice.reasons[1].startswith(f"{single.run_s / choice.chosen.run_s:.2f}x as fast as one device (")


def test_a_bridge_that_all_share_makes_ring_the_better_plan() -> None:
    """As published for L40: an all-to-all among eight on PCIe is slower than one device, a ring is not."""
    calibration = known_calibration("L40")
    crowded = replace(calibration, link=replace(calibration.link, contention=2.4))
    choice = choose_plan(FLUX, LARGE, [48 * GIB] * 8, crowded)
    assert choice.plan.ring > choice.plan.ulysses
    assert choose_plan(FLUX, LARGE, [80 * GIB] * 8, known_calibration("H100")).plan.ring == 1


def test_fewer_devices_are_taken_when_the_rest_would_not_make_it_faster() -> None:
    choice = choose_plan(FLUX, Work(image_tokens=3072, text_tokens=512), [80 * GIB] * 8, known_calibration("H100"))
    assert 1 < choice.plan.ranks < 8 and choice.chosen.run_s <= EQUAL * choice.table[0].run_s
    assert any(reason.startswith(f"{8 - choice.plan.ranks} of 8 devices stay unused") for reason in choice.reasons)


def test_nothing_fits_is_said_with_what_is_needed_and_what_is_free() -> None:
    choice = choose_plan(FLUX, LARGE, [GIB // 2], known_calibration("RTX 4090"))
    assert (choice.plan, choice.chosen, choice.seconds_per_step) == (None, None, None)
    (reason,) = choice.reasons
    assert "GiB a rank, 0.5 GiB on each device" in reason


def test_the_device_with_the_least_free_memory_decides() -> None:
    calibration = known_calibration("A100")
    shown = choose_plan(FLUX, LARGE, [80 * GIB, 10 * GIB], calibration)
    assert shown.plan.ranks == 1 or shown.chosen.plan.weights != "replicated"
    for row in shown.table:
        assert row.fits == (row.memory.total <= HEADROOM * min([80 * GIB, 10 * GIB][: row.plan.ranks]))


def test_pipefusion_is_weighed_only_where_it_is_asked_for() -> None:
    work = replace(LARGE, guided=True, batch=2)
    usual = choose_plan(FLUX, work, [80 * GIB] * 4, known_calibration("A100"))
    assert usual.table and all(row.plan.pipefusion == 1 for row in usual.table)
    stale = choose_plan(FLUX, work, [80 * GIB] * 4, known_calibration("A100"), stale=True)
    assert {row.plan for row in usual.table} < {row.plan for row in stale.table}


def test_useful_plans_share_out_the_rows_the_blocks_and_tokens_that_can_be() -> None:
    model = replace(FLUX, staged_blocks=3)
    work = Work(image_tokens=64, text_tokens=8, guided=True, batch=4)
    for ranks in range(1, 9):
        found = list(useful_plans(ranks, model=model, work=work, stale=True))
        assert found and len(set(found)) == len(found)
        for plan in found:
            assert plan.ranks == ranks
            assert plan.cfg in (1, 2) and plan.pipefusion <= 3
            assert 4 % plan.data == 0
    unguided = replace(work, guided=False)
    assert not any(plan.cfg > 1 for plan in useful_plans(2, model=model, work=unguided, stale=True))
    apart = replace(model, key_heads=0)  # of which no rank can have a part of the tokens
    assert {plan.parts for plan in useful_plans(8, model=apart, work=work, stale=True)} == {1}


def test_what_cannot_be_chosen_for_is_refused() -> None:
    with pytest.raises(ValueError, match="'string' is unknown; use one of nvlink4"):
        known_link("string")
    with pytest.raises(ValueError, match="no devices"):
        choose_plan(FLUX, LARGE, [], known_calibration("H100"))
    for name, low in {"image_tokens": 1, "text_tokens": 0, "batch": 1, "steps": 1, "element_bytes": 1}.items():
        with pytest.raises(ValueError, match=f"{name}={low - 1} is below {low}"):
            Work(**{"image_tokens": 1, "text_tokens": 0, name: low - 1})


def test_work_is_of_tokens_and_rows() -> None:
    work = Work(image_tokens=3, text_tokens=2)
    assert asdict(work) == {
        **{"image_tokens": 3, "text_tokens": 2, "guided": False, "batch": 1, "steps": 20, "element_bytes": 2},
        **{"step_cache": False, "kept_on": "auto", "kept_as": "default", "reference_tokens": 0, "exchange": EXACT},
    }
    assert (work.tokens, work.rows, replace(work, guided=True, batch=3).rows) == (5, 1, 6)
    assert Work(image_tokens=1, text_tokens=0, element_bytes=1).tokens == 1
    assert [image_tokens(*size) for size in ((1024, 1024), (24, 40), (23, 8))] == [4096, 6, 1]
