"""What SP Config's auto mode runs: the planner's choice, and the rule where it has nothing to say.

Owns auto's rule. The devices are what the user offers. GPUs: the plan predicted quickest for `usual_work` among those
that fit, on as many of them as make it quicker; the others sleep, and the reasons say why. That settles where the
weights lie, before anybody knows the image. Each sampling run then has the quickest plan for what it really samples
(`plan_of_run`), among those that the weights serve as they lie. GPUs of unknown speed: all of them (`auto_plan`), with
the first kind of weights that fits; where they are of one kind, prompt and negative on ranks of their own
(`sides_apart`). Ranks on the CPU are weighed as GPUs are once `doctor --calibrate` measured them; before, all of them
run, since no user names several by accident, with weights as asked. Pure: devices, free memory and constants are given,
nothing is asked or started.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..devices import Device, ranks_by_machine
from ..plan import WEIGHTS, ParallelPlan, auto_plan
from .choose import HEADROOM, Choice, Prediction, choose_plan
from .counted import CountedModel
from .hardware import GIB, Calibration
from .known import SHARED_ABOVE, known_rates
from .memory import memory_of
from .work import Work, image_tokens

PIXELS, TEXT_TOKENS = 1024, 512
OF_HOST = 0.4  # of host memory may be weights: text encoders and the file lie there, too
ANY_GPU = "H100"  # of a device's rates, its memory use asks only whether it runs ahead of the host, as every GPU does
ADVISED = 1.1  # times faster: below it no run says that weights which lie otherwise would be quicker
AGAIN = "each sampling run chooses again for what it samples, with the weights as they lie"
FORCING = "mode=manual forces another plan"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A plan, and why it was taken; a plan that the user wrote needs no reasons.

    `automatic`: auto took it, and may take another one instead.
    `work` is what it was weighed for, None where nothing was weighed: then it is the plan for any other work too.
    `model` is what was weighed then, `table` all plans that were, quickest first.
    """

    plan: ParallelPlan
    automatic: bool = field(default=False, compare=False)
    reasons: tuple[str, ...] = ()
    work: Work | None = None
    model: CountedModel | None = None
    table: tuple[Prediction, ...] = field(default=(), compare=False, repr=False)

    def gain_over(self, other: ParallelPlan) -> float | None:
        """How many times faster than `other` this plan is predicted to be; None where one of them was not weighed."""
        seconds = {row.plan: row.prompt_s for row in self.table}
        return seconds[other] / seconds[self.plan] if {other, self.plan} <= seconds.keys() else None

    @property
    def chosen_for(self) -> str:
        """`work` in words; "" where nothing was weighed."""
        return "" if self.work is None else describe_work(self.work)


def usual_work(*, element_bytes: int = 2) -> Work:
    """What a plan is chosen for before anybody knows the image: 1024 x 1024, 512 text tokens, cfg 1, batch 1."""
    return Work(
        image_tokens=image_tokens(PIXELS, PIXELS),
        text_tokens=TEXT_TOKENS,
        element_bytes=element_bytes,
    )


def automatic_plan(
    model: CountedModel,
    work: Work,
    devices: Sequence[Device],
    free: Sequence[int],
    calibration: Calibration | None,
    *,
    weights: str = WEIGHTS[0],
    everything: ParallelPlan | None = None,
    host_bytes: float = math.inf,
    blocks_stay: bool = True,
    beside: float = 0.0,
    usual: bool = True,
) -> Decision:
    """The plan of `model` for `work` on these devices, `free` bytes on each, None as `calibration` of unknown ones.

    `weights` other than replicated are kept; replicated ones become sharded or offloaded where they do not fit.
    `host_bytes`: all of this machine's memory. `blocks_stay` and `beside` as `choose_plan` has them.
    `usual`: the work stands for all that is sampled later.
    `everything`: the plan that uses all devices, where nothing is known of them or nothing fits.
    Raises `ValueError` when one device is asked to shard, or there are more devices than a pool has.
    """
    machines = ranks_by_machine(devices)
    everything = replace(everything or auto_plan(len(devices), model.heads, ranks_by_machine=machines), weights=weights)
    if calibration is None and devices[0].kind == "cpu":
        return Decision(plan=everything, reasons=on_cpu(everything))
    allowed = WEIGHTS if weights == WEIGHTS[0] else (weights,)
    if calibration is None:
        return _unknown(model, work, everything, min(free), allowed)
    choice = choose_plan(
        model,
        work,
        free,
        calibration,
        weights=allowed,
        decoder=next((i for i, each in enumerate(devices) if _is_comfyuis(each)), None),
        host_bytes=OF_HOST * host_bytes if weights == WEIGHTS[0] else math.inf,
        blocks_stay=blocks_stay,
        beside=beside,
        also=replace(work, guided=True) if usual and not work.guided else None,
    )
    if choice.plan is None:
        plan = with_weights(everything, "offloaded" if weights == WEIGHTS[0] else weights)
        reasons = (*choice.reasons, _no_plan_fits(_usual_in_words(work)), _trying(plan))
        return Decision(plan=plan, reasons=reasons, work=work, model=model)
    kept = () if weights == WEIGHTS[0] else (f"weights={weights} as asked",)
    again = f"{AGAIN}; " if len(devices) > 1 else ""
    chosen_for = f"chosen for {_usual_in_words(work)}; {again}{FORCING}"
    reasons = (*choice.reasons, *kept, chosen_for)
    return Decision(plan=choice.plan, reasons=reasons, work=work, model=model, table=choice.table)


