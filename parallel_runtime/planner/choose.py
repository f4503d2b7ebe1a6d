"""Chooses a plan: predicts every plan that this version runs, drops what does not fit, takes the fastest, says why.

Owns which plans are weighed and the rules of the choice. Pure and quick (milliseconds): no device is asked and nothing
is measured here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from ..plan import AXES, WEIGHTS, Layout, ParallelPlan, crossing
from .cost import Cost, shown_heads_s, step_cost
from .counted import CountedModel
from .hardware import GIB, Calibration
from .memory import PlannedMemory, memory_of, staying_part, where_kept
from .work import Work

WORTHWHILE = 1.05  # more ranks must be this much faster than one, or one is taken
ELSEWHERE_QUICKER = 1.2  # times: then of plans that differ by no more than WORTHWHILE the one better at `also` is taken
EQUAL = 1.02  # predictions this close are equal, and the simpler plan is taken
# A ring of two is predicted too slow over PCIe beside heads that cannot go in chunks, as in engines without any: their
# published runs of Flux.1 were 2.3 to 6.3 % quicker with it on L40 and L20 (benchmarks/planner.md). So much slower it
# may be predicted, where ranks wait for heads as long.
RING_OF_TWO = 1.04
HEADROOM = 0.95  # of the free memory; the allocator does not use the last of it
GRAPHS_GAIN = 1.03  # times faster: below it blocks run without CUDA graphs
GRAPHS_MADE_IN = 2  # steps
GRAPHS_SERVE = 4  # runs: another size, text or model, and what needs the memory of a card that ComfyUI uses, end them
# Of the card that ComfyUI uses too, for what follows a run: by ComfyUI's figure a VAE decodes 1536 x 1536 in 10 GiB.
GRAPHS_LEAVE = 12 * GIB
DECODE_BYTES = 6 * GIB  # of 1024 x 1024, by the same figure, with what ComfyUI leaves free
# Of a video of 81 frames of 1024 x 1024 pixels: 13.7 GiB by ComfyUI's figure for Wan 2.1's VAE, 12.0 at 1280 x 720;
# HunyuanVideo 1.5's asks 24.7 there.
VIDEO_DECODE_BYTES = 14 * GIB
RELOADED = 2e9  # bytes a second of a file that the system has in memory, to each device; estimated
GRAPHS_BYTES = 2 * GIB  # with more of them steps are so long that no device waits for its host


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One plan: its time, its memory, and whether that is there.

    `staying`: the part of the blocks that stays whole on each device after a run's first step, of spread weights.
    `reload_s`: what weights take to load before each run, where they leave a decode after it, or the prompt's other
    models, no room. `beside`: how many models of this size those are. `shown_s`: of a step, what ranks wait for heads
    over PCIe that cannot go in chunks.
    Where a CUDA graph of each block is predicted to gain, `cost` and `run_s` are with them, and `without_graphs` is
    what a step takes until they are tried; else None.
    """

    plan: ParallelPlan
    cost: Cost
    memory: PlannedMemory
    run_s: float
    fits: bool
    without_graphs: Cost | None = None
    staying: float = 0.0
    reload_s: float = 0.0
    beside: float = 0.0
    shown_s: float = 0.0

    @property
    def prompt_s(self) -> float:
        """Seconds of a run and of the load before it."""
        return self.run_s + self.reload_s

    @property
    def host_bytes(self) -> int:
        """What all ranks take of host memory, with the prompt's other models."""
        return round(self.memory.host_bytes * self.plan.ranks * (1 + self.beside))

    @property
    def plain(self) -> Cost:
        """What a step takes without graphs."""
        return self.without_graphs or self.cost


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan taken, None when nothing fits; `reasons` says what to do then. `table`: all weighed, quickest first."""

    chosen: Prediction | None
    reasons: tuple[str, ...]
    table: tuple[Prediction, ...]

    @property
    def plan(self) -> ParallelPlan | None:
        """The plan of `chosen`."""
        return self.chosen.plan if self.chosen else None

    @property
    def seconds_per_step(self) -> float | None:
        """Predicted seconds of one step, None without a plan."""
        return self.chosen.cost.step_s if self.chosen else None

    @property
    def speedup(self) -> float | None:
        """How many times as fast as one device, None where one is taken or the model does not fit on one."""
        single = _on_one_device(self.table)
        if self.chosen is None or single is None or not single.fits or self.chosen.plan.ranks == 1:
            return None
        return single.prompt_s / self.chosen.prompt_s


def choose_plan(
    model: CountedModel,
    work: Work,
    devices: Sequence[int],
    calibration: Calibration,
    *,
    stale: bool = False,
    weights: Sequence[str] = WEIGHTS,
    held: Layout | None = None,
    num_ranks: int | None = None,
    decoder: int | None = None,
    host_bytes: float = math.inf,
    blocks_stay: bool = True,
    beside: float = 0.0,
    also: Work | None = None,
) -> Choice:
    """The best plan of `model` for `work` on `devices`, given as free bytes of each, in rank order.

    `stale` also weighs PipeFusion, whose result differs from one process's. `weights`: the kinds that are weighed;
    `held`: how they lie already, if only plans that they serve are to be weighed: one rank of several may then run by
    graphs, which a pool of one never tries. `num_ranks`: of the pool, by default one a device. Of several machines only
    plans whose ulysses groups each lie in one are weighed. `decoder`: the device on which ComfyUI decodes; it
    unloads weights that leave no room for that. `host_bytes`: weights that take more of host memory are for where no
    others fit. `blocks_stay`: of spread weights, those that devices have room for. `beside`: how many models of this
    size, whose weights lie alike, a prompt samples with besides; what has no room with them is loaded again before each
    run. `also` decides between plans that hardly differ for `work`, by what their weights serve. Raises `ValueError`
    without devices.
    """
    if not devices:
        raise ValueError("no devices to plan for; give at least one")
    weighed = (
        _predict(
            model,
            work if ranks > 1 or held is not None else replace(work, graphs=False),
            plan,
            calibration,
            free=min(devices[:ranks]),
            num_ranks=num_ranks or len(devices),
            decoding_free=devices[decoder] if decoder is not None and decoder < ranks else math.inf,
            blocks_stay=blocks_stay,
            beside=beside,
        )
        for ranks in range(1, len(devices) + 1)
        for plan in useful_plans(ranks, model=model, work=work, stale=stale)
        if plan.weights in weights and (held is None or held.serves(plan.layout))
        if not crossing(plan.ulysses, plan.ranks, calibration.machines)
    )
    table = tuple(sorted(weighed, key=lambda row: (row.prompt_s, row.plan.ranks)))
    fitting = [row for row in table if row.fits]
    if not fitting:
        return Choice(chosen=None, reasons=_nothing_fits(model, table, devices), table=table)
    given = host_bytes
    if not any(row.host_bytes <= host_bytes for row in fitting):
        host_bytes = math.inf
    usable = [row for row in fitting if row.host_bytes <= host_bytes]
    chosen, why = best_of(usable), tuple[str, ...]()
    if also is not None and len(devices) > 1:
        serving = partial(choose_plan, model, also, calibration=calibration, num_ranks=len(devices))
        serving = partial(serving, weights=weights, blocks_stay=blocks_stay, beside=beside)
        chosen, why = _better_elsewhere(chosen, usable, lambda layout: serving(devices[: layout.ranks], held=layout))
    others = [row for row in table if not row.fits or row.host_bytes <= host_bytes]
    why = (*_beyond_host(chosen, fitting, host_bytes), *why)
    if chosen.host_bytes > given:
        takes, gives = _gib(chosen.host_bytes), _gib(round(given))
        why = (f"{_whose(chosen)} take {takes} of host memory, where auto gives {gives}, as no others fit", *why)
    reasons = (*_reasons(chosen, others, devices, calibration), *why, f"constants: {calibration.source}")
    return Choice(chosen=chosen, reasons=reasons, table=table)


def useful_plans(ranks: int, *, model: CountedModel, work: Work, stale: bool) -> Iterator[ParallelPlan]:
    """Plans on exactly `ranks` ranks of which each degree has something to share out, weights replicated first.

    Data shares out images, cfg the two calls of a guided step, PipeFusion (only if `stale`) blocks, ulysses heads.
    """
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    for degrees in product(divisors, repeat=len(AXES)):
        data, cfg, stages, *_ = degrees
        if math.prod(degrees) != ranks or data > work.batch or cfg > (2 if work.guided else 1):
            continue
        if stages > 1 and not stale:
            continue
        for weights in WEIGHTS:
            if weights == "sharded" and ranks == data * stages:
                continue
            if weights == "offloaded" and data > 1:  # each replica's lie in the same host memory
                continue
            plan = ParallelPlan.from_dict({**dict(zip(AXES, degrees, strict=True)), "weights": weights})
            if model.may_run(plan):
                yield plan


def _predict(
    model: CountedModel,
    work: Work,
    plan: ParallelPlan,
    calibration: Calibration,
    *,
    free: int,
    num_ranks: int,
    decoding_free: float,
    blocks_stay: bool,
    beside: float,
) -> Prediction:
    needed = partial(memory_of, model, plan=plan, rates=calibration.rates, num_ranks=num_ranks)
    work = where_kept(model, work, plan, needed(work), free=round(HEADROOM * free))
    memory = needed(work)
    others = round(beside * memory.weights)
    crowded = others > 0 and memory.total + others > HEADROOM * free
    room = free if crowded else free - others
    staying = staying_part(model, plan, memory, calibration.rates, free=room) if blocks_stay else 0.0
    cost = step_cost(model, work, plan, calibration, staying=staying)
    # Ranks on the CPU that hold whole weights share the pages of the mapped file, which the system takes back at need.
    mapped = memory.weights if not calibration.rates.asynchronous and plan.weights == WEIGHTS[0] else 0
    fits = memory.total - mapped <= HEADROOM * free
    after = memory.weights + others + memory.runtime + (VIDEO_DECODE_BYTES if work.frames > 1 else DECODE_BYTES)
    unloaded = plan.weights != "offloaded" and (crowded or after > HEADROOM * decoding_free)
    reload_s = memory.weights / RELOADED if unloaded and calibration.rates.asynchronous else 0.0
    without, run_s = None, cost.image_s(work.steps)
    if work.graphs and _takes_graphs(model, plan, memory, calibration, free=room):
        by_graphs = step_cost(model, work, plan, calibration, by_graphs=True)
        gained_s = graphs_gain_s(cost.step_s, by_graphs.step_s, steps=work.steps)
        if GRAPHS_GAIN * (run_s - gained_s) <= run_s:
            cost, without, run_s = by_graphs, cost, run_s - gained_s
    return Prediction(
        plan=plan,
        cost=cost,
        memory=memory,
        run_s=run_s,
        fits=fits,
        without_graphs=without,
        staying=staying,
        reload_s=reload_s,
        beside=beside,
        shown_s=shown_heads_s(model, work, plan, calibration),
    )


def graphs_gain_s(plain_s: float, graphs_s: float, *, steps: int) -> float:
    """Seconds that a run of so many steps gains by a CUDA graph of each block, negative where it loses some.

    One run makes them for `GRAPHS_SERVE`: its first step is as without, and so is the second, which records them beside
    that. That takes the host as long once more.
    """
    making_s = GRAPHS_MADE_IN * (plain_s - graphs_s) + plain_s
    return steps * (plain_s - graphs_s) - making_s / GRAPHS_SERVE


def _takes_graphs(
    model: CountedModel, plan: ParallelPlan, memory: PlannedMemory, calibration: Calibration, *, free: int
) -> bool:
    """Whether blocks may run as CUDA graphs under the plan, with room for them to stay between runs. A class that keeps
    something between calls runs without."""
    usual = calibration.rates.asynchronous and plan.takes_graphs and not model.kept_bytes
    return usual and memory.graphs <= GRAPHS_BYTES and memory.total + memory.graphs + GRAPHS_LEAVE <= HEADROOM * free


def best_of(rows: Sequence[Prediction]) -> Prediction:
    """The quickest; among equals fewer ranks, then weights that stay, then whole ones, then no ring; one rank where
    more hardly help. Where two ranks wait for heads over PCIe that cannot go in chunks, a ring of two in their place.

    Of 2 H100s, Flux.1 and 1024 x 1024 pixels, a ring is predicted 1 % quicker. Published are 5.31 s with it and 4.38 s
    with ulysses, or 2.60 s and 2.68 s where blocks are compiled (xDiT): there is less to lose with ulysses.
    """
    fastest = rows[0]
    single = next((row for row in rows if row.plan.ranks == 1), None)
    if single is not None and single.prompt_s <= WORTHWHILE * fastest.prompt_s:
        return single
    equals = [row for row in rows if row.prompt_s <= EQUAL * fastest.prompt_s]

    def order(row: Prediction) -> tuple[float, ...]:
        return row.plan.ranks, row.reload_s > 0, row.plan.weights != "replicated", row.plan.ring, row.prompt_s

    taken = min(equals, key=order)
    ring = _ring_of_two(taken, rows)
    if ring is None or (single is not None and single.prompt_s <= WORTHWHILE * ring.prompt_s):
        return taken
    return ring


def _ring_of_two(row: Prediction, rows: Sequence[Prediction]) -> Prediction | None:
    """What shares the tokens of `row` by a ring of two in the place of heads that cannot go in chunks, where that is
    predicted little slower than the quickest."""
    if row.plan.parts != 2 or row.shown_s < (RING_OF_TWO - 1) * row.cost.step_s:
        return None
    ring = replace(row.plan, ulysses=1, ring=2)
    return next((each for each in rows if each.plan == ring and each.prompt_s <= RING_OF_TWO * rows[0].prompt_s), None)


def _beyond_host(chosen: Prediction, fitting: Sequence[Prediction], host_bytes: float) -> tuple[str, ...]:
    """What was left out for the host memory that its weights take, if it is quicker."""
    left_out = next((row for row in fitting if row.host_bytes > host_bytes), None)
    if left_out is None or WORTHWHILE * left_out.prompt_s > chosen.prompt_s:
        return ()
    name, takes = left_out.plan.name, _gib(left_out.host_bytes)
    gain = chosen.prompt_s / left_out.prompt_s
    return (
        f"{name} would be {gain:.2f}x as fast, but {_whose(left_out)} take {takes} of host memory, of which auto gives "
        f"{_gib(round(host_bytes))}",
    )


def _better_elsewhere(
    chosen: Prediction, rows: Sequence[Prediction], serving: Callable[[Layout], Choice]
) -> tuple[Prediction, tuple[str, ...]]:
    """`chosen`, or a row hardly slower than the quickest whose weights serve other work clearly better; and why.

    `serving`: the best for the other work on weights that lie so.
    """
    near = [row for row in rows if row is chosen or row.prompt_s <= WORTHWHILE * rows[0].prompt_s]
    layouts = dict.fromkeys(row.plan.layout for row in near)
    best = {layout: serving(layout).chosen for layout in layouts} if len(layouts) > 1 else {}
    fits = {layout: row for layout, row in best.items() if row is not None}
    now = fits.get(chosen.plan.layout)
    if not fits:
        return chosen, ()
    least_s = min(row.prompt_s for row in fits.values())
    if now is not None and now.prompt_s < ELSEWHERE_QUICKER * least_s:
        return chosen, ()
    equal = {layout for layout, row in fits.items() if row.prompt_s <= EQUAL * least_s}
    taken = best_of([row for row in near if row.plan.layout in equal])
    if now is None:
        return taken, (f"hardly differs here from {chosen.plan.name}, with whose weights cfg above 1 does not fit",)
    longer = now.prompt_s / fits[taken.plan.layout].prompt_s
    why = f"hardly differs here from {chosen.plan.name}, with whose weights cfg above 1 takes {longer:.2f}x as long"
    return taken, (why,)


def _on_one_device(table: Sequence[Prediction]) -> Prediction | None:
    """The quickest that fits; where none does, that with whole weights."""
    fitting = [row for row in table if row.plan.ranks == 1 and row.fits]
    return min(fitting, key=lambda row: row.prompt_s, default=None) or next(
        (row for row in table if row.plan == ParallelPlan()), None
    )


def _of_machines(chosen: Prediction, table: Sequence[Prediction], calibration: Calibration) -> list[str]:
    """Whether further machines pay, and over which link."""
    if calibration.between is None or len(calibration.machines) < 2:
        return []
    between, here = calibration.between, calibration.machines[0]
    over = f"over {between.name}, {between.bandwidth * 8 / 1e9:.3g} Gbit/s"
    both = chosen.plan.ranks > here
    other = next((row for row in table if row.fits and (row.plan.ranks > here) != both), None)
    if other is None:
        return []
    alone, together = (other, chosen) if both else (chosen, other)
    verdict = "a further machine pays" if both else "a further machine does not pay"
    return [
        f"{verdict}: {_time(together.cost.step_s)} a step with {together.plan.name} {over}, "
        f"{_time(alone.cost.step_s)} with {alone.plan.name} on this machine alone"
    ]


def _reasons(
    chosen: Prediction, table: Sequence[Prediction], devices: Sequence[int], calibration: Calibration
) -> tuple[str, ...]:
    cost, plan = chosen.cost, chosen.plan
    share = max(cost.compute_s, cost.communication_s, cost.launch_s) / cost.step_s
    reasons = [f"{plan.name}: {_time(cost.step_s)} a step, limited by {cost.bound} ({share:.0%} of the step)"]
    if chosen.without_graphs is not None:
        plain_s = chosen.without_graphs.step_s
        reasons.append(
            f"with a CUDA graph of each block, {_time(plain_s)} without: runs have them once they were tried"
        )
    if plan.ranks == 1:
        more = next((row for row in table if row.plan.ranks > 1 and row.fits), None)
        if more is not None:
            reasons.append(
                f"one device is better here: the best plan on more, {more.plan.name}, would be "
                f"{chosen.prompt_s / more.prompt_s:.2f}x as fast, limited by {more.cost.bound}"
            )
    elif (single := _on_one_device(table)) is not None:
        gain = f"{single.prompt_s / chosen.prompt_s:.2f}x as fast as one device ({_time(single.cost.step_s)} a step)"
        reasons.append(gain if single.fits else "one device cannot hold it")
    instead = next((row for row in table if row.fits and _ring_of_two(row, table) is chosen), None)
    if instead is not None and instead.prompt_s <= EQUAL * chosen.prompt_s:
        reasons.append(
            f"{instead.plan.name} is predicted as quick or quicker, but its heads cannot go in chunks: published runs "
            "over PCIe were quicker with a ring of two"
        )
    unused = len(devices) - plan.ranks
    if unused and plan.ranks > 1:
        reasons.append(f"{unused} of {len(devices)} devices stay unused: {_why_unused(chosen, table, devices)}")
    reasons += _of_machines(chosen, table, calibration)
    return (*reasons, *_of_weights(chosen, table, devices))


def _of_weights(chosen: Prediction, table: Sequence[Prediction], devices: Sequence[int]) -> Iterator[str]:
    """Why weights are not whole on each device, and what becomes of them before and in a run."""
    weights = chosen.plan.weights
    replicated = [row for row in table if row.plan.weights == WEIGHTS[0]]
    as_many = [row for row in replicated if row.plan.ranks == chosen.plan.ranks]
    whole = min(as_many or replicated, key=lambda row: row.memory.total, default=None)
    if weights != WEIGHTS[0] and whole is not None:
        needs, there = _gib(whole.memory.total), _gib(min(devices[: chosen.plan.ranks]))
        if not whole.fits:
            yield (
                f"does not fit with replicated weights: {needs} a rank, {there} on each device, of which "
                f"{HEADROOM:.0%} can be used; {weights} weights take {_gib(chosen.memory.total)} a rank"
            )
        elif whole.reload_s:
            yield (
                f"replicated weights would be loaded before each run, as they leave no room {_lacking(whole)}: "
                f"{needs} a rank, {there} on each device"
            )
    if chosen.reload_s:
        load = _time(chosen.reload_s)
        yield f"its weights are loaded before each run, which takes {load}, as they leave no room {_lacking(chosen)}"
    if chosen.staying:
        yield f"{chosen.staying:.0%} of the blocks stay whole on each device after a run's first step"


def _whose(row: Prediction) -> str:
    """Whose weights lie in host memory."""
    return "its weights and those of the prompt's other models" if row.beside else "its weights"


def _lacking(row: Prediction) -> str:
    """For what weights that are loaded again leave no room."""
    return "for the prompt's other models and a decode" if row.beside else "to decode"


def _why_unused(chosen: Prediction, table: Sequence[Prediction], devices: Sequence[int]) -> str:
    """Why no plan with more ranks was taken."""
    more = next((row for row in table if row.plan.ranks > chosen.plan.ranks), None)
    if more is None or more.fits or chosen.prompt_s <= EQUAL * more.prompt_s:
        return "with them it would not be faster"
    needs, least = _gib(more.memory.total), _gib(min(devices[: more.plan.ranks]))
    return (
        f"{more.plan.name} would be faster and does not fit, {needs} a rank, {least} on each device, of which "
        f"{HEADROOM:.0%} can be used"
    )


def _nothing_fits(model: CountedModel, table: Sequence[Prediction], devices: Sequence[int]) -> tuple[str, ...]:
    if not table:
        return (f"no plan on {len(devices)} devices fits the model's heads; use another number of devices",)
    least = min(table, key=lambda row: row.memory.total)
    remedy = "free memory, use a smaller image or an fp8 file, or more devices"
    if model.small_numbers:
        remedy = "free memory, use a smaller image, or more devices"
    if least.plan.weights == "replicated":
        remedy = f"use sharded weights, {remedy}"
    return (
        f"does not fit: {least.plan.name} needs the least, {_gib(least.memory.total)} a rank, "
        f"{_gib(min(devices))} on each device; {remedy}",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
