"""Which models one generation of ranks holds, in which layout, and how their weights are loaded, changed and freed.

Owns the order in which models go when room is needed.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..checkpoint import ModelSpec
from ..plan import Layout, ParallelPlan
from ..weight_delta import PRISTINE, DeltaBatch, WeightDeltas, pack
from ..weights.host_memory import host_memory
from ..wire.replies import Cancelled, LoadReply, Progress
from ..wire.requests import ChangeWeights, Load, SetStrengths, Unload
from .generation import Generation

HOST_LEFT_BYTES = 2 << 30  # what ComfyUI, too, leaves of host memory where it pins weights

Key: TypeAlias = tuple[ModelSpec, tuple[int, bool, int, int]]


@dataclass(frozen=True)
class LoadResult:
    """A loaded model: the ranks' replies in rank order, and how long loading took the last time.

    Those before `first_rank` had it then.
    """

    ranks: list[LoadReply]
    wall_s: float
    first_rank: int = 0

    @property
    def dtype(self) -> str:
        """The dtype that the ranks compute in, without "torch."."""
        return self.ranks[0].dtype

    @property
    def parameter_bytes(self) -> list[int]:
        """Bytes of weights on each rank; 0 on those that the layout leaves out."""
        return [rank.parameter_bytes for rank in self.ranks]

    @property
    def rank_load_s(self) -> dict[int, float]:
        """Seconds by rank, its device waited for, of the ranks that loaded the last time."""
        loaded = enumerate(self.ranks[self.first_rank :], self.first_rank)
        return {number: rank.load_s for number, rank in loaded if rank.load_s is not None}


@dataclass
class HeldModel:
    """A model that the first `layout.ranks` ranks hold.

    `deltas` is the set that its weights have, as `WeightDeltas.applied`; None: not known.
    """

    spec: ModelSpec
    handle: int
    layout: Layout
    result: LoadResult
    deltas: WeightDeltas | None = PRISTINE

    @property
    def key(self) -> Key:
        """Under which the model is held: layouts that differ in the number of ranks alone are one."""
        return self.spec, self.layout.kind

    def grown_to(self, more: "HeldModel") -> "HeldModel":
        """This model once further ranks have loaded it, which are those that `more` has and this has not."""
        there = self.layout.ranks
        ranks = self.result.ranks[:there] + more.result.ranks[there:]
        result = LoadResult(ranks, more.result.wall_s, first_rank=there)
        # the further ranks' weights are as the file says; this model's may be changed
        named = [each and (each.name, each.side_branch) for each in (self.deltas, more.deltas)]
        deltas = self.deltas if named[0] == named[1] else None
        return HeldModel(self.spec, self.handle, more.layout, result, deltas)


Check = Callable[[], None]
OnProgress = Callable[[int, int], None]


class HeldWeights:
    """Models in layouts on the ranks of `generation`, least recently used first. `handles` gives new numbers.

    Iterating and `find` are safe from any thread. `budget_bytes`: weights that a rank may hold; None: as much as its
    device has free.
    """

    def __init__(
        self,
        generation: Generation,
        handles: Iterator[int],
        *,
        load_deadline_s: float,
        budget_bytes: int | None,
    ) -> None:
        self._held: OrderedDict[Key, HeldModel] = OrderedDict()
        self._listed: tuple[HeldModel, ...] = ()  # the same, for other threads
        self._generation, self._handles = generation, handles
        self._load_deadline_s, self._budget_bytes = load_deadline_s, budget_bytes
        # Models that some of so many ranks may hold and others not: cancelled or evicted.
        self.partly_held: dict[int, int] = {}

    def __iter__(self) -> Iterator[HeldModel]:
        return iter(self._listed)

    def find(self, spec: ModelSpec, layout: Layout) -> HeldModel | None:
        """The model in a layout of this kind, on however many ranks."""
        return self._held.get((spec, layout.kind))

    def load(
        self,
        spec: ModelSpec,
        layout: Layout,
        check: Check,
        *,
        plan: ParallelPlan | None = None,
        progress: OnProgress | None = None,
    ) -> HeldModel:
        """The model in that layout, loaded on the ranks that lack it; those without room first evict what is oldest.

        `plan`: that by whose mesh ranks put sharded weights together. Given up half-way, no rank keeps any of the
        model.
        """
        held = self.find(spec, layout)
        if held is not None and held.layout.serves(layout):
            self._use(held)
            return held
        handle = next(self._handles) if held is None else held.handle
        if layout.offloaded and held is None:
            self._make_host_room(spec, layout, check)
        first, began = 0 if held is None else held.layout.ranks, time.perf_counter()
        layouts = {model.handle: model.layout for model in self}
        self._generation.mapped[handle] = spec

        def report(said: Mapping[int, Progress]) -> None:
            if progress is not None:
                progress(*_sum_of(said, num_ranks=layout.ranks - first))

        def keep(replies: Sequence[LoadReply | Cancelled]) -> None:
            loaded = [reply for reply in replies if isinstance(reply, LoadReply)]
            if len(loaded) < len(replies):
                self._let_go(handle, layout)
            else:
                new = HeldModel(spec, handle, layout, LoadResult(loaded, time.perf_counter() - began))
                self._use(new if held is None else held.grown_to(new))
            for evicted in {number for reply in replies for number in reply.evicted}:
                self._let_go(evicted, layouts[evicted])

        load = Load(
            model=handle,
            spec=spec,
            layout=layout,
            first_rank=first,
            plan=plan,
            budget_bytes=self._budget_bytes,
            eviction_order=tuple(model.handle for model in self if model is not held),
        )
        self._generation.ask(
            load, check, num_ranks=layout.ranks, deadline_s=self._load_deadline_s, on_progress=report, on_done=keep
        )
        self.free_partly_held(check)  # a rank may have had to evict what its peers could keep
        model = self.find(spec, layout)
        if model is None:
            raise RuntimeError(f"{spec.path} was loaded and is not there")
        return model

    def unload(self, spec: ModelSpec, layout: Layout | None, check: Check) -> None:
        """Free the model in layouts of this kind, or in all; nothing when it is not there."""
        for model in self:
            if model.spec == spec and (layout is None or model.layout.kind == layout.kind):
                self._let_go(model.handle, model.layout)
                self._free(model.handle, check, num_ranks=model.layout.ranks)

    def apply_deltas(self, model: HeldModel, deltas: WeightDeltas, check: Check) -> None:
        """Make the model's weights pristine plus `deltas`; nothing when they are that already.

        Given up half-way, the weights are of no known change, and the next call makes them whole.
        """
        held = model.deltas
        if held is not None and (held.name, held.side_branch) == (deltas.name, deltas.side_branch):
            return
        known = deltas.applied(check)
        if held is not None and known.same_as(held):
            model.deltas = known
            return
        model.deltas = None
        if held is not None and known.differs_in_strength_alone(held) and deltas.strengths_fit:
            strengths = SetStrengths(model=model.handle, strengths=tuple(deltas.strengths))
            replies = self._generation.ask(strengths, check, num_ranks=model.layout.ranks)
            if all(reply.changed for reply in replies):
                model.deltas = known
                return
        batches = list(pack(deltas.deltas)) or [DeltaBatch([], {})]
        for number, batch in enumerate(batches):
            change = ChangeWeights(
                model=model.handle,
                records=tuple(batch.records),
                side_branch=deltas.side_branch,
                first=number == 0,
                last=number == len(batches) - 1,
            )
            specs, _ = self._generation.arena.place(batch.tensors)
            self._generation.ask(change, check, specs, num_ranks=model.layout.ranks)
        model.deltas = known

    def free_partly_held(self, check: Check) -> None:
        """Free what only some ranks may hold still."""
        while self.partly_held:
            handle, num_ranks = next(reversed(self.partly_held.items()))
            self._free(handle, check, num_ranks=num_ranks)

    def _make_host_room(self, spec: ModelSpec, layout: Layout, check: Check) -> None:
        """Free models in host memory, the oldest first, until this machine's has room for another one: ranks make room
        on devices alone."""
        here = range(min(layout.ranks, self._generation.devices_by_machine[0]))
        needed = spec.size_bytes * sum(map(layout.part_of, here)) + HOST_LEFT_BYTES
        for model in self:
            if model.layout.offloaded and host_memory()[0] < needed:
                self.unload(model.spec, model.layout, check)

    def _use(self, model: HeldModel) -> None:
        """Hold the model, or note that it is used now."""
        self._held[model.key] = model
        self._held.move_to_end(model.key)
        self._listed = tuple(self._held.values())

    def _let_go(self, handle: int, layout: Layout) -> None:
        """Hold a model no more that some ranks may hold still; the next request frees it there."""
        for model in self:
            if model.handle == handle:
                del self._held[model.key]
        self._listed = tuple(self._held.values())
        self.partly_held[handle] = layout.ranks

    def _free(self, handle: int, check: Check, *, num_ranks: int) -> None:
        def forget(_: object) -> None:
            del self._generation.mapped[handle]
            self.partly_held.pop(handle, None)

        self._generation.ask(Unload(model=handle), check, num_ranks=num_ranks, on_done=forget)


def _sum_of(progress: Mapping[int, Progress], *, num_ranks: int) -> tuple[int, int]:
    """Bytes loaded and to load over all ranks. One that has not reported yet has as many to load as another."""
    totals = [said.total for said in progress.values()]
    return sum(said.done for said in progress.values()), sum(totals) + (num_ranks - len(totals)) * max(totals)