def plan_of_run(
    model: CountedModel,
    work: Work,
    free: Sequence[int],
    calibration: Calibration,
    *,
    held: ParallelPlan,
    blocks_stay: bool = True,
    beside: float = 0.0,
) -> Decision:
    """The plan of one sampling run of `work`: the quickest that fits of those that the weights serve as they lie.

    `held` is the plan that they were loaded for, and the answer where nothing fits; `free` bytes on each device.
    """
    there, choose = free[: held.ranks], partial(choose_plan, weights=(held.weights,), blocks_stay=blocks_stay)
    choose = partial(choose, beside=beside)
    choice = choose(model, work, there, calibration, held=held.layout, num_ranks=len(free))
    if not choice.table:
        alone = "at cfg 1 only the images of a batch can be shared out of a model of this kind"
        return Decision(plan=held, reasons=(alone,), work=work, model=model)
    if choice.plan is None or choice.seconds_per_step is None:
        reasons = (*choice.reasons, _no_plan_fits(describe_work(work)), _trying(held))
        return Decision(plan=held, reasons=reasons, work=work, model=model)
    more: tuple[str, ...] = ()
    if held.weights != WEIGHTS[0] or held.ranks < len(free):  # whole weights on all devices serve every plan
        everywhere = choose(model, work, free, calibration)
        more = _with_other_weights(everywhere, choice.seconds_per_step, held, len(free))
    reasons = (*choice.reasons, *more, f"chosen for {describe_work(work)}")
    return Decision(plan=choice.plan, reasons=reasons, work=work, model=model, table=choice.table)


def sides_apart(model: CountedModel, work: Work, free: Sequence[int], *, held: ParallelPlan, equal: bool) -> Decision:
    """The plan of one run on devices of unknown speed: that by which weights lie, `held`, but with ranks of their own
    for prompt and negative where a step asks both. These send each other nothing until both are done.

    `equal`: the devices are taken to be; the sides are, so unequal ones share tokens. `free` bytes are on each.
    """
    reasons = (_all_used(held),)
    if not (equal and work.guided and held.pipefusion == 1 and _has_two_sides(held)):
        return Decision(plan=held, reasons=reasons, work=work, model=model)
    plan = _of_two_sides(held)
    memory = memory_of(model, work, plan, known_rates(ANY_GPU), num_ranks=len(free))
    fits = model.may_run(plan) and memory.total <= HEADROOM * min(free)
    return Decision(plan=plan if fits else held, reasons=reasons, work=work, model=model)


