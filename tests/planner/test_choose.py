"""The choice: the fastest plan that fits and runs, one device where more do not help, and reasons in words."""

from dataclasses import asdict, replace

import pytest

from parallel_runtime.exchange_formats import EXACT
from parallel_runtime.parallel.batch_groups import cut_rows
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import (
    HEADROOM,
    Choice,
    Prediction,
    _nothing_fits,
    _of_machines,
    _reasons,
    best_of,
    choose_plan,
    useful_plans,
)
from parallel_runtime.planner.cost import Cost
from parallel_runtime.planner.counted import CountedModel
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.hardware import GIB, Calibration
from parallel_runtime.planner.known import known_calibration, known_link
from parallel_runtime.planner.memory import PlannedMemory, left_to_others
from parallel_runtime.planner.work import Work, image_tokens

FLUX = usual_counted().model
FP8 = usual_counted().with_weights(FLUX.weight_bytes // 2).model
LARGE = Work(image_tokens=image_tokens(2048, 2048), text_tokens=512)


def test_what_cards_have_room_for_stays_whole_and_the_rest_alone_is_gathered() -> None:
    """Flux.1 in bf16 misses 24 GiB by little: nearly all of its blocks stay, so four cards are worth it."""
    cards = known_calibration("RTX 4090", devices=4)
    choice = choose_plan(FLUX, Work(image_tokens=4096, text_tokens=512, steps=20), [24 * GIB] * 4, cards)
    chosen = choice.chosen
    assert chosen.plan == ParallelPlan(ulysses=4, weights="sharded") and 0.7 < chosen.staying < 1
    assert chosen.cost.step_s < 0.6 * chosen.cost.warmup_step_s, "the first step gathers all"
    more = chosen.staying * sum(FLUX.block_bytes) * 3 / 4
    assert chosen.memory.total + more == pytest.approx(24 * GIB - left_to_others(24 * GIB))
    assert f"{chosen.staying:.0%} of the blocks stay whole on each device after a run's first step" in choice.reasons
    full = [round(chosen.memory.total / (HEADROOM - 0.001))] * 4
    small = choose_plan(FLUX, Work(image_tokens=4096, text_tokens=512), full, cards, weights=("sharded",))
    assert not small.chosen.staying and not any("stay whole" in reason for reason in small.reasons)
    off = choose_plan(FLUX, LARGE, [24 * GIB] * 4, cards, weights=("sharded",), blocks_stay=False)
    assert not any(row.staying for row in off.table)
    alone = next(row for row in choice.table if row.plan == ParallelPlan(weights="offloaded"))
    assert choice.speedup == alone.run_s / chosen.run_s < 4, "one card is told as it would be run"
    none = replace(FLUX, block_bytes=())
    assert choose_plan(none, LARGE, [80 * GIB], known_calibration("H100")).plan == ParallelPlan(), "nothing to spread"
    for gib, plan in ((80, "ulysses=4"), (24, "pipefusion=4")):
        (row,) = (
            each
            for each in choose_plan(FLUX, LARGE, [gib * GIB] * 4, cards, stale=True).table
            if each.plan == ParallelPlan.parse(plan)
        )
        assert row.staying == 0, "whole weights, and stages, gather nothing"


def test_weights_that_a_decode_would_drive_out_are_weighed_with_their_load() -> None:
    """Flux.1 in fp8 on cards of 16 GiB: whole it leaves 3 GiB, and ComfyUI unloads it before each decode."""
    work, cards = Work(image_tokens=4096, text_tokens=512, steps=20), known_calibration("RTX 4080", devices=2)
    for gib, decodes, weights in ((16, True, "sharded"), (16, False, "replicated"), (24, True, "replicated")):
        choice = choose_plan(FP8, work, [gib * GIB] * 2, cards, decoder=0 if decodes else None, host_bytes=0)
        assert choice.plan == ParallelPlan(ulysses=2, weights=weights), (gib, decodes)
        whole = next(row for row in choice.table if row.plan == ParallelPlan(ulysses=2))
        assert whole.fits and (whole.reload_s > 3) == (decodes and gib == 16)
        said = "replicated weights would be loaded before each run, as they leave no room to decode: "
        assert any(reason.startswith(said) for reason in choice.reasons) == (weights == "sharded")
        assert choose_plan(FP8, work, [gib * GIB] * 2, cards).plan.weights == "replicated"
    for decoder, weights in ((0, "replicated"), (1, "sharded")):
        choice = choose_plan(FP8, work, [24 * GIB, 16 * GIB], cards, decoder=decoder, host_bytes=0)
        assert choice.plan == ParallelPlan(ulysses=2, weights=weights), "the card that decodes alone is asked for room"
    alone = choose_plan(FP8, work, [24 * GIB, 16 * GIB], cards, decoder=1).table
    assert next(row for row in alone if row.plan.ranks == 1).reload_s == 0, "nothing lies on the card that decodes"


def test_weights_that_leave_the_prompts_other_models_no_room_are_weighed_with_their_load() -> None:
    """Flux.1 in fp8 twice, as Wan 2.2's two models: of 32 GiB two whole ones leave no room, two halves do."""
    work, cards = Work(image_tokens=4096, text_tokens=512, steps=4, frames=81), known_calibration("RTX 5090", devices=2)
    whole, sharded = "replicated", "sharded"
    for gib, beside, weights in ((32, 0, whole), (32, 1, sharded), (32, 0.2, whole), (48, 1, whole)):
        choice = choose_plan(FP8, work, [gib * GIB] * 2, cards, decoder=0, host_bytes=0, beside=beside)
        assert choice.plan == ParallelPlan(ulysses=2, weights=weights), (gib, beside)
        row = next(row for row in choice.table if row.plan == ParallelPlan(ulysses=2))
        assert (row.reload_s > 3) == (weights == sharded)
        said = "as they leave no room for the prompt's other models and a decode: "
        assert any(said in reason for reason in choice.reasons) == (weights == sharded)
    alone = choose_plan(FP8, work, [24 * GIB] * 2, cards, beside=1).table
    crowded = next(row for row in alone if row.plan == ParallelPlan(ulysses=2))
    assert crowded.fits and crowded.reload_s > 3, "no decode has to want the room"
    spread = [
        next(
            row
            for row in choose_plan(FP8, work, [gib * GIB] * 2, cards, beside=beside).table
            if row.plan == ParallelPlan(ulysses=2, weights="sharded")
        )
        for gib, beside in ((16, 0), (16, 1))
    ]
    assert spread[0].staying > spread[1].staying > 0 and not any(row.reload_s for row in spread)
    offered = [
        choose_plan(FP8, work, [12 * GIB], cards, beside=beside).chosen.host_bytes / FP8.weight_bytes
        for beside in (0, 1)
    ]
    assert offered[1] == pytest.approx(2 * offered[0]) and 0.9 < offered[0] < 1.1, "both lie in host memory"
    for beside, whose in (
        (0, "its weights take 11"),
        (1, "its weights and those of the prompt's other models take 22"),
    ):
        full = choose_plan(FP8, work, [12 * GIB], cards, beside=beside, host_bytes=8 * GIB)
        assert any(each.startswith(whose) for each in full.reasons), full.reasons


def test_a_video_is_given_room_for_its_own_decode() -> None:
    """Whole weights of 11 GiB leave an image's decode its room on 24 GiB, and a video's not."""
    cards = known_calibration("RTX 4090", devices=2)
    for frames, gib, reloads in ((1, 24, False), (81, 24, True), (81, 32, False)):
        work = Work(image_tokens=4096, text_tokens=512, frames=frames)
        table = choose_plan(FP8, work, [gib * GIB] * 2, cards, decoder=0, host_bytes=0).table
        whole = next(row for row in table if row.plan == ParallelPlan(ulysses=2))
        assert (whole.reload_s > 0) == reloads, (frames, gib)


def test_weights_go_to_host_memory_for_speed_only_where_that_has_room() -> None:
    work, cards = Work(image_tokens=4096, text_tokens=512, steps=20), known_calibration("RTX 4080", devices=2)
    blocks = sum(FLUX.block_bytes)
    for host_bytes, weights in ((blocks + 10, "offloaded"), (blocks - 10, "sharded")):
        choice = choose_plan(FLUX, work, [16 * GIB] * 2, cards, decoder=0, host_bytes=host_bytes)
        assert choice.plan.weights == weights
        quicker = next(row for row in choice.table if row.plan.weights == "offloaded")
        gain = choice.chosen.prompt_s / quicker.prompt_s
        told = (
            f"{quicker.plan.name} would be {gain:.2f}x as fast, but its weights take {quicker.host_bytes / GIB:.1f} GiB"
        )
        told = f"{told} of host memory, of which auto gives {host_bytes / GIB:.1f} GiB"
        assert (told in choice.reasons) == (weights == "sharded")
        assert quicker.host_bytes == pytest.approx(blocks, abs=2) and any(
            "of host" in why for why in choice.reasons
        ) == (weights == "sharded")
    alone = choose_plan(FLUX, work, [16 * GIB], cards, decoder=0, host_bytes=0)
    assert alone.plan == ParallelPlan(weights="offloaded"), "nothing else fits"
    takes = f"{alone.chosen.host_bytes / GIB:.1f} GiB of host memory"
    assert f"its weights take {takes}, where auto gives 0.0 GiB, as no others fit" in alone.reasons
    for enough in (alone.chosen.host_bytes, blocks + 10):
        fitting = choose_plan(FLUX, work, [16 * GIB], cards, decoder=0, host_bytes=enough)
        assert not any("of host memory" in why for why in fitting.reasons), enough


def test_the_load_before_each_run_is_told_and_counted_in_what_a_plan_gains() -> None:
    """Whole weights of 11 GiB, taken because the user wants them, on a card that decodes as well."""
    work, cards = Work(image_tokens=4096, text_tokens=512), known_calibration("RTX 4080", devices=2)
    choice = choose_plan(FP8, work, [16 * GIB] * 2, cards, decoder=0, weights=("replicated",))
    chosen, single = choice.chosen, next(row for row in choice.table if row.plan == ParallelPlan())
    assert chosen.plan == ParallelPlan(ulysses=2) and chosen.reload_s > 3
    said = f"which takes {chosen.reload_s:.2f} s, as they leave no room to decode"
    assert f"its weights are loaded before each run, {said}" in choice.reasons
    assert choice.speedup == (single.run_s + single.reload_s) / (chosen.run_s + chosen.reload_s)
    assert choice.reasons[1].startswith(f"{choice.speedup:.2f}x as fast as one device (")
    without = choose_plan(FP8, work, [16 * GIB] * 2, cards, weights=("replicated",))
    assert not any("before each run" in why for why in without.reasons)


def slow_host(devices: int) -> Calibration:
    """H100s whose host takes 26.7 us to start an operation, as was measured of one."""
    found = known_calibration("H100", devices=devices)
    return replace(found, software=replace(found.software, operation_s=26.7e-6))


def test_where_the_host_is_slow_graphs_of_blocks_make_more_devices_worth_it() -> None:
    usual = Work(image_tokens=4096, text_tokens=512)
    for count in (2, 4, 8):
        free, calibration = [80 * GIB] * count, slow_host(count)
        assert choose_plan(FLUX, usual, free, calibration).plan == ParallelPlan()
        choice = choose_plan(FLUX, replace(usual, graphs=True), free, calibration)
        chosen = choice.chosen
        assert chosen.plan == ParallelPlan(ulysses=count) and choice.speedup > 0.5 * count
        assert chosen.cost.compute_s == chosen.plain.compute_s and chosen.cost.launch_s < chosen.plain.launch_s / 5
        by_step_s = chosen.plain.step_s - chosen.cost.step_s  # two of 80 steps make them
        gained_s = 19.5 * by_step_s - chosen.plain.step_s / 4
        assert chosen.run_s == pytest.approx(chosen.plain.image_s(usual.steps) - gained_s)
        assert choice.reasons[1].startswith(
            f"with a CUDA graph of each block, {1e3 * chosen.plain.step_s:.1f} ms without:"
        )
        single = next(row for row in choice.table if row.plan == ParallelPlan())
        assert single.without_graphs is None, "a pool of one rank tries none"
        small = Work(image_tokens=1024, text_tokens=512, graphs=True)
        held = choose_plan(FLUX, small, free, calibration, held=chosen.plan.layout)
        assert next(row for row in held.table if row.plan == ParallelPlan()).without_graphs is not None


def test_graphs_of_blocks_are_predicted_only_where_a_run_can_have_them() -> None:
    usual = Work(image_tokens=4096, text_tokens=512, graphs=True)

    def graphed(model: CountedModel, calibration: Calibration, work: Work = usual, gib: float = 80) -> set[str]:
        table = choose_plan(model, work, [round(gib * GIB)] * 4, calibration, stale=True).table
        return {row.plan.describe() for row in table if row.without_graphs is not None}

    found = graphed(FLUX, slow_host(4))
    assert found == {f"ulysses={count}" for count in (2, 3, 4)}, "neither rings, stages nor weights in parts"
    assert graphed(replace(FLUX, kept_bytes={"default": (1.0,)}), slow_host(4)) == set()
    assert graphed(FLUX, known_calibration("L40", devices=4)) == set(), "a device that waits for no host"
    assert graphed(FLUX, slow_host(4), replace(usual, steps=1)) < found, "to make them for four steps takes more"
    assert graphed(FLUX, slow_host(4), replace(usual, image_tokens=10**6)) == set(), "more than 2 GiB of graphs"
    least = next(row for row in choose_plan(FLUX, usual, [80 * GIB] * 4, slow_host(4)).table if row.without_graphs)
    needs = (least.memory.total + least.memory.graphs + 12 * GIB) / HEADROOM / GIB
    assert least.plan.describe() in graphed(FLUX, slow_host(4), gib=1.0001 * needs)
    assert least.plan.describe() not in graphed(FLUX, slow_host(4), gib=0.9999 * needs)
    on_cpu = slow_host(4)
    on_cpu = replace(on_cpu, rates=replace(on_cpu.rates, asynchronous=False))
    assert graphed(FLUX, on_cpu) == set()


def test_a_bridge_that_all_share_makes_ring_the_better_plan() -> None:
    """As published for L40: an all-to-all among eight on PCIe is slower than one device, a ring is not."""
    calibration = known_calibration("L40")
    crowded = replace(calibration, link=replace(calibration.link, contention=2.4))
    choice = choose_plan(FLUX, LARGE, [48 * GIB] * 8, crowded)
    assert choice.plan.ring > choice.plan.ulysses
    assert choose_plan(FLUX, LARGE, [80 * GIB] * 8, known_calibration("H100")).plan.ring == 1


def test_a_plan_fits_in_what_it_needs_and_in_no_byte_less() -> None:
    """Of a GPU, where weights are pages of no file."""
    total = choose_plan(FLUX, LARGE, [80 * GIB], known_calibration("H100")).chosen.memory.total
    free = int((total - 0.02) / HEADROOM)
    assert total - 1 <= HEADROOM * free < total
    for bytes_free, fits in ((free, False), (free + 2, True)):
        table = choose_plan(FLUX, LARGE, [bytes_free], known_calibration("H100")).table
        assert next(row for row in table if row.plan == ParallelPlan()).fits is fits


def test_the_device_with_the_least_free_memory_decides() -> None:
    calibration = known_calibration("A100")
    shown = choose_plan(FLUX, LARGE, [80 * GIB, 10 * GIB], calibration)
    assert shown.plan.ranks == 1 or shown.chosen.plan.weights != "replicated"
    for row in shown.table:
        assert row.fits == (row.memory.total <= HEADROOM * min([80 * GIB, 10 * GIB][: row.plan.ranks]))


def test_useful_plans_share_out_the_rows_the_blocks_and_tokens_that_can_be() -> None:
    model = replace(FLUX, staged_blocks=3)
    work = Work(image_tokens=64, text_tokens=8, guided=True, batch=4)
    for ranks in range(1, 9):
        found = list(useful_plans(ranks, model=model, work=work, stale=True))
        assert found and len(set(found)) == len(found)
        for plan in found:
            assert plan.ranks == ranks
            assert plan.cfg in (1, 2) and plan.pipefusion <= 3
            assert plan.data <= 4
    unguided = replace(work, guided=False)
    assert not any(plan.cfg > 1 for plan in useful_plans(2, model=model, work=unguided, stale=True))
    copied = [plan for plan in useful_plans(8, model=model, work=work, stale=True) if plan.data > 1]
    assert {plan.weights for plan in copied} == {"replicated", "sharded"}, "replicas lie in the same host memory"
    apart = replace(model, key_heads=0)  # of which no rank can have a part of the tokens
    assert {plan.parts for plan in useful_plans(8, model=apart, work=work, stale=True)} == {1}


@pytest.mark.parametrize(
    ("ranks", "guided", "batch", "plan", "alone", "rows"),
    [
        (2, False, 3, "data=2", "ulysses=1", (2, 3)),  # 2 + 1 rows in place of 3
        (4, True, 5, "data=2,cfg=2", "cfg=2", (3, 5)),
    ],
)
def test_a_batch_that_devices_do_not_divide_is_shared_out_and_priced_by_its_largest_part(
    ranks: int, guided: bool, batch: int, plan: str, alone: str, rows: tuple[int, int]
) -> None:
    """Of a model whose images nobody can share."""
    model, work = replace(FLUX, key_heads=0), Work(image_tokens=4096, text_tokens=512, guided=guided, batch=batch)
    choice = choose_plan(model, work, [48 * GIB] * ranks, known_calibration("L40", devices=ranks))
    assert choice.plan == ParallelPlan.parse(plan)
    assert max(sum(each.stop - each.start for each in cut) for cut in cut_rows([batch], 2)) == rows[0]
    (before,) = (row for row in choice.table if row.plan == ParallelPlan.parse(alone))
    assert choice.chosen.cost.step_s == pytest.approx(rows[0] / rows[1] * before.cost.step_s, rel=0.01)
    one = choose_plan(model, replace(work, batch=1), [48 * GIB] * ranks, known_calibration("L40", devices=ranks))
    assert all(row.plan.data == 1 for row in one.table), "no replica is without an image"


def row(
    text: str, step_s: float, *, gib: float = 1.0, fits: bool = True, shown_s: float = 0.0, **parts: float
) -> Prediction:
    """A prediction of a plan, of ten steps; half of a step is computing unless `parts` say otherwise."""
    seconds = {"compute_s": step_s / 2, "communication_s": step_s / 4, "launch_s": step_s / 4} | parts
    cost = Cost(step_s=step_s, warmup_step_s=step_s, **seconds)
    memory = PlannedMemory(weights=round(gib * GIB), activations=0, buffers=0, runtime=0)
    run = {"run_s": 10 * step_s, "fits": fits, "shown_s": shown_s}
    return Prediction(plan=ParallelPlan.parse(text), cost=cost, memory=memory, **run)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ((("ulysses=2", 1.0), ("ulysses=1", 1.05)), "ulysses=1"),  # more must be 1.05 times as fast
        ((("ulysses=2", 1.0), ("ulysses=1", 1.06)), "ulysses=2"),
        ((("ring=2", 1.0), ("ulysses=2", 1.02)), "ulysses=2"),  # among equals no ring
        ((("ring=2", 1.0), ("ulysses=2", 1.03)), "ring=2"),
        ((("ulysses=4", 1.0), ("ring=2", 1.01)), "ring=2"),  # fewer ranks
        ((("ulysses=2,weights=sharded", 1.0), ("ring=2", 1.01)), "ring=2"),  # whole weights
        ((("cfg=2", 1.0), ("ulysses=2", 1.01)), "cfg=2"),
    ],
)
def test_among_equals_the_simpler_plan_is_taken(rows: tuple, best: str) -> None:
    assert best_of([row(*each) for each in rows]).plan == ParallelPlan.parse(best)


