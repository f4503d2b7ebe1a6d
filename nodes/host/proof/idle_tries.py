"""Plans that a run left: tried after it, while no prompt runs, on a copy of its first step.

A run that is too short tries none, and one that waits for its tries may have had no time for all copies. Owns what is
kept of such a run, when ComfyUI is idle, and what ends it: a prompt, or who frees weights, at once. How plans are
tried and kept is trying.py's.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.model_call import ModelCall
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.kept_plans import TriesKey
from ....parallel_runtime.planner.memory import PlannedMemory
from ..contract.comfyui import comfy
from ..contract.queued_prompt import prompt_runs
from ..sampling.run_context import RunContext, is_sampled_on
from ..sampling.step_listener import StepListener
from .trying import Trier, store

WAITS_S = 3.0  # without a prompt, before the first copy
POLL_S = 0.2
ATTEMPTS = 3  # for one kind of work that were ended; then it is left to `tune`
ROOM = 1.5  # times what a plan is predicted to compute with has to be free: nothing is moved away for a try
MOST_BYTES = 512 * 2**20  # of a step's calls that are kept

log = logging.getLogger(__name__)


class PromptBeganError(Exception):
    """A prompt has the devices."""


@dataclass(kw_only=True)
class IdleTrier:
    """Keeps a run's first step's calls, and has `trier`'s plans tried later.

    `now`: what the run itself tries; then this is due where that left anything, and what so few copies had kept counts
    no more. `memory`: what each plan is predicted to take of a device. `later` takes this when the run has ended.
    """

    trier: Trier
    memory: Mapping[ParallelPlan, PlannedMemory]
    later: Callable[["IdleTrier"], None]
    now: Trier | None = None
    _first: tuple[RunContext, list[ModelCall]] | None = None

    @property
    def by_graphs(self) -> bool:
        """As the `Trier`'s."""
        return (self.now or self.trier).by_graphs

    def try_plans(self, run: RunContext, calls: Sequence[ModelCall], check_cancelled: Callable[[], None]) -> None:
        """Keep a copy of the calls; nothing is tried now but by `now`, as `Trier.try_plans`."""
        self._keep(run, calls)
        if self.now is not None:
            self.now.try_plans(run, calls, check_cancelled)

    def _keep(self, run: RunContext, calls: Sequence[ModelCall]) -> None:
        tensors = [tensor for call in calls for tensor in call.tensors.values()]
        if sum(tensor.nbytes for tensor in tensors) > MOST_BYTES or not self.trier.plans:
            return
        quiet = replace(
            run,
            listener=StepListener(),
            recorder=None,
            trier=None,
            late=None,
            step_seconds=[],
            proofs=list(run.proofs),
            remarks=[],
        )
        self._first = quiet, [replace(call, tensors=_copied(call.tensors)) for call in calls]

    def after(self, run: RunContext) -> None:
        """The run has ended: its plans are due, unless it gave up its own or tried all of them."""
        (self.now or self.trier).after(run)
        if self.now is not None:
            tries = self.now.tries
            if tries is None or not (tries.left or set(self.trier.plans).difference(tries.plans)):
                return
            self.trier.plans = tuple(plan for plan in self.trier.plans if plan not in tries.failed)
        if self._first is None:
            return
        began_under, kept = self._first[0].plan, (self.now or self.trier).kept
        if run.shares_by(began_under) or (kept is not None and run.shares_by(kept.plan)):
            self.later(self)

    def compute(self, check: Callable[[], None]) -> bool:
        """Try the plans, where the workers have the weights and room, and a MODEL is left; whether to offer such work
        again.

        Raises whatever `check` raises, and `PoolError`.
        """
        if self._first is None:
            return True
        run, calls = self._first
        pooled, trier = run.model, self.trier
        if not pooled.holds(run.plan) or trier.prover.gone:
            return True
        free = min(each.free_bytes for each in pooled.pool.measure_devices(check))
        beside = len(pooled.devices) if pooled.devices[0].kind == "cpu" else 1
        needs = max((each.activations + each.buffers for each in self.memory.values()), default=0)
        needs += max((self.memory[plan].graphs for plan in trier.graphs.intersection(self.memory)), default=0)
        if ROOM * needs * beside > free:
            log.info("SP Config: no plans are tried while ComfyUI is idle: %.1f GB are free on a device", free / 1e9)
            return True
        plans, trier.tries = trier.plans, None

        def still() -> None:
            check()
            # A thread that waits for the pool may be ComfyUI's of prompts: until it is let in, none begins.
            if trier.lost_weights(run) or pooled.pool.is_waited_for:
                raise PromptBeganError

        try:
            trier.try_plans(run, calls, still)
        finally:
            trier.plans = plans  # of which a try that a prompt ends has taken hold
            if pooled.started and not is_sampled_on(
                pooled.devices
            ):  # else the prompt's run has begun, and gives back itself
                pooled.give_back(comfy.model_management.get_torch_device())
        return store().load(trier.key) is not None


class IdleTries:
    """The newest run whose plans are due, and the thread that tries them. `busy`: whether a prompt runs."""

    def __init__(self, busy: Callable[[], bool], *, waits_s: float = WAITS_S) -> None:
        self._busy, self._waits_s = busy, waits_s
        self._lock = threading.Lock()
        self._due: IdleTrier | None = None
        self._ended = Counter[TriesKey]()
        self._waiting = set[TriesKey]()  # offered, and not yet tried
        self._thread: threading.Thread | None = None

    def offer(self, due: IdleTrier) -> None:
        """Try these plans once ComfyUI is idle; those that were due before are not."""
        with self._lock:
            if self._ended[due.trier.key] >= ATTEMPTS:
                return
            self._due = due
            self._waiting.add(due.trier.key)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="parallel-dit-idle-tries", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no thread more, which ends no run that went well
                    self._due = None
                    self._waiting.discard(due.trier.key)
                    log.warning("plans are not tried: %s", error)
                else:
                    self._thread = thread

    def waits(self, key: TriesKey) -> bool:
        """Whether plans for such work were offered, and prompts have left no time for them."""
        return key in self._waiting

    def _work(self) -> None:
        while (due := self._next()) is not None:
            key, over = due.trier.key, True
            try:
                self._ended[key] = 0 if due.compute(self._check) else ATTEMPTS
            except PromptBeganError:
                self._ended[key] += 1
                over = False
                with self._lock:
                    if self._due is None and self._ended[key] < ATTEMPTS:
                        self._due = due
            except (PoolError, ValueError) as error:
                self._ended[key] = ATTEMPTS
                log.warning("plans could not be tried while ComfyUI was idle: %s", error)
            except Exception:  # no caller is above; other runs go on having their plans tried
                self._ended[key] = ATTEMPTS
                log.exception("plans could not be tried while ComfyUI was idle")
            if over:
                self._waiting.discard(key)
            due = None  # it has copies of a run's tensors, and the next may be long in coming

    def _next(self) -> IdleTrier | None:
        """What is due once no prompt has run for a while; None, and the thread ends, where nothing is."""
        since_s = time.monotonic()
        while time.monotonic() - since_s < self._waits_s:
            time.sleep(min(POLL_S, self._waits_s))
            if self._busy():
                since_s = time.monotonic()
        with self._lock:
            due, self._due = self._due, None
            if due is None:
                self._thread = None
            return due

    def _check(self) -> None:
        if self._busy():
            raise PromptBeganError


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In host memory, whatever becomes of these."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


IDLE = IdleTries(prompt_runs)  # the one of this process; never rebound
