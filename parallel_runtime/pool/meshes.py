"""Which plans' process groups one generation of ranks has, in the order of their use, and which go for another plan.

Owns the book. The parent keeps it, so that all ranks free the same groups in the same order; ranks make and free them
(worker/mesh.py). A group costs a rank threads, and on GPUs a communicator: some hundred MiB and a stream. So groups of
plans used before stay while they take no more than the planner counts for them (planner/memory.py).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..exchange_groups import ExchangeGroup, groups_of, weight_groups
from ..plan import Layout, ParallelPlan
from ..planner.memory import extra_bytes, kept_bytes


@dataclass(frozen=True, kw_only=True)
class Change:
    """What becomes of the meshes where a plan is used: it has the mesh of `handle`, those of `dropped` plans go.

    `freed` are the groups that nothing uses any more then, in the order in which they were made.
    """

    plan: ParallelPlan
    handle: int
    dropped: dict[ParallelPlan, int]
    freed: tuple[ExchangeGroup, ...]


class Meshes:
    """The plans whose groups `num_ranks` ranks have, the one used last last. Reading is safe from any thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._handles: dict[ParallelPlan, int] = {}  # replaced, never changed, for readers in other threads
        self._made: dict[ExchangeGroup, None] = {}

    def __iter__(self) -> Iterator[ParallelPlan]:
        return iter(self._handles)

    @property
    def newest(self) -> ParallelPlan | None:
        """The plan used last."""
        return next(reversed(self._handles), None)

    def use(self, plan: ParallelPlan) -> int | None:
        """The handle of the plan's mesh, None when there is none."""
        if plan in self._handles and self.newest != plan:
            others = {other: handle for other, handle in self._handles.items() if other != plan}
            self._handles = {**others, plan: self._handles[plan]}
        return self._handles.get(plan)

    def change_for(self, plan: ParallelPlan, held: Iterable[Layout], new_handle: Callable[[], int]) -> Change | None:
        """What the ranks must do before the plan is used, where weights are held in such layouts; None for nothing."""
        handle = self._handles.get(plan)
        if self.newest == plan:
            return None
        kept = {group for layout in held for group in weight_groups(layout)}
        own, dropped = set(groups_of(plan, self._num_ranks)), {}
        for other, its_handle in reversed(self._handles.items()):
            more = kept | set(groups_of(other, self._num_ranks))
            if other == plan or extra_bytes(more - own, self._num_ranks) <= kept_bytes(self._num_ranks):
                kept = more
            else:
                dropped[other] = its_handle
        if handle is not None and not dropped:
            return None
        freed = tuple(group for group in self._made if group not in kept | own)
        return Change(plan=plan, handle=new_handle() if handle is None else handle, dropped=dropped, freed=freed)

    def apply(self, change: Change) -> None:
        """Note that the ranks have done it."""
        left = {plan: handle for plan, handle in self._handles.items() if plan not in change.dropped}
        self._handles = {**left, change.plan: change.handle}
        made = (*self._made, *groups_of(change.plan, self._num_ranks))
        self._made = dict.fromkeys(group for group in made if group not in change.freed)