@pytest.mark.parametrize(
    ("heads", "ring", "shown_s", "best"),
    [
        ("ulysses=2", ("ring=2", 1.04), 0.041, "ring=2"),
        ("ulysses=2", ("ring=2", 1.05), 0.2, "ulysses=2"),
        ("ulysses=2", ("ring=2", 1.0), 0.03, "ulysses=2"),  # a ring has little to hide
        ("cfg=2,ulysses=2", ("cfg=2,ring=2", 1.03), 0.1, "cfg=2,ring=2"),
        ("ulysses=2,weights=sharded", ("ring=2,weights=sharded", 1.03), 0.1, "ring=2,weights=sharded"),
        ("ulysses=2,weights=sharded", ("ring=2,weights=offloaded", 1.03), 0.1, "ulysses=2,weights=sharded"),
        ("ulysses=4", ("ring=2,ulysses=2", 1.03), 0.1, "ulysses=4"),  # of two alone figures are known
        ("ulysses=2,ring=2", ("ring=4", 1.03), 0.1, "ulysses=2,ring=2"),
    ],
)
def test_where_two_ranks_wait_for_heads_sent_at_once_a_ring_of_two_may_be_a_little_slower(
    heads: str, ring: tuple[str, float], shown_s: float, best: str
) -> None:
    rows = sorted([row(heads, 1.0, shown_s=shown_s), row(*ring)], key=lambda each: each.prompt_s)
    assert best_of(rows).plan == ParallelPlan.parse(best)


