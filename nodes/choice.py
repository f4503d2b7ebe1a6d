"""What the user asks for in SP Config, and the plan it becomes once a model is known.

Owns what the node hands on, with further machines' devices. Does not own the node (config.py) nor auto's rule
(`parallel_runtime/planner/automatic.py`).
"""

import logging
import math
import numbers
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from ..parallel_runtime.compiling import why_not
from ..parallel_runtime.devices import (
    KINDS,
    STOCK_NODES,
    Device,
    DeviceSelection,
    missing_system,
    parse_devices,
    ranks_by_machine,
)
from ..parallel_runtime.exchange_formats import EXACT, EXCHANGES, rounding_of
from ..parallel_runtime.machines.server import Offer
from ..parallel_runtime.models.hosted.first_block import refuse_stages_with_cache
from ..parallel_runtime.parallel.named_kernels import AUTO, CHOICES, described, missing
from ..parallel_runtime.plan import MAX_RANKS, WEIGHTS, ParallelPlan
from ..parallel_runtime.planner.automatic import (
    Decision,
    automatic_plan,
    on_cpu,
    plan_of_run,
    sides_apart,
    with_weights,
)
from ..parallel_runtime.planner.counted import CountedModel
from ..parallel_runtime.planner.counting import Counted, usual_counted, usual_work_of
from ..parallel_runtime.planner.hardware import Calibration
from ..parallel_runtime.planner.machine import constants, kinds_here, measured, share_a_bridge, whole_bytes
from ..parallel_runtime.planner.work import Work
from ..parallel_runtime.process.environment import blocks_may_stay
from ..parallel_runtime.redact_paths import redact_paths
from ..parallel_runtime.shares import MEASURED, parse_shares
from ..parallel_runtime.weights.host_memory import host_memory
from .host.panel.machines import MACHINES
from .host.panel.progress import NodeText, prompt_id
from .roles import roles

log = logging.getLogger(__name__)
LORA_MODES = ("merged", "side branch")
COMPILED = ("off", "blocks")
LOOPS = ("auto", "host")
TRIES = ("auto", "off")
PLANS = ("written and found", "written")
WORDS = {
    "mode": ("auto", "manual"),
    "lora": LORA_MODES,
    "weights": WEIGHTS,
    "compiled": COMPILED,
    "loop": LOOPS,
    "attention": CHOICES,
    "tries": TRIES,
    "plans": PLANS,
    "exchange": EXCHANGES,
}


