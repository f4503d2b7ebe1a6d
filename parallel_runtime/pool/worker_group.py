"""One generation of ranks with what it holds: weights, process groups of plans, and calls whose keys later ones use.

Owns what a request needs before it is sent. Weights are held_weights.py's, the ranks generation.py's.
"""

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..checkpoint import ModelSpec
from ..exchange_groups import ExchangeGroup, OverlapRates, groups_of, weight_groups
from ..machines.machine import Machine
from ..model_call import OUT, ModelCall
from ..plan import MAX_RANKS, BatchSlice, Layout, ParallelPlan
from ..planner.memory import extra_bytes, kept_groups_bytes
from ..weight_delta import WeightDeltas
from ..wire.requests import CheckCopies, MakeMesh, Options, Step, Trim
from .calls import (
    RunResult,
    StepDone,
    Steps,
    WorkerLoopResult,
    WorkerLoopRun,
    inputs_of,
    results_of,
    traces_of,
    whole_trace,
    writers,
)
from .generation import Generation
from .held_vae import HeldVae
from .held_weights import Check, HeldModel, HeldWeights, OnProgress


class Meshes:
    """The plans whose groups `num_ranks` ranks have, the one used last last. Reading is safe from any thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._plans: tuple[ParallelPlan, ...] = ()
        self._made: dict[ExchangeGroup, None] = {}

    def __iter__(self) -> Iterator[ParallelPlan]:
        return iter(self._plans)

    def use(self, plan: ParallelPlan) -> None:
        """Note that the plan, which has its groups, is used now."""
        self._plans = (*(other for other in self._plans if other != plan), plan)

    def change_for(self, plan: ParallelPlan, held: Iterable[Layout]) -> MakeMesh | None:
        """What the ranks must do before the plan is used, where weights are held in such layouts; None for nothing.

        Plans go from the one used longest ago on, and groups in the order in which they were made.
        """
        if self._plans[-1:] == (plan,):
            return None
        kept = {group for layout in held for group in weight_groups(layout)}
        own, dropped = set(groups_of(plan, self._num_ranks)), []
        for other in reversed(self._plans):
            more = kept | set(groups_of(other, self._num_ranks))
            if other == plan or extra_bytes(more - own, self._num_ranks) <= kept_groups_bytes(self._num_ranks):
                kept = more
            else:
                dropped.append(other)
        if plan in self._plans and not dropped:
            return None
        freed = tuple(group for group in self._made if group not in kept | own)
        return MakeMesh(plan=plan, dropped=tuple(dropped), freed=freed)

    def apply(self, change: MakeMesh) -> None:
        """Note that the ranks have done it."""
        self._plans = tuple(plan for plan in self._plans if plan not in change.dropped)
        self.use(change.plan)
        made = (*self._made, *groups_of(change.plan, self._num_ranks))
        self._made = dict.fromkeys(group for group in made if group not in change.freed)


class WorkerGroup:
    """A generation, and what it holds. Every method raises PoolError when a rank fails; the generation is over then.

    `load_deadline_s`: of loading a model. `budget_bytes` as `HeldWeights` has it. With `check_copies`, what
    ranks send each other is not believed to arrive until it has been seen to. `overlap` as the argument of `Pool`. With
    `lean`, no block of sharded or offloaded weights stays whole.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        load_deadline_s: float,
        budget_bytes: int | None,
        check_copies: bool,
        overlap: Callable[[ParallelPlan], OverlapRates | None],
        lean: bool = False,
    ) -> None:
        self.generation = generation
        self._more: Options = {"lean": True} if lean else {}  # that every call is asked with
        self.meshes = Meshes(len(generation.ranks))
        self.copies_are_sound = not check_copies or len(generation.ranks) == 1  # else `damaged_copies` is to find it
        self._overlap = overlap
        handles = itertools.count(1)  # of models and VAEs; none is used again
        # Model and plan of the last calls with a place. Ranks drop what calls left when an epoch begins: where these
        # are others, and after a request by which some ranks of the plan alone may have dropped it (None).
        self._left_by: tuple[int, ParallelPlan] | None = None
        self._epoch = 0
        self._owed: set[int] | None = None  # what `trim` is to be asked with, once they can be asked
        # What was used last, with the handle of its model; None once weights or groups may be others.
        self._ensured: tuple[Hashable, int] | None = None
        self.models = HeldWeights(generation, handles, load_deadline_s=load_deadline_s, budget_bytes=budget_bytes)
        self.vae = HeldVae(generation, handles, load_deadline_s)

    def too_few_for(
        self, plan: ParallelPlan | None, machines: Callable[[Check], Sequence[Machine]], check: Check
    ) -> bool:
        """Whether the plan, or anything without one, needs a machine that was left out, or one that has joined since.

        All ranks make a plan's groups together, so once a machine was left out only plans that have theirs run on.
        `machines` as `Pool` has it.
        """
        reach, all_ranks = self.generation.reach(), len(self.generation.ranks)
        if reach < all_ranks:
            held = [model.layout for model in self.models]
            return plan is None or plan.ranks > reach or self.meshes.change_for(plan, held) is not None
        if plan is None or plan.ranks <= all_ranks:
            return False
        return any(machine not in self.generation.machines for machine in machines(check))

    def settle(self, check: Check) -> None:
        """See that all ranks are well and owe nothing: take in what a request given up left behind, READY included."""
        self.generation.wait(check)
        if self._owed is not None:
            self.trim(sorted(self._owed), lambda: None)  # soon answered, and owed whichever request comes
            self._owed = None
        if self.models.partly_held:
            self._ensured = None
            self.models.free_partly_held(check)
        if self.vae.partly_held:
            self.vae.free(check)

    def layout_for(self, plan: ParallelPlan | None) -> Layout:
        """The layout that the plan needs; without a plan, the whole model on every rank."""
        return Layout(ranks=len(self.generation.ranks)) if plan is None else plan.layout

    def load(
        self, spec: ModelSpec, plan: ParallelPlan | None, check: Check, *, progress: OnProgress | None = None
    ) -> HeldModel:
        """The model in the layout that the plan needs."""
        self._ensured = None
        layout = self.layout_for(plan)
        gathered_by = plan if layout.shards > 1 else None
        if gathered_by is not None:
            self.make_mesh(gathered_by, check)
        return self.models.load(spec, layout, check, plan=gathered_by, progress=progress)

    def apply_deltas(self, model: HeldModel, deltas: WeightDeltas, check: Check) -> None:
        """Make the model's weights pristine plus `deltas`; nothing when they are that already."""
        self._ensured = None
        self.models.apply_deltas(model, deltas, check)

    def unload(self, spec: ModelSpec, layout: Layout | None, check: Check) -> None:
        """Free the model in layouts of this kind, or in all, and the VAE; nothing that is not there."""
        self._ensured = self._left_by = None
        self.vae.free(check)
        self.models.unload(spec, layout, check)
        self.generation.arena.give_back()

    def trim(self, ranks: Sequence[int], check: Check, *, graphs: bool = False) -> None:
        """Have the ranks of the last run keep nothing of it, but with `graphs` those of blocks, and these ranks give
        back what torch caches on their device; memory that the run's inputs and results took goes, too."""
        self._left_by = None
        request = Trim(ranks=tuple(ranks), graphs=graphs)
        self.generation.ask(request, check, num_ranks=self.generation.told_ranks)
        self.generation.arena.give_back()

    @property
    def owes_something(self) -> bool:
        """Whether a request that was given up has left something that `settle` takes in."""
        return self.generation.in_flight is not None or bool(self.models.partly_held) or bool(self.vae.partly_held)

    def owe_trim(self, ranks: Sequence[int]) -> None:
        """Have `settle` trim, once the ranks owe nothing."""
        self._owed = {*ranks, *(self._owed or ())}

    def make_mesh(self, plan: ParallelPlan, check: Check) -> None:
        """Have the plan's process groups, made unless they are there. Those of plans used long ago may go."""
        self._ensured = None
        change = self.meshes.change_for(plan, [model.layout for model in self.models])
        if change is None:
            self.meshes.use(plan)
        else:
            made = replace(change, overlap=self._overlap(plan))
            self.generation.ask(made, check, on_done=lambda _: self.meshes.apply(made))

    def ensure(self, spec: ModelSpec, plan: ParallelPlan, deltas: WeightDeltas, check: Check) -> int:
        """The handle of the model, with these deltas and the plan's mesh. Where these were used last, which are as they
        were, nothing is asked of the books of models and meshes."""
        use = (spec, plan, deltas.name, deltas.side_branch)
        if self._ensured is None or self._ensured[0] != use:
            model = self.load(spec, plan, check)
            self.apply_deltas(model, deltas, check)
            self.make_mesh(plan, check)
            self._ensured = use, model.handle
        return self._ensured[1]

    def run(
        self,
        model: int,
        plan: ParallelPlan,
        calls: Sequence[ModelCall],
        batch_groups: tuple[tuple[BatchSlice, ...], ...],
        check: Check,
        *,
        on_sent: Callable[[], None],
    ) -> RunResult:
        """Calls of a model, each batch group running its pieces; `on_sent` is called once the ranks have them.

        `model` is what `ensure` has for the plan.
        """
        began = time.perf_counter()
        results = results_of(calls) | traces_of(calls, num_ranks=len(self.generation.ranks))
        if self.generation.reach(plan.ranks) > self.generation.told_ranks:
            self.generation.arena.forget()  # further machines do not have what lies there
        specs, repeated = self.generation.arena.place(inputs_of(calls), results)
        places = tuple(call.place for call in calls)
        if any(places) and self._left_by != (model, plan):
            self._left_by, self._epoch = (model, plan), self._epoch + 1
        step = Step(
            model=model,
            plan=plan,
            calls=tuple({**call.options, **self._more} for call in calls),
            batch_groups=batch_groups,
            repeated=repeated,
            epoch=self._epoch,
            places=places if any(places) else (),
        )
        meanwhile_s = 0.0

        def sent() -> None:
            nonlocal meanwhile_s
            from_s = time.perf_counter()
            on_sent()
            meanwhile_s = time.perf_counter() - from_s

        ranks = self.generation.ask(step, check, specs, num_ranks=plan.ranks, on_sent=sent)
        outs, rooms = specs[-len(results) :][: len(calls)], specs[-len(results) :][len(calls) :]
        traces = {
            rank: whole_trace(self.generation.arena.take(room), reply.ran.trace_bytes)
            for rank, (reply, room) in enumerate(zip(ranks, rooms, strict=False))
            if reply.ran is not None and reply.ran.trace_bytes is not None
        }
        computed_s = max((reply.ran.step_s for reply in ranks if reply.ran is not None), default=0.0)
        taken = [self.generation.arena.take(spec) for spec in outs]
        wall_s = time.perf_counter() - began - max(0.0, meanwhile_s - computed_s)
        return RunResult(taken, ranks, wall_s, traces)

    def sample(
        self, model: int, plan: ParallelPlan, run: WorkerLoopRun, check: Check, *, on_step: StepDone
    ) -> WorkerLoopResult:
        """A whole sampling run."""
        began = time.perf_counter()
        self._left_by = None
        specs, _ = self.generation.arena.place(run.tensors(), run.results())
        places = {spec.name: spec for spec in specs}
        segments = self.generation.segments

        def grant(credit: int) -> None:
            segments.credit = credit

        steps = Steps(
            writers=writers(plan, run),
            preview=lambda slot: self.generation.arena.take(places[f"preview.{slot}"]),
            grant=grant,
            on_step=on_step,
        )
        request = run.request(plan, model=model)
        ranks = self.generation.ask(
            replace(request, calls=tuple({**each, **self._more} for each in request.calls)),
            check,
            specs,
            num_ranks=plan.ranks,
            on_progress=steps.take,
        )
        return WorkerLoopResult(self.generation.arena.take(places[OUT]), ranks, time.perf_counter() - began)

    def check_pattern(self, plan: ParallelPlan, check: Check, *, deadline_s: float | None = None) -> list[int]:
        """How many bytes of a known pattern arrived wrong at each rank, over the plan's mesh."""
        self.make_mesh(plan, check)
        replies = self.generation.ask(CheckCopies(plan=plan), check, deadline_s=deadline_s)
        return [reply.wrong_bytes for reply in replies]

    def damaged_copies(self, check: Check, *, deadline_s: float | None = None) -> str:
        """Have all ranks exchange a known pattern, as `check_pattern`; what arrived wrong, empty when nothing did."""
        plan = ParallelPlan(ulysses=min(len(self.generation.ranks), MAX_RANKS))
        wrong = self.check_pattern(plan, check, deadline_s=deadline_s)
        self.copies_are_sound = not any(wrong)
        counts = [f"{count} wrong bytes at rank {rank}" for rank, count in enumerate(wrong) if count]
        return f"copies between devices arrive damaged ({', '.join(counts)})" if counts else ""