@pytest.mark.parametrize(
    ("quickest_s", "alone_s", "best"), [(1.0, 1.09, "ring=2"), (1.0, 1.08, "ulysses=2"), (0.985, 2.0, "ulysses=2")]
)
def test_a_ring_of_two_must_be_worth_two_devices_and_near_the_quickest(
    quickest_s: float, alone_s: float, best: str
) -> None:
    rows = [
        row("ulysses=4", quickest_s),
        row("ulysses=2", 1.0, shown_s=0.1),
        row("ring=2", 1.03),
        row("ulysses=1", alone_s),
    ]
    assert best_of(rows).plan == ParallelPlan.parse(best)


def test_only_heads_over_pcie_that_cannot_go_in_chunks_are_waited_for_so() -> None:
    """Not those of so little attention that none pay, of which no figure is known."""
    l40 = known_calibration("L40", devices=2)
    at_once = replace(l40, rates=replace(l40.rates, most_chunks=1))
    quicker = replace(at_once, link=replace(l40.link, bandwidth=50e9))
    on_cpu = replace(at_once, rates=replace(at_once.rates, asynchronous=False))
    few, large, small = replace(FLUX, key_heads=2), image_tokens(1024, 1024), image_tokens(256, 256)
    shown = {
        (known is l40, model is few, tokens): choose_plan(
            model, Work(image_tokens=tokens, text_tokens=512), [48 * GIB] * 2, known
        )
        for known, model, tokens in ((l40, FLUX, large), (l40, FLUX, small), (l40, few, large), (at_once, FLUX, large))
    }
    heads = [next(each for each in found.table if each.plan.name == "uly2") for found in shown.values()]
    assert [each.shown_s > 0.0 for each in heads] == [False, False, True, True]
    assert all(each.shown_s <= each.cost.communication_s for each in heads)
    told = [" ".join(found.reasons) for found in shown.values()]
    assert ["uly2 is predicted as quick or quicker, but its heads" in each for each in told] == [
        False,
        False,
        True,
        True,
    ]
    for known in (quicker, on_cpu):
        rows = choose_plan(FLUX, Work(image_tokens=large, text_tokens=512), [48 * GIB] * 2, known).table
        assert {each.shown_s for each in rows} == {0.0}
    staged = choose_plan(FLUX, Work(image_tokens=large, text_tokens=512), [48 * GIB] * 4, at_once, stale=True).table
    assert {each.shown_s for each in staged if each.plan.pipefusion > 1} == {0.0}


