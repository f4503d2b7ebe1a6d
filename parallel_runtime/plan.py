"""How the ranks of one run are arranged: the degrees a user asks for, checked once.

Owns the degrees and their names. Knows no device, no process group and no model; whether a degree fits a model's
heads is `heads_error`, called by whoever knows the heads.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

MAX_RANKS = 8
# Outermost first: neighbours in the last axis exchange the most bytes, so they are the closest devices.
AXES = ("data", "cfg", "pipefusion", "ring", "ulysses")
BUILT_AXES = ("ring", "ulysses")
SHORT_NAMES = {"data": "data", "cfg": "cfg", "pipefusion": "pipe", "ring": "ring", "ulysses": "uly"}
WEIGHTS = ("replicated", "sharded")


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Degrees of the five axes; their product is the number of ranks.

    Raises `ValueError` naming the value, the limit and the remedy.
    """

    data: int = 1
    cfg: int = 1
    pipefusion: int = 1
    ring: int = 1
    ulysses: int = 1
    weights: str = "replicated"

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int):
                raise ValueError(f"{axis}={degree!r} is not a whole number; use 1 to {MAX_RANKS}")
            if not 1 <= degree <= MAX_RANKS:
                raise ValueError(f"{axis}={degree} is outside 1 to {MAX_RANKS}; use a degree in that range")
            if degree > 1 and axis not in BUILT_AXES:
                raise ValueError(f"{axis}={degree} is not available in this version; use {axis}=1 with {_built()}")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights!r} is unknown; use one of {', '.join(WEIGHTS)}")
        if self.weights == "sharded":
            raise ValueError("weights=sharded is not available in this version; use weights=replicated")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"{self.describe()} needs {self.ranks} ranks, more than {MAX_RANKS}; lower a degree")

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def ranks(self) -> int:
        """Number of ranks the plan occupies."""
        total = 1
        for degree in self.degrees:
            total *= degree
        return total

    @property
    def name(self) -> str:
        """One word for reports and charts: `single`, `uly2`, `ring2-uly2`."""
        parts = [f"{SHORT_NAMES[axis]}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        if self.weights == "sharded":
            parts.append("sharded")
        return "-".join(parts) or "single"

    def describe(self) -> str:
        """The plan as a user would type it: `ulysses=2,ring=2`."""
        parts = [f"{axis}={getattr(self, axis)}" for axis in reversed(AXES) if getattr(self, axis) > 1]
        return ",".join(parts) or "ulysses=1"

    def to_dict(self) -> dict[str, int | str]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "ParallelPlan":
        """Build a plan from JSON values. Unknown keys raise `ValueError`."""
        unknown = sorted(set(values) - {*AXES, "weights"})
        if unknown:
            raise ValueError(f"unknown plan key {unknown[0]!r}; use {', '.join((*AXES, 'weights'))}")
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every value

    @classmethod
    def parse(cls, text: str) -> "ParallelPlan":
        """Read `ulysses=2,ring=2` (also with spaces). Raises `ValueError` on anything else."""
        values: dict[str, object] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, separator, value = (piece.strip() for piece in part.partition("="))
            if not separator:
                raise ValueError(f"{part!r} in plan {text!r} is not KEY=DEGREE; write for example ulysses=2,ring=2")
            if key in values:
                raise ValueError(f"{key} stands twice in plan {text!r}; give it once")
            values[key] = value if key == "weights" else _whole_number(key, value)
        return cls.from_dict(values)


def heads_error(ulysses: int, num_heads: int) -> str | None:
    """Why `ulysses` cannot split `num_heads` heads, or None when it can."""
    if num_heads % ulysses == 0:
        return None
    fitting = ", ".join(str(degree) for degree in range(1, num_heads + 1) if num_heads % degree == 0)
    return (
        f"ulysses={ulysses} does not divide {num_heads} heads; use one of {fitting}, "
        f"or ring={ulysses}, which takes any number of heads"
    )


def auto_plan(num_ranks: int, num_heads: int) -> ParallelPlan:
    """The largest ulysses degree that divides both ranks and heads; ring takes what is left.

    Ulysses moves fewer bytes a step than ring (arXiv 2405.07719, table 1) and its attention is one full kernel.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"{num_ranks} ranks is outside 1 to {MAX_RANKS}; name fewer devices")
    ulysses = max(d for d in range(1, num_ranks + 1) if num_ranks % d == 0 and num_heads % d == 0)
    return ParallelPlan(ulysses=ulysses, ring=num_ranks // ulysses)


def _whole_number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{key}={value!r} is not a whole number; use 1 to {MAX_RANKS}") from None


def _built() -> str:
    return " and ".join(BUILT_AXES)