class _Compiling(TypedDict, total=False):
    """What `ParallelChoice` has of it."""

    compiled: bool
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParallelChoice:
    """What the user said: the devices as written and as found, and a plan, or None for an automatic one."""

    devices_text: str
    selection: DeviceSelection
    plan: ParallelPlan | None = None
    side_branch: bool = False  # LoRAs run as side branches instead of merged into the weights
    weights: str = WEIGHTS[0]
    compiled: bool = False  # the blocks run as graphs of torch's compiler
    remarks: tuple[str, ...] = ()
    step_cache: float = 0.0  # below this change of the first block's the others are skipped
    worker_loop: bool = True  # samplers run their loop in the workers where they can
    attention: str = ""  # a kernel of a package, where ranks share tokens
    tries: bool = True  # plans that auto predicts to be near are tried before a run
    shares: tuple[int, ...] | None = None  # of each device; () for equal ones, None as they are measured
    finds: bool = True  # a plan is looked for where the pack has none for the model's class
    exchange: str = EXACT  # as what heads travel between ranks

    def decision_for_model(
        self,
        unshared: str,
        *,
        whole_batches: bool = False,
        weight_bytes: int = 0,
        beside: float = 0.0,
        count: Callable[[], Counted],
    ) -> Decision:
        """The plan to run a model with, which `count` counts for the planner and which takes seconds for that.

        Automatic, it is the planner's where the devices' speed is known; else all devices share each image by heads.
        `unshared`: why they cannot; then prompt and negative run at once, and images of a batch on what is left. With
        `whole_batches` not even that: ranks can share the weights alone. `beside`: how many models of this size the
        prompt has besides on these devices. One device whose memory holds `weight_bytes` twice, and those, is not
        weighed.
        Its reasons go to the log. Raises `ValueError` for degrees that fit neither the devices nor such a model.
        """
        decision = self._fitting(unshared, whole_batches, weight_bytes, count, beside)
        if decision.reasons:
            log.info("SP Config: auto takes %s: %s", decision.plan.name, "; ".join(decision.reasons))
        return decision

    def _fitting(
        self,
        unshared: str,
        whole_batches: bool,
        weight_bytes: int,
        count: Callable[[], Counted],
        beside: float = 0.0,
    ) -> Decision:
        """The plan, held against the devices: it may leave some out, but not ask for more."""
        if self.plan is not None and self.plan.ranks <= len(self.selection.devices):
            return Decision(plan=self.plan)
        if self.plan is not None and not self._may_shrink():
            raise ValueError(self._too_few(self.plan))
        if self._weights_here() != self.weights:
            log.warning("weights=sharded needs two devices, one found; weights are chosen as for replicated")
        chosen = self._automatic_plan(unshared, whole_batches, weight_bytes, count, beside)
        decision = replace(chosen, automatic=True)
        if self.plan is not None:
            found, told = len(self.selection.devices), self.plan.describe()
            log.warning("%s needs %d ranks, %d found; running %s", told, self.plan.ranks, found, decision.plan.name)
        return decision

    def _automatic_plan(
        self, unshared: str, whole_batches: bool, weight_bytes: int, count: Callable[[], Counted], beside: float
    ) -> Decision:
        plan, reasons = self._plan_by_count(unshared, whole_batches)
        devices = self.selection.devices
        if devices[0].kind == "cpu" and not self._can_weigh():
            return Decision(plan=plan, reasons=(*reasons, *on_cpu(plan)))
        if unshared and whole_batches and plan.weights == "sharded":  # there is nothing to choose
            return Decision(plan=plan, reasons=reasons)
        if len(devices) == 1 and 0 < (2 + beside) * weight_bytes <= whole_bytes(devices)[0]:
            return Decision(plan=plan, reasons=reasons)
        try:
            counted = count()
        except ValueError as error:
            why = redact_paths(str(error))  # nodes show it
            plan = self._by_size(plan, weight_bytes)
            return Decision(plan=plan, reasons=(*reasons, f"not weighed, as it could not be counted: {why}"))
        graphs = self.tries and not self.compiled and not self.step_cache and devices[0].kind == "cuda"
        work = replace(usual_work_of(counted), step_cache=self.step_cache > 0, graphs=graphs)
        if unshared and not whole_batches:  # nothing else can be shared out
            work = replace(work, guided=plan.cfg > 1, batch=plan.data)
        decision = self._automatic(counted.model, work, everything=plan, beside=beside)
        return replace(decision, reasons=(unshared, *decision.reasons)) if unshared else decision

    def _by_size(self, plan: ParallelPlan, weight_bytes: int) -> ParallelPlan:
        """The plan with weights where they leave a third of each device for what is computed: whole ones first."""
        room = 2 * min(whole_bytes(self.selection.devices)) / 3
        shards, on_cpu = plan.ranks // plan.data, self.selection.devices[0].kind == "cpu"
        if self.weights != WEIGHTS[0] or on_cpu or weight_bytes <= room:  # ranks on the CPU map the same file
            return with_weights(plan, plan.weights)
        return with_weights(plan, "sharded" if shards > 1 and weight_bytes <= shards * room else "offloaded")

    def _plan_by_count(self, unshared: str, whole_batches: bool) -> tuple[ParallelPlan, tuple[str, ...]]:
        """The automatic plan for as many devices as there are, and why."""
        count = len(self.selection.devices)
        if not unshared or count == 1:
            inside = math.gcd(*ranks_by_machine(self.selection.devices))
            if share_a_bridge(self.selection.devices):  # an all-to-all among so many is slower than one device
                inside = math.gcd(inside, 2)
            return ParallelPlan(ulysses=inside, ring=count // inside, weights=self._weights_here()), ()
        if whole_batches and self.weights != "sharded":
            alone = f"{unshared}; one device computes it (weights set to sharded lets others hold parts of it)"
            return ParallelPlan(weights=self.weights), (alone,)
        plan = ParallelPlan(cfg=2, data=count // 2, weights=self.weights)
        if whole_batches:
            return plan, (f"{unshared}; the devices share its weights alone",)
        replicas = f"; images of a batch on {plan.data} replicas (data={plan.data})" if plan.data > 1 else ""
        return plan, (f"{unshared}; prompt and negative at once (cfg=2), for a cfg scale above 1{replicas}",)

    def plan_of_run(self, model: CountedModel, work: Work, held: ParallelPlan, beside: float = 0.0) -> Decision:
        """The plan of a sampling run of `work`, of those that weights loaded for `held` serve; its reasons are logged.

        Only for plans that were weighed, not for those that the user wrote. `beside` as `decision_for_model` takes it.
        """
        decision = replace(self._automatic(model, work, held, beside=beside), automatic=True)
        log.info("SP Config: auto takes %s for this run: %s", decision.plan.name, "; ".join(decision.reasons))
        return decision

    @property
    def looks(self) -> bool:
        """Whether a plan is looked for where the pack has none: it takes devices that are to share an image."""
        count = len(self.selection.devices)
        return self.finds and count > 1 and (self.plan is None or self.plan.parts > 1 or self.plan.ranks > count)

    @property
    def advises(self) -> bool:
        """Whether the user's plan can be held against auto's: the speed of the devices is known."""
        return self.plan is not None and self._can_weigh()

    def advised(self, model: CountedModel, work: Work, beside: float = 0.0) -> Decision | None:
        """What auto would take for `work` on these devices; None where it did, or knows nothing of them. `beside` as
        `decision_for_model` takes it."""
        return self._automatic(model, work, beside=beside, usual=False) if self.advises else None

    def describe(self) -> list[str]:
        """The plan's name, what each device will do, and auto's reasons, a line each; `ValueError` for too few devices.

        An automatic plan is shown for Flux.1 in bf16.
        """
        return self.told(self.usual_plan())

    def usual_plan(self) -> Decision:
        """The plan before anybody knows the file, of the usual model. Raises `ValueError` for too few devices."""
        return self._fitting("", False, 0, usual_counted)

    def told(self, decision: Decision) -> list[str]:
        """The decision in lines: the plan's name, what each device will do, and the reasons."""
        by = [_attended_by(self.attention, decision.plan)] if self.attention else []
        by += [_exchanged_as(self.exchange, decision.plan)] if self.exchange != EXACT else []
        plan = decision.plan.with_shares(self.shares or ())
        doing = roles(plan, self.selection.devices)
        return [plan.name, *doing, *decision.reasons, *self.remarks, *by]

    def _too_few(self, plan: ParallelPlan) -> str:
        num_ranks = len(self.selection.devices)
        return (
            f"{plan.describe()} makes {plan.ranks} rank(s), devices={self.devices_text!r} names "
            f"{num_ranks}; make the product of the degrees {num_ranks} or less, or name {plan.ranks} device(s)"
        )

    def _can_weigh(self) -> bool:
        """Whether the speed of these devices is known."""
        return _constants(self.selection.devices) is not None

    def _automatic(
        self,
        model: CountedModel,
        work: Work,
        held: ParallelPlan | None = None,
        *,
        everything: ParallelPlan | None = None,
        beside: float = 0.0,
        usual: bool = True,
    ) -> Decision:
        """The planner's plan on these devices, with weights that lie as `held` needs them once they are loaded.

        Free memory is counted as all of a device's: ComfyUI gives up its own models for ours, our weights of an earlier
        prompt must not count against themselves, and asking a device for what is free would take a CUDA context's worth
        of it. What other programs hold is therefore not seen. The other arguments are as the planner takes them.
        """
        work, devices = replace(work, exchange=self.exchange), self.selection.devices
        free, known = whole_bytes(devices), _constants(devices)
        known = known and replace(known, shares=self.shares)
        if held is not None:
            if known is None:
                one_kind = not any(each.machine for each in devices) and len(kinds_here(devices)) == 1
                return sides_apart(model, work, free, held=held, equal=one_kind and not self.shares)
            stays = blocks_may_stay(os.environ)
            return plan_of_run(model, work, free, known, held=held, blocks_stay=stays, beside=beside)
        return automatic_plan(
            model,
            work,
            devices,
            free,
            known,
            weights=self._weights_here(),
            everything=everything,
            host_bytes=host_memory()[1],
            blocks_stay=blocks_may_stay(os.environ),
            beside=beside,
            usual=usual,
        )

    def _weights_here(self) -> str:
        """Where the weights lie as the user said; one device has nothing to share out where there were to be more."""
        alone = len(self.selection.devices) == 1 and self.weights == "sharded" and self._may_shrink()
        return WEIGHTS[0] if alone else self.weights

    def _may_shrink(self) -> bool:
        """`all`, and a count that had to shrink: a workflow saved for eight devices runs on one."""
        return self.devices_text.strip().lower() == "all" or bool(self.selection.warnings)

    def refuse_unasked_cpu(self, main: str) -> None:
        """Raise `ValueError` where ComfyUI computes on a kind of device that workers cannot, `main`, so that none was
        found for them, and nobody has asked for ranks on the CPU."""
        asked = self.devices_text.strip().lower().startswith("cpu")
        if main not in KINDS and not asked and self.selection.devices[0].kind == "cpu":
            raise ValueError(f"ComfyUI computes on {main}, which workers cannot; use Load Diffusion Model")


def _constants(devices: Sequence[Device]) -> Calibration | None:
    """What is known of the speed of these devices."""
    try:
        return measured(devices) if devices[0].kind == "cpu" else constants(devices)
    except ValueError:  # neither calibrated nor in the table
        return None


def choice_of(
    mode: str,
    devices: str,
    *,
    lora: str = LORA_MODES[0],
    weights: str = WEIGHTS[0],
    patches: int = 0,
    warmup_steps: int = 1,
    compiled: str = COMPILED[0],
    step_cache: float = 0.0,
    machines: str = "",
    loop: str = LOOPS[0],
    attention: str = AUTO,
    tries: str = TRIES[0],
    shares: str = MEASURED,
    plans: str = PLANS[0],
    exchange: str = EXACT,
    **degrees: int,
) -> ParallelChoice:
    """What SP Config's inputs mean on this machine, `degrees` by their axis. Raises `ValueError` for those that cannot
    be used."""
    if (system := missing_system()) is not None:
        raise ValueError(f"{system}; {STOCK_NODES}")
    said = (mode, lora, weights, compiled, loop, attention, tries, plans, exchange)
    for (name, words), value in zip(WORDS.items(), said, strict=True):
        if value not in words:  # ComfyUI looks at values that are typed in, and not at those of other nodes
            raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(words)}")
    for name, text in (("devices", devices), ("machines", machines), ("shares", shares)):
        if not isinstance(text, str):
            raise ValueError(f"{name}={text!r} is not a text; connect one that gives a text")
    if not isinstance(step_cache, numbers.Real):
        raise ValueError(f"step_cache={step_cache!r} is not a number; use for example 0.1")
    if not 0.0 <= step_cache <= 1.0:
        raise ValueError(f"step_cache={step_cache:g} is not from 0 to 1; use for example 0.1, or 0 for none")
    if attention != AUTO and (lacking := missing(attention)):
        raise ValueError(lacking)
    plan = None
    if mode == "manual":
        staged = degrees.get("pipefusion", 1) > 1
        pipeline = {"patches": patches, "warmup_steps": warmup_steps} if staged else {}
        plan = ParallelPlan.from_dict({**degrees, **pipeline, "weights": weights})
        refuse_stages_with_cache(plan.pipefusion, step_cache)
    selection = with_machines(parse_devices(devices), machines)
    selection, of_each = _with_shares(selection, shares)
    return ParallelChoice(
        devices_text=devices,
        selection=selection,
        plan=plan,
        side_branch=lora == LORA_MODES[1],
        weights=weights,
        step_cache=step_cache,
        worker_loop=loop == LOOPS[0],
        attention="" if attention == AUTO else attention,
        tries=tries == TRIES[0],
        shares=of_each,
        finds=plans == PLANS[0],
        exchange=exchange,
        **_compiling(compiled, selection),
    )


def _with_shares(selection: DeviceSelection, shares: str) -> tuple[DeviceSelection, tuple[int, ...] | None]:
    """The devices that have a share, and theirs. One whose share is 0, or rounds to it, is left out by name."""
    found = parse_shares(shares, len(selection.devices))
    if not found:
        return selection, found
    pairs = list(zip(selection.devices, found, strict=True))
    left_out = tuple(f"{device} has a share of 0 and is left out" for device, share in pairs if not share)
    devices = tuple(device for device, share in pairs if share)
    return DeviceSelection(devices, (*selection.warnings, *left_out)), tuple(filter(None, found))


def _attended_by(attention: str, plan: ParallelPlan) -> str:
    """What becomes of a kernel that was asked for: ranks that share no tokens, and stages, attend as ComfyUI does."""
    if plan.parts > 1 and plan.pipefusion == 1:
        return f"attention by {described(attention)}, where there is no mask"
    return f"attention={attention} is not used: it takes ulysses or ring above 1, and pipefusion 1"


def _exchanged_as(exchange: str, plan: ParallelPlan) -> str:
    """What becomes of a format for the way between ranks that was asked for."""
    if plan.parts > 1:
        return rounding_of(exchange)
    return f"exchange={exchange} is not used: it takes ulysses or ring above 1"


def with_machines(here: DeviceSelection, machines: str) -> DeviceSelection:
    """The devices here and behind them those of further machines, waited for where they are asked for.

    Machines whose devices would be more than a pool has ranks are left out, with a warning, as are those that did not
    come. Raises `ValueError` for an address that cannot be offered.
    """
    offer = Offer.parse(machines)
    if offer is None:
        return here
    further = MACHINES.devices_of(offer, say=NodeText().say if prompt_id() else None)
    names = list(dict.fromkeys(device.machine for device in further))
    devices, warnings = here.devices, list(here.warnings)
    if len(names) < offer.count:
        warnings.append(f"{len(names)} of {offer.count} further machines are there; running on what is there")
    for name in names:
        theirs = tuple(device for device in further if device.machine == name)
        if len(devices) + len(theirs) > MAX_RANKS:
            warnings.append(
                f"machine {name} is left out: its {len(theirs)} devices make more than {MAX_RANKS}; "
                "start `join` there with fewer --devices"
            )
            continue
        devices += theirs
    return DeviceSelection(devices, tuple(warnings))


def _compiling(asked: str, selection: DeviceSelection) -> _Compiling:
    """Whether blocks are compiled, and why they are not where they were to be: the picture is the same without."""
    if asked == COMPILED[0]:
        return {}
    reason = why_not([device.kind for device in selection.devices], os.environ)
    if reason is None:
        return {"compiled": True}
    log.warning("SP Config: blocks run uncompiled: %s", reason)
    return {"remarks": (f"blocks run uncompiled: {reason}",)}
