"""Which models one generation of ranks holds, in which layout, in the order of their use.

Owns the book. Asks no rank anything: what is loaded, patched and freed is held_weights.py's.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ..checkpoint import ModelSpec
from ..plan import Layout
from ..weight_patch import PRISTINE, WeightPatchSet
from ..wire.replies import LoadReply

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
class Model:
    """A model that the first `layout.ranks` ranks hold. `patches` is the set its weights have; None: not known."""

    spec: ModelSpec
    handle: int
    layout: Layout
    result: LoadResult
    patches: WeightPatchSet | None = PRISTINE

    @property
    def key(self) -> Key:
        """Under which the model is held: layouts that differ in the number of ranks alone are one."""
        return self.spec, self.layout.kind

    def grown_to(self, more: "Model") -> "Model":
        """This model once further ranks have loaded it, which are those that `more` has and this has not."""
        there = self.layout.ranks
        ranks = self.result.ranks[:there] + more.result.ranks[there:]
        result = LoadResult(ranks, more.result.wall_s, first_rank=there)
        # the further ranks' weights are as the file says; this model's may be changed
        patches = self.patches if self.patches == more.patches else None
        return Model(self.spec, self.handle, more.layout, result, patches)

    def serves(self, layout: Layout) -> bool:
        """Whether every rank that `layout` needs holds what it needs."""
        return self.layout.serves(layout)


class Models:
    """The models held, least recently used first. Reading is safe from any thread."""

    def __init__(self) -> None:
        self._held: OrderedDict[Key, Model] = OrderedDict()

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._held.values()))

    def find(self, spec: ModelSpec, layout: Layout) -> Model | None:
        """The model in a layout of this kind, on however many ranks."""
        return self._held.get((spec, layout.kind))

    def use(self, model: Model) -> None:
        """Hold the model, or note that it is used now."""
        self._held[model.key] = model
        self._held.move_to_end(model.key)

    def drop(self, handle: int) -> None:
        """Hold the model of this handle no more; nothing when there is none."""
        for model in self:
            if model.handle == handle:
                del self._held[model.key]

    def layouts_of(self, spec: ModelSpec) -> list[Model]:
        """The model in every layout it is held in."""
        return [model for model in self if model.spec == spec]
