"""How the ranks of one run are arranged: the degrees a user asks for, checked once.

Owns the degrees, their names and what the ranks hold under them. Knows no device, no process group and no model.

Ranks are numbered row by row over the axes, outermost first. A *replica* is the ranks of one place on the data axis, a
*batch group* those of one place on the data and cfg axes; the ranks of a batch group share one sequence.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple

MAX_RANKS = 8
ROWS, BLOCKS, TOKENS = "rows", "blocks", "tokens"  # what ranks can share: of a batch, of the model, of a sequence


class PlanAxis(NamedTuple):
    """What all need to know of an axis: what its ranks `share`, and whether they form a process group (`grouped`).

    Replicas send each other nothing, and stages have a link to the next. `short` is its word in the names of plans,
    `role` what one rank has of it, in words for a user, of its own `{place}` and the `{degree}`.
    """

    share: str
    grouped: bool
    short: str
    role: str


# Outermost first: neighbours in the last axis exchange the most bytes, so they are the closest devices.
PLAN_AXES: Mapping[str, PlanAxis] = {
    "data": PlanAxis(ROWS, grouped=False, short="data", role="replica {place}"),
    "cfg": PlanAxis(ROWS, grouped=True, short="cfg", role="cond {place}"),
    "pipefusion": PlanAxis(BLOCKS, grouped=False, short="pipe", role="stage {place}/{degree}"),
    "ring": PlanAxis(TOKENS, grouped=True, short="ring", role="ring part {place}/{degree}"),
    "ulysses": PlanAxis(TOKENS, grouped=True, short="uly", role="1/{degree} of the attention heads"),
}
AXES = tuple(PLAN_AXES)
TOKEN_AXES = tuple(name for name, axis in PLAN_AXES.items() if axis.share == TOKENS)
WEIGHTS = ("replicated", "sharded", "offloaded")
PIPELINE_KEYS = ("patches", "warmup_steps")
KEYS = (*AXES, "weights", *PIPELINE_KEYS, "shares")
MOST_SHARE = 1000


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the ranks of a world hold of one model: the first `ranks` of them; the others hold nothing and sleep.

    `shards` 1: each holds all of it. More: that many ranks of a replica hold the whole together. `stages` above 1: `it`
    is the blocks of a rank's stage, and what that needs of the weights outside the blocks; `stage_ranks` consecutive
    ranks have the same stage, the next ones the next. `offloaded`: what a rank holds lies in host memory and visits the
    device block by block. `shares`: of each rank, how much it holds, compared with the others, () for equal ones;
    weights stay as they were loaded where only that differs.
    """

    ranks: int
    shards: int = 1
    offloaded: bool = False
    stages: int = 1
    stage_ranks: int = 1
    shares: tuple[int, ...] = ()

    @cached_property
    def kind(self) -> tuple[int, bool, int, int]:
        """What two layouts must have in common for the bigger one to serve where the smaller is asked for."""
        return self.shards, self.offloaded, self.stages, self.stage_ranks

    def serves(self, other: "Layout") -> bool:
        """Whether weights that lie so can be used as `other` needs them, with nothing loaded or moved."""
        return self.kind == other.kind and self.ranks >= other.ranks

    def stage_of(self, rank: int) -> int:
        """The stage that a rank has, from 0."""
        return rank // self.stage_ranks % self.stages

    def shares_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The shares of ranks that hold weights together; () for equal ones."""
        found = tuple(self.shares[rank] for rank in ranks if self.shares)
        return found if len(set(found)) > 1 else ()

    @property
    def stage_shares(self) -> tuple[int, ...]:
        """The shares of the stages, each what all of its ranks have together; () for equal ones."""
        sums = [0] * self.stages
        for rank, share in enumerate(self.shares):
            sums[self.stage_of(rank)] += share
        return tuple(sums) if len(set(sums)) > 1 else ()

    def holders_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the whole of a stage together with this one, of the same replica; itself alone where each
        has all of it."""
        if self.shards == 1:
            return (rank,)
        first = rank - rank % (self.shards * self.stages)
        replica = range(first, first + self.shards * self.stages)
        return tuple(other for other in replica if self.stage_of(other) == self.stage_of(rank))

    def part_of(self, rank: int) -> float:
        """Which part of the blocks a rank holds, by its stage and its shares."""
        stages, holders = self.stage_shares, self.holders_of(rank)
        part = stages[self.stage_of(rank)] / sum(stages) if stages else 1 / self.stages
        mine = self.shares_of(holders)
        return part * (mine[holders.index(rank)] / sum(mine) if mine else 1 / len(holders))

    @property
    def name(self) -> str:
        """For reports: `replicated`, `sharded over 4`, `offloaded`, `2 stages`, `sharded over 2, 2 stages`."""
        parts = ["offloaded"] if self.offloaded else []
        if self.shards > 1:
            parts.append(f"sharded over {self.shards}")
        if self.stages > 1:
            parts.append(f"{self.stages} stages")
        return ", ".join(parts) or "replicated"


