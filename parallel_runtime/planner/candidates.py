"""Plans the planner weighs: any degrees on any number of ranks, also those that no version can run yet.

Owns the candidates and which of them this version runs. What a plan means is `plan.py`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..plan import AXES, SHORT_NAMES, ParallelPlan

WEIGHTS = ("replicated", "sharded", "offloaded")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Degrees and where the weights lie; like `ParallelPlan`, without its limits."""

    data: int = 1
    cfg: int = 1
    pipefusion: int = 1
    ring: int = 1
    ulysses: int = 1
    weights: str = "replicated"

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return self.data, self.cfg, self.pipefusion, self.ring, self.ulysses

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.cfg * self.pipefusion * self.ring * self.ulysses

    @property
    def parts(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def exact(self) -> bool:
        """Whether the result equals one process's; PipeFusion attends to keys and values of the step before."""
        return self.pipefusion == 1

    @property
    def name(self) -> str:
        """`single`, `uly2`, `cfg2-ring2`, `uly4-sharded`."""
        parts = [f"{SHORT_NAMES[axis]}{size}" for axis, size in zip(AXES, self.degrees, strict=True) if size > 1]
        return "-".join((parts or ["single"]) + ([] if self.weights == "replicated" else [self.weights]))

    def plan(self) -> ParallelPlan | None:
        """The plan this version runs, or None when it cannot run it."""
        values = {**dict(zip(AXES, self.degrees, strict=True)), "weights": self.weights}
        try:
            return ParallelPlan.from_dict(values)
        except ValueError:
            return None


def candidates(ranks: int, *, heads: int, batch: int, guided: bool, blocks: int) -> Iterator[Candidate]:
    """Every useful candidate on exactly `ranks` ranks, weights replicated first.

    A degree is useful when it has something to share out: data images, cfg the two calls of a step, ulysses heads,
    PipeFusion blocks.
    """
    for degrees in _factors(ranks, len(AXES)):
        data, cfg, pipefusion, ring, ulysses = degrees
        useful = cfg in ((1, 2) if guided else (1,)) and batch % data == 0 and pipefusion <= blocks
        if useful and heads % ulysses == 0:
            found = Candidate(data=data, cfg=cfg, pipefusion=pipefusion, ring=ring, ulysses=ulysses)
            yield found
            if found.ranks > found.data:
                yield replace(found, weights="sharded")
            yield replace(found, weights="offloaded")


def _factors(product: int, places: int) -> Iterator[tuple[int, ...]]:
    if places == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in _factors(product // first, places - 1):
                yield (first, *rest)
