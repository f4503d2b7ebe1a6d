"""Holds predictions against published rows: errors of time, and how often the plan taken is the one that was fastest.

Owns the four planners that are compared and the rule of thumb beside them.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.planner_model import HERE, Row, calibration_of, new_machine, predict_row, read_rows, table_calibration
from parallel_runtime.planner.choose import Prediction, best_of

EQUAL = 1.05


@dataclass(frozen=True)
class Judged:
    """A row and what the planner says of it."""

    row: Row
    prediction: Prediction

    @property
    def predicted_s(self) -> float:
        """Seconds, as the row counts them."""
        return self.prediction.run_s

    @property
    def error(self) -> float:
        """Relative error of the predicted time, with its sign."""
        return self.predicted_s / self.row.seconds - 1


@dataclass(frozen=True)
class Contest:
    """Plans published side by side: the one that is taken and the one that was fastest."""

    name: str
    taken: Judged
    fastest: Judged
    any_fitted: bool  # whether constants were fitted to a row of this setting, of any number of ranks

    @property
    def right(self) -> bool:
        """Whether they are the same."""
        return self.taken is self.fastest

    @property
    def published(self) -> bool:
        """Whether others measured it."""
        return self.fastest.row.published

    @property
    def near(self) -> bool:
        """Whether the plan taken was at most 5 % slower."""
        return self.taken.row.seconds <= EQUAL * self.fastest.row.seconds

    @property
    def loss(self) -> float:
        """How much slower the plan taken was, as published."""
        return self.taken.row.seconds / self.fastest.row.seconds - 1


def kept_constants() -> dict:
    """The constants as planner_fit.py left them."""
    return json.loads((HERE / "planner_constants.json").read_text())


def computing_only(constants: dict) -> dict:
    """The same constants for a planner that knows no communication and no launch: what the rest of it is worth."""
    free = dict.fromkeys(("operation_s", "merge_passes"), 0.0)
    software = {name: {**values, **free} for name, values in constants["software"].items()}
    links = {name: {"bandwidth": 1e15, "latency_s": 0.0, "contention": 0.0} for name in constants["links"]}
    return {**constants, "software": software, "links": links}


def judge(constants: dict | None = None, machine: Callable = calibration_of) -> list[Judged]:
    """All rows with their predictions, by the constants kept or by others; `machine` says what is known of a row's."""
    constants = kept_constants() if constants is None else constants
    judged = []
    for row in read_rows():
        judged.append(Judged(row, predict_row(row, constants, machine(row, constants))))
    return judged


def planners() -> dict[str, list[Judged]]:
    """What each planner says of all rows, by its column in the page."""
    return {
        "calibrated": judge(),
        "table": judge(machine=table_calibration),
        "table elsewhere": judge(machine=new_machine),
        "computing only": judge(computing_only(kept_constants())),
    }


def held_out_errors(judged: Iterable[Judged]) -> list[float]:
    """Absolute relative errors of the rows no constant was fitted to."""
    return [abs(each.error) for each in judged if not each.row.fitted]


def quickest(rows: Sequence[Judged]) -> Judged:
    """The planner's choice."""
    return min(rows, key=lambda each: each.predicted_s)


def as_auto(rows: Sequence[Judged]) -> Judged:
    """What auto takes of them: of plans that are predicted alike the one that its rules prefer."""
    best = best_of(sorted((each.prediction for each in rows), key=lambda prediction: prediction.prompt_s))
    return next(each for each in rows if each.prediction is best)


def rule_of_thumb(rows: Sequence[Judged]) -> Judged:
    """A choice without any planner: no PipeFusion, the most ranks, cfg parallel first, then the largest ulysses."""

    def merit(each: Judged) -> tuple[bool, int, int, int]:
        plan = each.row.plan
        return plan.pipefusion == 1, plan.ranks, plan.cfg, plan.ulysses

    return max(rows, key=merit)


def contests(
    judged: Sequence[Judged], *, by_ranks: bool, choose: Callable[[Sequence[Judged]], Judged] = quickest
) -> list[Contest]:
    """What to choose among: all plans of a setting, or (`by_ranks`) those on the same number of ranks; two or more."""
    groups: dict[str, list[Judged]] = {}
    for each in judged:
        name = f"{each.row.table}, {each.row.plan.ranks} ranks" if by_ranks else each.row.table
        groups.setdefault(name, []).append(each)
    fitted = {each.row.table for each in judged if each.row.fitted}
    return [
        Contest(name, choose(rows), min(rows, key=lambda each: each.row.seconds), rows[0].row.table in fitted)
        for name, rows in groups.items()
        if len(rows) > 1
    ]