class BatchSlice(NamedTuple):
    """Rows `start` to `stop` (exclusive) of call number `call` of the model: what a batch group runs in one go."""

    call: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Degrees of the five axes; their product is the number of ranks.

    `weights`: `replicated`, each rank holds all of them; `sharded`, the ranks of a replica hold a part each;
    `offloaded`, as sharded, with the parts in host memory, which also one rank may want.

    `pipefusion` is the number of stages, each with some of the blocks. `patches`: into how many runs of rows an image
    is cut to keep all stages busy (0: as many as stages); `warmup_steps`: how many steps of a run go through whole.

    `shares`: of each rank, how much of the tokens, heads and images it computes, compared with the others, and of
    sharded weights how much it holds, as small as they can be; () for equal ones. Of stages each has blocks by the sum
    of its ranks' shares, and these share its tokens equally. Prompt and negative are equal, too.

    Raises `ValueError` naming the value, the limit and the remedy.
    """

    data: int = 1
    cfg: int = 1
    pipefusion: int = 1
    ring: int = 1
    ulysses: int = 1
    weights: str = "replicated"
    patches: int = 0
    warmup_steps: int = 1
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int):
                raise ValueError(f"{axis}={degree!r} is not a whole number; use 1 to {MAX_RANKS}")
            if not 1 <= degree <= MAX_RANKS:
                raise ValueError(f"{axis}={degree} is outside 1 to {MAX_RANKS}; use a degree in that range")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights!r} is unknown; use one of {', '.join(WEIGHTS)}")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"{self.describe()} needs {self.ranks} ranks, more than {MAX_RANKS}; lower a degree")
        if self.weights == "sharded" and self.replica_ranks == self.pipefusion:
            stage = "each stage of " if self.pipefusion > 1 else ""
            raise ValueError(
                f"weights=sharded has one rank in {stage}each of {self.data} replica(s), so nothing to share out; "
                "use weights=replicated, weights=offloaded to keep them in host memory, or raise cfg, ring or ulysses"
            )
        self._check_pipeline()
        if self.shares:
            self._check_shares()

    def _check_shares(self) -> None:
        shares = tuple(self.shares)
        told = ":".join(map(str, shares))
        if any(isinstance(share, bool) or not isinstance(share, int) for share in shares):
            raise ValueError(f"shares={told} are no whole numbers; use one from 1 on for each rank, as 2:1")
        if not all(1 <= share <= MOST_SHARE for share in shares):
            raise ValueError(
                f"shares={told} are outside 1 to {MOST_SHARE}; leave out a device that is to compute nothing"
            )
        if len(shares) != self.ranks:
            raise ValueError(
                f"shares={told} are of {len(shares)} rank(s), the plan has {self.ranks}; give one for each"
            )
        divisor = math.gcd(*shares)
        least = tuple(share // divisor for share in shares) if len(set(shares)) > 1 else ()
        object.__setattr__(self, "shares", least)

    def with_shares(self, shares: Sequence[int]) -> "ParallelPlan":
        """The same plan with the shares of devices, of which it takes the first; one rank has none."""
        taken = tuple(shares[: self.ranks]) if self.ranks > 1 else ()
        return self if taken == self.shares else replace(self, shares=taken)

    def shares_within(self, batch_group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a batch group, the shares of its ring's ranks and of its ulysses ranks: one split an axis, so that of
        both an axis has the sums over the other. () for equal ones, as those of a stage are."""
        if self.pipefusion > 1:
            return (), ()
        mine = self.shares[batch_group * self.parts : (batch_group + 1) * self.parts]
        rows = [mine[start : start + self.ulysses] for start in range(0, len(mine), self.ulysses)]
        ring, ulysses = tuple(map(sum, rows)), tuple(map(sum, zip(*rows, strict=True)))
        return tuple(each if len(set(each)) > 1 else () for each in (ring, ulysses))  # type: ignore[return-value]

    def computed_part(self, rank: int) -> float:
        """How many times an equal part of rows and tokens a rank computes by its shares; heads and rows are whole ones,
        so it is near that. Prompt and negative are equal."""
        batch_group, inside = divmod(rank, self.ranks // self.batch_groups)
        rows, (ring, ulysses) = self.group_shares(self.batch_groups), self.shares_within(batch_group)
        found = rows[batch_group] * len(rows) / sum(rows) if rows else 1.0
        found = max(found, 1.0) if self.cfg > 1 else found
        for mine, place in ((ring, inside // self.ulysses), (ulysses, inside % self.ulysses)):
            found *= mine[place] * len(mine) / sum(mine) if mine else 1.0
        return found

    def group_shares(self, groups: int) -> tuple[int, ...]:
        """The shares of `groups` groups of consecutive ranks, each the sum of its ranks'; () for equal ones."""
        size = self.ranks // groups
        found = tuple(sum(self.shares[start : start + size]) for start in range(0, len(self.shares), size))
        return found if len(set(found)) > 1 else ()

    def _check_pipeline(self) -> None:
        for key in PIPELINE_KEYS:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{key}={value!r} is not a whole number; use one from 1 on")
        if self.pipefusion == 1 and (self.patches, self.warmup_steps) != (0, 1):
            key, value = ("patches", self.patches) if self.patches else ("warmup_steps", self.warmup_steps)
            raise ValueError(f"{key}={value} needs stages, of which there is one; use pipefusion=2 or leave it out")
        if self.patches != 0 and self.patches < self.pipefusion:
            raise ValueError(
                f"patches={self.patches} is below the {self.pipefusion} stages, some of which would always wait; "
                f"use patches={self.pipefusion} or more, or fewer stages"
            )
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is below 1; the first step has no older keys to use; use 1 or more"
            )

    @cached_property
    def num_patches(self) -> int:
        """Into how many runs of rows an image is cut; 1 without stages."""
        return self.patches or self.pipefusion

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks the plan occupies."""
        return math.prod(self.degrees)

    @cached_property
    def batch_groups(self) -> int:
        """How many groups of ranks run calls, or rows of a call, of their own."""
        return math.prod(getattr(self, name) for name, axis in PLAN_AXES.items() if axis.share == ROWS)

    @cached_property
    def parts(self) -> int:
        """Ranks of one stage of a batch group: how many share a sequence."""
        return math.prod(getattr(self, axis) for axis in TOKEN_AXES)

    @cached_property
    def replica_ranks(self) -> int:
        """Ranks of one replica, over which sharded weights are shared out, stage by stage."""
        return self.ranks // self.data

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index on each axis, from 0; ranks are numbered row by row, so the last axis counts fastest."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    @property
    def takes_graphs(self) -> bool:
        """Whether blocks may run as CUDA graphs: all that one exchanges is among the ulysses ranks."""
        return self.ring == self.pipefusion == 1 and self.weights == WEIGHTS[0]

    @cached_property
    def layout(self) -> Layout:
        """What the ranks hold under this plan."""
        return Layout(
            ranks=self.ranks,
            shards=1 if self.weights == "replicated" else self.replica_ranks // self.pipefusion,
            offloaded=self.weights == "offloaded",
            stages=self.pipefusion,
            stage_ranks=self.parts if self.pipefusion > 1 else 1,
            shares=self.shares if self.pipefusion > 1 or self.weights != "replicated" else (),
        )

    @property
    def name(self) -> str:
        """One word for reports and charts: `single`, `uly2`, `ring2-uly2`, `cfg2-ring1-uly2`, `uly4-sharded`."""
        outer = [axis for axis in AXES if axis not in TOKEN_AXES and getattr(self, axis) > 1]
        beside = ("ring", "ulysses") if outer else ()  # named with outer axes whatever their degree is
        inner = [axis for axis in TOKEN_AXES if axis in beside or getattr(self, axis) > 1]
        parts = [f"{PLAN_AXES[axis].short}{getattr(self, axis)}" for axis in outer + inner] or ["single"]
        parts += [":".join(map(str, self.shares))] if self.shares else []
        return "-".join(parts if self.weights == "replicated" else [*parts, self.weights])

    def describe(self) -> str:
        """The plan as a user would type it: `ulysses=2,ring=2`, `ulysses=2,weights=sharded`."""
        parts = [f"{axis}={getattr(self, axis)}" for axis in reversed(AXES) if getattr(self, axis) > 1] or ["ulysses=1"]
        if self.patches:
            parts.append(f"patches={self.patches}")
        if self.warmup_steps != 1:
            parts.append(f"warmup_steps={self.warmup_steps}")
        if self.shares:
            parts.append(f"shares={':'.join(map(str, self.shares))}")
        return ",".join(parts if self.weights == "replicated" else [*parts, f"weights={self.weights}"])

    def to_dict(self) -> dict[str, int | str | list[int]]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return asdict(self) | {"shares": list(self.shares)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "ParallelPlan":
        """Build a plan from JSON values. Unknown keys raise `ValueError`."""
        unknown = sorted(set(values) - set(KEYS))
        if unknown:
            raise ValueError(f"unknown plan key {unknown[0]!r}; use {', '.join(KEYS)}")
        shares = values.get("shares", ())
        if not isinstance(shares, list | tuple):
            raise ValueError(f"shares={shares!r} is no list; give a whole number for each rank")
        return cls(**{**values, "shares": tuple(shares)})  # type: ignore[arg-type]  # __post_init__ checks every value

    @classmethod
    def parse(cls, text: str) -> "ParallelPlan":
        """Read `ulysses=2,ring=2,weights=sharded` (also with spaces). Raises `ValueError` on anything else."""
        values: dict[str, object] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, separator, value = (piece.strip() for piece in part.partition("="))
            if not separator:
                raise ValueError(f"{part!r} in plan {text!r} is not KEY=DEGREE; write for example ulysses=2,ring=2")
            if key in values:
                raise ValueError(f"{key} stands twice in plan {text!r}; give it once")
            if key == "shares":
                values[key] = [_whole_number(key, each) for each in value.split(":")]
            else:
                values[key] = value if key == "weights" else _whole_number(key, value)
        return cls.from_dict(values)


def crossing(run: int, num_ranks: int, ranks_by_machine: Sequence[int]) -> bool:
    """Whether any run of `run` consecutive ranks, of `num_ranks`, has ranks of two machines."""
    ends = itertools.accumulate(ranks_by_machine)
    return any(end < num_ranks and end % run for end in ends)


def refuse_unfit_machines(plan: ParallelPlan, ranks_by_machine: Sequence[int]) -> None:
    """Raise `ValueError` for a plan that needs more ranks than machines have together, and for one whose ulysses groups
    do not each lie in one machine: they exchange in every block what the others exchange seldom or one way.

    `ranks_by_machine`: how many consecutive ranks each machine has, ComfyUI's own first.
    """
    total = sum(ranks_by_machine)
    if plan.ranks > total:
        having = " + ".join(map(str, ranks_by_machine))
        raise ValueError(
            f"plan {plan.describe()} needs {plan.ranks} ranks, the machines that are there have {having} = {total}; "
            "lower a degree, or have another machine join"
        )
    if crossing(plan.ulysses, plan.ranks, ranks_by_machine):
        degrees = range(1, plan.ulysses)
        fitting = [degree for degree in degrees if not crossing(degree, plan.ranks, ranks_by_machine)]
        raise ValueError(
            f"ulysses={plan.ulysses} does not stay inside a machine, which have "
            f"{' + '.join(map(str, ranks_by_machine))} ranks; use ulysses={max(fitting)}, and ring, cfg, data or "
            "pipefusion between machines"
        )


def stages_error(stages: int, num_blocks: int) -> str | None:
    """Why a model of `num_blocks` blocks cannot be cut into so many stages, or None when it can."""
    if stages <= num_blocks:
        return None
    return f"pipefusion={stages} is more stages than the model's {num_blocks} blocks; use at most {num_blocks}"


def auto_plan(num_ranks: int, num_heads: int, *, ranks_by_machine: Sequence[int] = ()) -> ParallelPlan:
    """The largest ulysses degree that divides both ranks and heads, and each machine's ranks; ring takes what is left.

    Ulysses moves fewer bytes a step than ring (arXiv 2405.07719, table 1) and its attention is one full kernel.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"{num_ranks} ranks is outside 1 to {MAX_RANKS}; name fewer devices")
    inside = math.gcd(num_ranks, *ranks_by_machine)
    ulysses = max(d for d in range(1, inside + 1) if inside % d == 0 and num_heads % d == 0)
    return ParallelPlan(ulysses=ulysses, ring=num_ranks // ulysses)


def _whole_number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        if key in PIPELINE_KEYS:
            raise ValueError(f"{key}={value!r} is not a whole number; use one from 1 on") from None
        most = MOST_SHARE if key == "shares" else MAX_RANKS
        raise ValueError(f"{key}={value!r} is not a whole number; use 1 to {most}") from None