def test_reasons_say_what_limits_a_plan_what_it_gains_and_what_stays_unused() -> None:
    one, two = row("ulysses=1", 2.0), row("ulysses=2", 2.5, communication_s=2.0)
    known = known_calibration("L40")
    assert _reasons(one, (one, two), [GIB] * 2, known) == (
        "single: 2.00 s a step, limited by compute (50% of the step)",
        "one device is better here: the best plan on more, uly2, would be 0.80x as fast, limited by communication",
    )
    assert len(_reasons(one, (one,), [GIB], known)) == 1
    second = row("ulysses=1", 1.0)
    assert _reasons(second, (second,), [GIB], known)[0].startswith("single: 1.00 s a step")
    quick, small = row("ulysses=2", 0.5), row("ulysses=2,weights=sharded", 1.0, gib=0.5)
    assert _reasons(quick, (quick, one), [GIB] * 3, known)[1:] == (
        "4.00x as fast as one device (2.00 s a step)",
        "1 of 3 devices stay unused: with them it would not be faster",
    )
    for seconds, fits, why in (
        *((0.4, True, "with them it would not be faster"), (0.5, False, "with them it would not be faster")),
        (
            0.4,
            False,
            "uly3 would be faster and does not fit, 3.0 GiB a rank, 1.0 GiB on each device, of which 95% can be used",
        ),
    ):
        three = row("ulysses=3", seconds, gib=3.0, fits=fits)
        said = _reasons(quick, (three, quick, one), [2 * GIB, 2 * GIB, GIB, GIB // 2], known)
        assert said[2] == f"2 of 4 devices stay unused: {why}"
    large = row("ulysses=1", 2.0, gib=3.0, fits=False)
    assert _reasons(small, (small, large), [2 * GIB, GIB], known)[1:] == (
        "one device cannot hold it",
        "does not fit with replicated weights: 3.0 GiB a rank, 1.0 GiB on each device, of which 95% can be used; "
        "sharded weights take 0.5 GiB a rank",
    )
    alone = row("ulysses=1,weights=offloaded", 0.5, gib=0.5)
    assert _reasons(alone, (alone, large), [2 * GIB, GIB], known)[1:] == (
        "does not fit with replicated weights: 3.0 GiB a rank, 2.0 GiB on each device, of which 95% can be used; "
        "offloaded weights take 0.5 GiB a rank",
    ), "the second device, which is smaller, is not used"
    choice = Choice(chosen=quick, reasons=(), table=(quick, one))
    assert (choice.speedup, choice.plan, choice.seconds_per_step) == (4.0, quick.plan, 0.5)
    assert replace(choice, chosen=one).speedup is None and replace(choice, table=(quick, large)).speedup is None


def test_whether_a_further_machine_pays_is_said_where_there_is_one() -> None:
    here, both, wide = row("ulysses=2", 0.5), row("data=2,ulysses=2", 0.4), row("cfg=2,ulysses=2", 0.3, fits=False)
    known = replace(known_calibration("L40"), between=replace(known_link("ethernet1"), bandwidth=1e9), machines=(2, 4))
    said = ": {} a step with data2-ring1-uly2 over ethernet1, 8 Gbit/s, {} with uly2 on this machine alone"
    assert _of_machines(both, (wide, both, here), known) == [
        "a further machine pays" + said.format("400.0 ms", "500.0 ms")
    ]
    assert _of_machines(here, (wide, both, here), known) == [
        "a further machine does not pay" + said.format("400.0 ms", "500.0 ms")
    ]
    assert _of_machines(here, (wide, here), known) == []
    assert _of_machines(here, (both, here), replace(known, machines=(2,))) == []
    assert _of_machines(here, (both, here), replace(known, between=None)) == []


def test_what_fits_nowhere_names_the_plan_that_needs_least() -> None:
    assert _nothing_fits(FLUX, (), [GIB] * 3) == (
        "no plan on 3 devices fits the model's heads; use another number of devices",
    )
    large, least = row("ulysses=1", 1.0, gib=3.0), row("ulysses=2,weights=sharded", 1.0, gib=2.0)
    remedy = "free memory, use a smaller image or an fp8 file, or more devices"
    said = "does not fit: {} needs the least, {} GiB a rank, 0.5 GiB on each device; {}"
    assert _nothing_fits(FLUX, (large,), [GIB, GIB // 2]) == (
        said.format("single", "3.0", f"use sharded weights, {remedy}"),
    )
    assert _nothing_fits(FLUX, (large, least), [GIB // 2]) == (said.format("uly2-sharded", "2.0", remedy),)
    remedy = "free memory, use a smaller image, or more devices"
    assert _nothing_fits(FP8, (least,), [GIB // 2]) == (said.format("uly2-sharded", "2.0", remedy),), "it is one"


def test_what_cannot_be_chosen_for_is_refused() -> None:
    with pytest.raises(ValueError, match="'string' is unknown; use one of nvlink5"):
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
        **{"step_cache": False, "graphs": False, "kept_on": "auto", "kept_as": "default"},
        **{"reference_tokens": 0, "exchange": EXACT, "frames": 1},
    }
    assert (work.tokens, work.rows, replace(work, guided=True, batch=3).rows) == (5, 1, 6)
    assert Work(image_tokens=1, text_tokens=0, element_bytes=1).tokens == 1
    assert [image_tokens(*size) for size in ((1024, 1024), (24, 40), (23, 8))] == [4096, 6, 1]