def without_sharing(refused: Decision, num_ranks: int, *, guided: bool, images: int) -> Decision:
    """In place of an automatic plan that cannot be used: one of at most `num_ranks` ranks that cuts no tokens.

    `guided`: prompt and negative are asked in every step of the run; `images` of its batch. Weights stay as they lie,
    since no other way may fit: of some that are spread over ranks, a plan has as many of them as before. Where ranks
    are left that would share tokens, each is to compute them all (`RunContext.whole`).
    """
    plan, spread = refused.plan, refused.plan.layout.shards > 1
    if not spread:
        cfg = 2 if num_ranks > 1 and guided else 1
        plan = ParallelPlan(cfg=cfg, data=max(1, min(num_ranks // cfg, images)), weights=plan.weights)
    elif guided and _has_two_sides(plan):
        plan = _of_two_sides(plan)
    return replace(refused, plan=plan)


def _has_two_sides(plan: ParallelPlan) -> bool:
    """Whether prompt and negative, which follow one another, may have half of the ranks each."""
    return plan.cfg == 1 and plan.parts % 2 == 0


def _of_two_sides(plan: ParallelPlan) -> ParallelPlan:
    """The plan with ranks of their own for prompt and negative; ulysses groups lie within those of before, so that each
    still has ranks of one machine alone."""
    parts = plan.parts // 2
    ulysses = math.gcd(plan.ulysses, parts)
    return replace(plan, cfg=2, ring=parts // ulysses, ulysses=ulysses)


def _with_other_weights(
    everywhere: Choice, seconds_per_step: float, held: ParallelPlan, offered: int
) -> tuple[str, ...]:
    """That weights on more devices, or otherwise on them, would make it quicker, if they would."""
    plan, there_s = everywhere.plan, everywhere.seconds_per_step
    served = plan is None or held.layout.serves(plan.layout)
    if plan is None or there_s is None or served or seconds_per_step < ADVISED * there_s:
        return ()
    gain = seconds_per_step / there_s
    if held.ranks < plan.ranks:
        return (
            f"{plan.name} would be {gain:.2f}x as fast, but the weights are on {held.ranks} of {offered} devices; "
            f"use mode=manual and {plan.describe()}",
        )
    return (
        f"{plan.name} would be {gain:.2f}x as fast, but the weights lie as {held.name} needs them; use mode=manual and "
        f"{plan.describe()}",
    )


def _is_comfyuis(device: Device) -> bool:
    """Whether ComfyUI uses the device, too: it takes the first GPU of its machine."""
    return device.kind == "cuda" and device.index == 0 and not device.machine


def _usual_in_words(work: Work) -> str:
    """The work that a plan is chosen for before anybody knows the image, a video's frames among its pixels."""
    tokens, text, frames = work.image_tokens, work.text_tokens, work.frames
    images = "one image" if work.batch == 1 else f"{work.batch} images"
    if work.guided and frames > 1:
        return (
            f"a video of {PIXELS} x {PIXELS} pixels, {frames} frames, {tokens} image tokens, {text} text tokens, "
            f"cfg above 1, {images}"
        )
    if work.guided:
        return f"a size of {PIXELS} x {PIXELS} pixels, {tokens} image tokens, {text} text tokens, cfg above 1, {images}"
    if frames > 1:
        return (
            f"a video of {PIXELS} x {PIXELS} pixels, {frames} frames, {tokens} image tokens, {text} text tokens, cfg 1"
        )
    return f"{PIXELS} x {PIXELS} pixels, {tokens} image tokens, {text} text tokens, cfg 1, one image"


def describe_work(work: Work) -> str:
    """The work in words, such as `4096 image tokens, 512 text tokens, prompt and negative, one image, 20 steps`."""
    sides = "prompt and negative" if work.guided else "one conditioning at a time"
    images = "one image" if work.batch == 1 else f"{work.batch} images"
    if work.reference_tokens:
        text = work.text_tokens
        return f"{work.image_tokens} image tokens, {text} of text and references, {sides}, {images}, {work.steps} steps"
    return f"{work.image_tokens} image tokens, {work.text_tokens} text tokens, {sides}, {images}, {work.steps} steps"


def with_weights(plan: ParallelPlan, weights: str) -> ParallelPlan:
    """The plan with weights of that kind; in host memory without replicas, each of which would lie there, too."""
    return replace(plan, weights=weights, data=1 if weights == "offloaded" else plan.data)


def _all_used(plan: ParallelPlan) -> str:
    if plan.ring > 1 and plan.ulysses <= 2 and plan.ranks > SHARED_ABOVE:
        return (
            f"all {plan.ranks} devices are used, around a ring, as an all-to-all among so many without NVLink is slow: "
            "how fast they are is unknown; `doctor --calibrate` measures"
        )
    return f"all {plan.ranks} device(s) are used: how fast they are is unknown; `doctor --calibrate` measures"


def _trying(plan: ParallelPlan) -> str:
    return f"trying {plan.describe()}, as this is a prediction"


def _no_plan_fits(work: str) -> str:
    return f"weighed for {work}: of that size no plan fits on these devices, and of a smaller one some may"


def on_cpu(plan: ParallelPlan) -> tuple[str, ...]:
    """Why ranks on a CPU that is not calibrated all run."""
    if plan.ranks == 1:
        return ("one CPU rank, nothing to choose",)
    return (f"all {plan.ranks} CPU ranks are used, as named; after `doctor --calibrate` auto chooses among them",)


def _unknown(model: CountedModel, work: Work, everything: ParallelPlan, free: int, allowed: Sequence[str]) -> Decision:
    """All devices, with the first kind of weights that fits, the last of them where none does."""
    rates = known_rates(ANY_GPU)
    usable = [kind for kind in allowed if kind != "sharded" or everything.ranks > 1]
    needs = {kind: memory_of(model, work, with_weights(everything, kind), rates).total for kind in usable}
    taken = next((kind for kind in usable if needs[kind] <= HEADROOM * free), usable[-1])
    reasons = [_all_used(everything)]
    if taken != allowed[0]:
        first = needs[allowed[0]] / GIB
        reasons.append(
            f"does not fit with {allowed[0]} weights: {first:.1f} GiB a rank, {free / GIB:.1f} GiB on each device"
        )
    return Decision(plan=with_weights(everything, taken), reasons=(*reasons, FORCING), work=work, model=model)
