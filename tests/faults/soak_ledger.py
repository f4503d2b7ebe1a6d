"""What happened in a soak, and the table that says so. Owns the counting and the wording, nothing that is done."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts by kind of fault, and the longest of each time, in seconds.

    `noticed_s`: from the fault to the error that names it. `recovered_s`: from the fault to the next right result.
    """

    injected: Counter[str] = field(default_factory=Counter)
    noticed_s: dict[str, float] = field(default_factory=dict)
    recovered_s: dict[str, float] = field(default_factory=dict)
    right: int = 0
    refused: int = 0
    cancelled: int = 0
    worst_error: float = 0.0
    wrong: list[str] = field(default_factory=list)
    growth: dict[str, tuple[float, float]] = field(default_factory=dict)
    steady_prompts: int = 0

    def noticed(self, fault: str, seconds: float) -> None:
        """An error named the fault that many seconds after it."""
        self.noticed_s[fault] = max(seconds, self.noticed_s.get(fault, 0.0))

    def recovered(self, fault: str, seconds: float) -> None:
        """A result was right again that many seconds after it."""
        self.recovered_s[fault] = max(seconds, self.recovered_s.get(fault, 0.0))

    def grew(self, before: Mapping[str, float], after: Mapping[str, float], prompts: int) -> None:
        """What was held before and after that many prompts without a fault."""
        self.growth = {name: (before[name], after[name]) for name in before}
        self.steady_prompts = prompts

    def table(self) -> str:
        lines = [f"{'fault':28} {'injected':>8} {'noticed within':>15} {'recovered within':>17}"]
        for fault, count in sorted(self.injected.items()):
            noticed, recovered = (_seconds(times.get(fault)) for times in (self.noticed_s, self.recovered_s))
            lines.append(f"{fault:28} {count:8} {noticed:>15} {recovered:>17}")
        lines += [
            f"{'all':28} {sum(self.injected.values()):8}",
            f"prompts right {self.right}, refused {self.refused}, cancelled {self.cancelled}, wrong {len(self.wrong)}; "
            f"largest relative error {self.worst_error:.1e}",
        ]
        for name, (before, after) in self.growth.items():
            lines.append(f"{name:28} {before:,.0f} -> {after:,.0f} in {self.steady_prompts} prompts")
        return "\n".join([*lines, *self.wrong[:20]])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
