"""One generation of ranks with what it has been given: models and meshes, by number.

Owns what each request of the wire says and what its answers mean. Does not own the book of models (models.py), how
ranks are asked, watched and ended (supervisor.py), nor when there is a new generation (pool.py).

A request that its caller gives up stays in flight, since a collective must never be abandoned. `settle` takes in what
is owed before anything else is asked; until then nobody writes the shared memory that the request reads. Only a LOAD
and a PATCH, which are no collectives, and a RUN, which stops where its credit ends, are told to stop early, by the
cancel word of the control page.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint import ModelSpec
from ..patch import PatchBatch, PatchSet, pack
from ..plan import MAX_RANKS, Layout, ParallelPlan
from ..strategies.lanes import Piece
from ..wire.protocol import Op, TensorSpec
from ..wire.requests import (
    OPS,
    AnyRequest,
    ChangeWeights,
    CheckCopies,
    Load,
    MakeMesh,
    MeasureDevice,
    Probe,
    SetStrengths,
    Step,
    Trim,
    Unload,
    to_body,
)
from .arena import OUT, Arena
from .calls import ModelCall, inputs_of, results_of, traces_of, whole_trace
from .models import LoadResult, Model, Models
from .resident import ResidentRun, StepDone, Steps, writers
from .stale import StaleBook
from .supervisor import Generation, Request

Check = Callable[[], None]
Progress = Callable[[int, int], None]

GIVEN_UP_EARLY = (Op.LOAD, Op.PATCH, Op.RUN)
CHANGES_WEIGHTS = (Op.LOAD, Op.UNLOAD, Op.PATCH, Op.STRENGTHS)


class Crew:
    """A generation, and what it holds. Every method raises PoolError when a rank fails; the generation is over then.

    `numbers` gives the requests' numbers, which rise over all generations. `contents` is the number of the last request
    that may have changed which weights the ranks hold: while it stays, so does what was found there.
    """

    def __init__(self, generation: Generation, numbers: Iterator[int]) -> None:
        self.generation = generation
        self.models = Models()
        self.meshes: dict[ParallelPlan, int] = {}
        self.memory: list[Any] = []  # each rank's last report
        self.copies_are_sound = len(generation.ranks) == 1  # until `damaged_copies` finds that they are
        self._numbers = numbers
        self.contents = next(numbers)
        self._handles = 0
        self._halves: list[int] = []  # models that some ranks may hold and others not: cancelled or evicted
        self._stale = StaleBook()
        self._arena = Arena(generation.segments, announce=generation.attach)

    @property
    def busy(self) -> bool:
        """Whether the ranks owe answers."""
        return self.generation.in_flight is not None

    def settle(self, check: Check, *, deadline_s: float) -> None:
        """See that all ranks are well and owe nothing: take in what a request given up left behind, READY included."""
        self.generation.wait(check)
        self._free_halves(check, deadline_s=deadline_s)

    def _free_halves(self, check: Check, *, deadline_s: float) -> None:
        while self._halves:
            self._ask(Unload(model=self._halves[-1]), check, deadline_s=deadline_s, on_done=self._on_half_freed)

    def _let_go(self, handle: int) -> None:
        """Hold a model no more that some ranks may hold still; the next request frees it there."""
        self.models.drop(handle)
        self._halves.append(handle)

    def load(
        self,
        spec: ModelSpec,
        layout: Layout,
        check: Check,
        *,
        deadline_s: float,
        mesh: int | None = None,
        progress: Progress | None = None,
        budget_bytes: int | None = None,
    ) -> Model:
        """The model in that layout, loaded on the ranks that lack it; those without room first evict what is oldest.

        `mesh` is the handle of a mesh whose ranks put sharded weights together. Given up half-way, no rank keeps any
        of the model.
        """
        held = self.models.find(spec, layout)
        if held is not None and held.serves(layout):
            self.models.use(held)
            return held
        handle = self._next_handle() if held is None else held.handle
        first, began = 0 if held is None else held.layout.ranks, time.perf_counter()
        self.generation.mapped[handle] = spec

        def report(request: Request) -> None:
            if progress is not None:
                progress(*_sum_of(request.progress, num_ranks=layout.ranks - first))

        def keep(request: Request) -> None:
            if any(reply.get("cancelled") for reply in request.replies.values()):
                self._let_go(handle)
            else:
                result = LoadResult(request.ranked(), time.perf_counter() - began)
                new = Model(spec, handle, layout, result)
                self.models.use(new if held is None else held.grown_to(new))
                self._remember_memory(request)
            for evicted in {number for reply in request.replies.values() for number in reply.get("evicted", ())}:
                self._let_go(evicted)

        load = Load(
            model=handle,
            spec=spec,
            layout=layout,
            first_rank=first,
            mesh=mesh,
            budget_bytes=budget_bytes,
            eviction_order=tuple(model.handle for model in self.models if model is not held),
        )
        self._ask(load, check, deadline_s=deadline_s, on_progress=report, on_done=keep)
        # A rank may have had to evict what its peers could keep.
        self._free_halves(check, deadline_s=deadline_s)
        model = self.models.find(spec, layout)
        if model is None:
            raise RuntimeError(f"{spec.path} was loaded and is not there")
        return model

    def unload(self, spec: ModelSpec, layout: Layout | None, check: Check, *, deadline_s: float) -> None:
        """Free the model in layouts of this kind, or in all; nothing when it is not there."""
        for model in self.models.layouts_of(spec):
            if layout is None or model.layout.kind == layout.kind:
                self._free(model, check, deadline_s=deadline_s)

    def _free(self, model: Model, check: Check, *, deadline_s: float) -> None:
        def forget(request: Request) -> None:
            del self.generation.mapped[model.handle]
            self._remember_memory(request)

        self.models.drop(model.handle)
        self._stale.forget()
        self._ask(Unload(model=model.handle), check, deadline_s=deadline_s, on_done=forget)

    def trim(self, ranks: Sequence[int], check: Check, *, deadline_s: float) -> None:
        """Have all ranks keep nothing of runs that ended, and these give back what torch caches on their device."""
        self._stale.forget()
        self._ask(Trim(ranks=tuple(ranks)), check, deadline_s=deadline_s, on_done=self._remember_memory)

    def patch(self, model: Model, patches: PatchSet, check: Check, *, deadline_s: float) -> None:
        """Make the model's weights pristine plus `patches`; nothing when they are that already.

        Given up half-way, the weights are of no known change, and the next call makes them whole.
        """
        held = model.patches
        if held is not None and (held.name, held.side_branch) == (patches.name, patches.side_branch):
            return
        model.patches = None
        if held is not None and patches.differs_in_strength_alone(held):
            strengths = SetStrengths(model=model.handle, strengths=tuple(patches.strengths))
            request = self._ask(strengths, check, deadline_s=deadline_s, on_done=self._remember_memory)
            if all(reply.get("set") for reply in request.replies.values()):
                model.patches = patches
                return
        batches = list(pack(patches.patches)) or [PatchBatch([], {})]
        for number, batch in enumerate(batches):
            specs = self._arena.place(batch.tensors).specs
            change = ChangeWeights(
                model=model.handle,
                records=tuple(batch.records),
                side_branch=patches.side_branch,
                first=number == 0,
                last=number == len(batches) - 1,
            )
            request = self._ask(change, check, specs, deadline_s=deadline_s, on_done=self._remember_memory)
            if any(reply.get("cancelled") for reply in request.replies.values()):
                return
        model.patches = patches

    def mesh(self, plan: ParallelPlan, check: Check, *, deadline_s: float) -> int:
        """The handle of the plan's process groups, made unless they are there."""
        if plan not in self.meshes:
            handle = self._next_handle()

            def keep(_: Request) -> None:
                self.meshes[plan] = handle

            self._ask(MakeMesh(mesh=handle, plan=plan), check, deadline_s=deadline_s, on_done=keep)
        return self.meshes[plan]

    def note_use(self, model: Model, plan: ParallelPlan) -> None:
        """The model and the plan are in use now: the last to be evicted, and the last in `meshes`."""
        self.models.use(model)
        if next(reversed(self.meshes)) != plan:  # a reader in another thread has the old dict or the new one
            others = {other: handle for other, handle in self.meshes.items() if other != plan}
            self.meshes = {**others, plan: self.meshes[plan]}

    def run(
        self,
        model: Model,
        mesh: int,
        plan: ParallelPlan,
        calls: Sequence[ModelCall],
        lanes: Sequence[Sequence[Piece]],
        check: Check,
        *,
        deadline_s: float,
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """Calls of a model, each lane running its pieces: the results in memory of their own, and the reports."""
        results = [*results_of(calls), *traces_of(calls, num_ranks=len(self.generation.ranks))]
        placed = self._arena.place(inputs_of(calls), results)
        specs = placed.specs
        step = Step(
            model=model.handle,
            mesh=mesh,
            calls=tuple(dict(call.options) for call in calls),
            lanes=tuple(tuple((piece.call, piece.start, piece.stop) for piece in lane) for lane in lanes),
            repeated=placed.repeated,
            pipeline=self._stale.enter(calls, lanes, plan, model.handle),
        )
        request = self._ask(step, check, specs, deadline_s=deadline_s, on_done=self._remember_memory)
        self._stale.done()
        outs, traces = specs[-len(results) :][: len(calls)], specs[-len(results) :][len(calls) :]
        ranks = request.ranked()
        for rank, spec in zip(ranks, traces, strict=False):
            if "trace_bytes" in rank:
                rank["trace"] = whole_trace(self._arena.take(spec), rank.pop("trace_bytes"))
        return [self._arena.take(spec) for spec in outs], ranks

    def sample(
        self,
        model: Model,
        mesh: int,
        plan: ParallelPlan,
        run: ResidentRun,
        check: Check,
        *,
        on_step: StepDone,
        deadline_s: float,
    ) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """A whole sampling run: its latent in memory of its own, and the reports."""
        if run.release_modulations:
            model.patches = None  # so that the next request has them made whole
            self.contents = next(self._numbers)
        self._stale.forget()
        specs = self._arena.place(run.tensors(), run.results()).specs
        places = {spec.name: spec for spec in specs}
        segments = self.generation.segments

        def grant(credit: int) -> None:
            segments.credit = credit

        steps = Steps(
            writers=writers(plan, run),
            preview=lambda slot: self._arena.take(places[f"preview.{slot}"]),
            grant=grant,
            on_step=on_step,
        )
        request = self._ask(
            run.request(plan, model=model.handle, mesh=mesh),
            check,
            specs,
            deadline_s=deadline_s,
            on_progress=lambda request: steps.take(request.progress),
            on_done=self._remember_memory,
        )
        steps.take(request.progress)
        return self._arena.take(places[OUT]), request.ranked()

    def measure(self, check: Check, *, deadline_s: float) -> list[dict[str, Any]]:
        """What each rank says of its device."""
        return self._ask(MeasureDevice(), check, deadline_s=deadline_s).ranked()

    def check_pattern(self, mesh: int, check: Check, *, deadline_s: float) -> list[int]:
        """How many bytes of a known pattern arrived wrong at each rank."""
        request = self._ask(CheckCopies(mesh=mesh), check, deadline_s=deadline_s)
        return [int(reply["wrong_bytes"]) for reply in request.ranked()]

    def probe(self, mesh: int, check: Check, *, deadline_s: float) -> list[dict[str, Any]]:
        """What each rank measured, in rank order; see `rank/probe.py`."""
        return self._ask(Probe(mesh=mesh), check, deadline_s=deadline_s).ranked()

    def damaged_copies(self, check: Check, *, deadline_s: float) -> str:
        """Have all ranks exchange a known pattern, as `check_pattern`; what arrived wrong, empty when nothing did."""
        plan = ParallelPlan(ulysses=min(len(self.generation.ranks), MAX_RANKS))
        wrong = self.check_pattern(self.mesh(plan, check, deadline_s=deadline_s), check, deadline_s=deadline_s)
        self.copies_are_sound = not any(wrong)
        counts = [f"{count} wrong bytes at rank {rank}" for rank, count in enumerate(wrong) if count]
        return f"copies between devices arrive damaged ({', '.join(counts)})" if counts else ""

    def _ask(
        self,
        asked: AnyRequest,
        check: Check,
        tensors: tuple[TensorSpec, ...] = (),
        *,
        deadline_s: float,
        on_progress: Callable[[Request], None] = lambda _: None,
        on_done: Callable[[Request], None] = lambda _: None,
    ) -> Request:
        check()
        op = OPS[type(asked)]
        request = Request(op, next(self._numbers), deadline_s, on_progress=on_progress, on_done=on_done)
        if op in CHANGES_WEIGHTS:
            self.contents = request.number
        self.generation.ask(request, to_body(asked), tensors)
        try:
            self.generation.wait(check)
        finally:
            if self.generation.in_flight is request:
                self._give_up(request)
        return request

    def _give_up(self, request: Request) -> None:
        """The caller does not want the request any more, nor to hear of it."""
        request.on_progress = lambda _: None
        if request.op in GIVEN_UP_EARLY:
            self.generation.segments.cancelled_request = request.number

    def _next_handle(self) -> int:
        """A number that no model or mesh of this generation has had."""
        self._handles += 1
        return self._handles

    def _on_half_freed(self, _: Request) -> None:
        del self.generation.mapped[self._halves.pop()]

    def _remember_memory(self, request: Request) -> None:
        if not any(reply.get("cancelled") for reply in request.replies.values()):
            self.memory = [reply.get("memory") for reply in request.ranked()]


def _sum_of(progress: Mapping[int, Mapping[str, Any]], *, num_ranks: int) -> tuple[int, int]:
    """Bytes loaded and to load over all ranks. One that has not reported yet has as many to load as another."""
    loaded = sum(int(body["loaded_bytes"]) for body in progress.values())
    totals = [int(body["total_bytes"]) for body in progress.values()]
    return loaded, sum(totals) + (num_ranks - len(totals)) * max(totals)
