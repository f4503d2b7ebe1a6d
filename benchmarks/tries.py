"""Tries held against every exact plan, measured exhaustively: is the kept plan the quickest? Writes tries.md.

    PYTHONPATH=tests python -m benchmarks.tries [--only NAME ...] [--turns 5] [--plain] [--ranks 2 3 4] [--write PAGE]

Six families' small files, or those whose names are given, at three sizes, each with one conditioning and, but for
`--plain`, with two, fp32, on real CPU ranks of one thread, two or as many as `--ranks` says in turn. What is tried, and
what is kept, is planner/tries.py's, of predictions by a calibration made at the start. Then all exact plans run in
turns, and their medians say what the quickest is. Of so many medians of short steps the least is one by chance, too: a
plan that is further behind it is held to it once more, in pairs, whose median ratio counts.

Where there are more ranks than cores, a call counts as the seconds for which its slowest rank had a core, in tries and
turns alike: what a machine with a core for each would take, but for the waits between unequal parts of a step.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from families.variants import BY_NAME, write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.devices import parse_devices
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import choose_plan
from parallel_runtime.planner.comfyui_process import find_comfyui
from parallel_runtime.planner.counted import CountedModel
from parallel_runtime.planner.hardware import GIB, Calibration
from parallel_runtime.planner.tries import LIMIT, KeptPlan, Tries, kept_of, worth_trying
from parallel_runtime.planner.work import Work
from parallel_runtime.pool.pool import Pool
from parallel_runtime.trials.calibrate import calibrate
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

from .before_after import core_s
from .planner_families import MODELS, TEXT_TOKENS, count_all

PAGE = Path(__file__).with_suffix(".md")
FAMILIES, SCALES = MODELS[:6], (0.5, 0.75, 1.0)
STEPS, NEAR, PAIRS = 20, 1.05, 15
RIGHT = 16 / 18  # of the cases: the target


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of work: what was predicted best, what tries kept, and the median seconds of every exact plan.

    `later`: what is kept once what the first run left was tried while nothing ran.
    `extra_steps`: how much longer a first run of `STEPS` steps takes with tries than without, in steps of the predicted
    plan; what the kept plan gains is taken off.
    """

    name: str
    tokens: int
    guided: bool
    ranks: int
    predicted: ParallelPlan
    kept: KeptPlan | None
    later: KeptPlan | None
    copies: int
    extra_steps: float
    clock_s: dict[ParallelPlan, float]
    core_s: dict[ParallelPlan, float]
    paired: dict[tuple[ParallelPlan, bool], float] = field(default_factory=dict)

    @property
    def plan(self) -> ParallelPlan:
        """What the first run goes on under."""
        return self.predicted if self.kept is None else self.kept.plan

    @property
    def next_plan(self) -> ParallelPlan:
        """What later runs begin under."""
        return self.predicted if self.later is None else self.later.plan

    @property
    def seconds(self) -> dict[ParallelPlan, float]:
        """Those that count."""
        return self.core_s if paced(self.ranks) else self.clock_s

    def behind(self, plan: ParallelPlan, *, clock: bool = True) -> float:
        """How many times as long as the quickest plan this one takes."""
        seconds = self.clock_s if clock else self.core_s
        return self.paired.get((plan, clock), seconds[plan] / min(seconds.values()))

    @property
    def in_doubt(self) -> Iterator[tuple[ParallelPlan, bool, ParallelPlan]]:
        """What is to be measured in pairs: a plan that was chosen, whether by the clock, and the quickest."""
        for clock, seconds in ((True, self.clock_s), (False, self.core_s)):
            quickest = min(seconds, key=lambda plan: seconds[plan])
            for plan in {self.predicted, self.plan, self.next_plan}:
                if self.behind(plan, clock=clock) > NEAR and not (clock and paced(self.ranks)):
                    yield plan, clock, quickest


def taken_s(pool: Pool, trial: Trial, plan: ParallelPlan, calls: Sequence[ModelCall]) -> tuple[float, float]:
    """Seconds of such a step by the clock, and for which the slowest rank had a core."""
    pids = pool.status()["pids"]
    before = [core_s(pid) for pid in pids]
    clock = pool.run(trial.spec, plan, calls).wall_s
    return clock, max(core_s(pid) - was for pid, was in zip(pids, before, strict=True))


def paced(ranks: int) -> bool:
    """Whether ranks have to share cores, so that the clock says nothing."""
    return ranks > len(os.sched_getaffinity(0))


def tried(
    pool: Pool, trial: Trial, calls: Sequence[ModelCall], plans: Sequence[ParallelPlan], limit: float | None
) -> tuple[Tries, float]:
    """The tries of such plans, done, and the seconds that they took; `limit`: of a run that waits, or None."""
    warm = frozenset(plans[:1] if limit is not None else ())
    tries = Tries(tuple(plans), warm=warm, limit=limit, asynchronous=False, idle=limit is None)
    began_s = time.perf_counter()
    while (plan := tries.due) is not None:
        tries.note(plan, taken_s(pool, trial, plan, calls)[paced(len(pool.devices))])
    return tries, tries.spent_s if paced(len(pool.devices)) else time.perf_counter() - began_s


def exhaustive(
    pool: Pool, trial: Trial, calls: Sequence[ModelCall], plans: Sequence[ParallelPlan], turns: int
) -> tuple[dict[ParallelPlan, float], dict[ParallelPlan, float]]:
    """Medians of a step by the clock, and for which the slowest rank had a core; all plans take part in each turn."""
    clocks: dict[ParallelPlan, list[float]] = {plan: [] for plan in plans}
    cores: dict[ParallelPlan, list[float]] = {plan: [] for plan in plans}
    for turn in range(turns + 1):
        for plan in plans if turn % 2 else reversed(plans):
            clock, core = taken_s(pool, trial, plan, calls)
            if turn:
                clocks[plan].append(clock)
                cores[plan].append(core)
    return tuple({plan: statistics.median(all_s) for plan, all_s in each.items()} for each in (clocks, cores))  # type: ignore[return-value]


def in_pairs(
    pool: Pool, trial: Trial, calls: Sequence[ModelCall], plan: ParallelPlan, other: ParallelPlan, *, clock: bool
) -> float:
    """How many times as long as the other this plan takes: the median of pairs, in which each comes first in turn."""
    ratios = []
    for pair in range(PAIRS + 1):
        took = {}
        for each in (plan, other) if pair % 2 else (other, plan):
            took[each] = taken_s(pool, trial, each, calls)[not clock]
        if pair:
            ratios.append(took[plan] / took[other])
    return statistics.median(ratios)


def cases_of(
    pool: Pool,
    path: Path,
    counted: Mapping[str, Any],
    comfyui: ComfyUI,
    found: Calibration,
    *,
    turns: int,
    plain: bool,
) -> Iterator[Case]:
    """All cases of a model at its sizes; `plain`: with one conditioning alone."""
    model, size = CountedModel.of(path.name, counted), counted["size"]
    for scale in SCALES:
        width, height = (max(64, round(side * scale / 64) * 64) for side in (size["width"], size["height"]))
        workload = Workload(width=width, height=height, text_tokens=TEXT_TOKENS)
        given = {"steps": 1, "comfyui": comfyui.path, "device": pool.devices[0]}
        with closing(Trial(str(path), "float32", workload, [ParallelPlan(cfg=2)], **given)) as trial:
            for guided in (False,) if plain else (False, True):
                work = Work(
                    image_tokens=model.image_tokens(math.prod(trial.shapes[0][1:])),
                    text_tokens=TEXT_TOKENS,
                    guided=guided,
                    steps=STEPS,
                    element_bytes=counted["element_bytes"],
                )
                yield case_of(pool, trial, model, work, found, turns)
            pool.unload(trial.spec)


def case_of(pool: Pool, trial: Trial, model: CountedModel, work: Work, found: Calibration, turns: int) -> Case:
    """One case, measured."""
    calls = trial.calls if work.guided else trial.calls[:1]
    calls = [replace(call, options={**call.options, "timed": False}) for call in calls]
    choice = choose_plan(model, work, [1024 * GIB] * len(pool.devices), found, weights=("replicated",))
    assert choice.plan is not None  # noqa: S101  there is memory enough
    plans = [row.plan for row in choice.table]
    due, due_idle = (
        worth_trying(choice.table, choice.plan, steps=STEPS, asynchronous=False, idle=idle) for idle in (False, True)
    )
    pool.run(trial.spec, choice.plan, calls)  # which loads the model, as a run without tries does
    tries, took_s = tried(pool, trial, calls, due, LIMIT)  # whose first plan has run, as a proof runs it before tries
    kept = kept_of(tries)
    later = kept
    if tries.left or set(due_idle).difference(due):
        later = kept_of(tried(pool, trial, calls, due_idle, None)[0])
    clocks, cores = exhaustive(pool, trial, calls, plans, turns)
    seconds = cores if paced(len(pool.devices)) else clocks
    gained_s = 0.0 if kept is None else STEPS * (seconds[choice.plan] - seconds[kept.plan])
    found = Case(
        name=trial.title,
        tokens=work.image_tokens,
        guided=work.guided,
        ranks=len(pool.devices),
        predicted=choice.plan,
        kept=kept,
        later=later,
        copies=tries.copies,
        extra_steps=(took_s - gained_s) / seconds[choice.plan],
        clock_s=clocks,
        core_s=cores,
    )
    for plan, clock, quickest in list(found.in_doubt):
        found.paired[plan, clock] = in_pairs(pool, trial, calls, plan, quickest, clock=clock)
    return found


def page(cases: Sequence[Case], turns: int, load: float, told: str = "") -> str:
    """The text of tries.md; `told` is what the command was given."""
    cores, families = len(os.sched_getaffinity(0)), len({each.name for each in cases})
    lines = [
        "# Tries beside every exact plan",
        "",
        f"`{' '.join(f'PYTHONPATH=tests python -m benchmarks.tries {told}'.split())}` wrote this page:",
        f"small files of {families} families with random weights, fp32, real CPU ranks of one thread on {cores} cores.",
        f"Each case is a first run of {STEPS} steps: plans that may pay are tried as auto tries them, then all",
        f"exact plans run in turns (medians of {turns}). A chosen plan that is behind by more than 5 % then is held to",
        f"the quickest once more, in {PAIRS} pairs, whose median counts. Where ranks share cores, a step counts as the",
        f"seconds for which its slowest rank had a core. The machine's load was {load:.1f} at the end, ranks included.",
    ]
    for ranks in sorted({each.ranks for each in cases}):
        lines += section([each for each in cases if each.ranks == ranks], ranks)
    return "\n".join(lines) + "\n"


def section(cases: Sequence[Case], ranks: int) -> list[str]:
    """The cases of so many ranks, after what they come to."""

    def near(name: str) -> str:
        counts = (
            sum(each.behind(getattr(each, name), clock=clock) <= NEAR for each in cases) for clock in (True, False)
        )
        return " | ".join(f"{count} of {len(cases)}" for count in counts)

    worst = max(each.extra_steps for each in cases)
    lines = [
        "",
        f"## {ranks} ranks",
        "",
        "| figure | by the clock | seconds on a core | target |",
        "| --- | --- | --- | --- |",
        "| within 5 % of the quickest of all exact plans: | | | |",
        f"| what a first run goes on under | {near('plan')} | |",
        "| what the next runs begin under, once what was left was tried while nothing ran "
        f"| {near('next_plan')} | {math.ceil(len(cases) * RIGHT)} of {len(cases)} |",
        f"| what is predicted, without tries | {near('predicted')} | |",
        f"| a first run is longer than without tries by at most | {worst:.1f} steps | | 3 steps |",
        "",
        "Steps are those of the predicted plan; what the kept plan gains in the run is taken off.",
        "",
        "| model | tokens | predicted | kept | copies | longer by, steps | kept after it "
        "| that behind, clock / core | all plans, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in cases:
        every = ", ".join(f"{plan.name.removesuffix('-ring1-uly1')} {s * 1e3:.0f}" for plan, s in each.seconds.items())
        lines.append(
            f"| {each.name}{', cfg' * each.guided} | {each.tokens} | {each.predicted.name} | "
            f"{'not tried' if each.kept is None else each.kept.plan.name} | {each.copies} | {each.extra_steps:.1f} | "
            f"{each.next_plan.name} | {each.behind(each.next_plan) - 1:.0%} / "
            f"{each.behind(each.next_plan, clock=False) - 1:.0%} | {every} |"
        )
    return lines


def main() -> int:
    """Command line. 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names contain one of these")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="with one conditioning alone")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--write", type=Path, default=PAGE, help="the page (default tries.md)")
    arguments = parser.parse_args()
    cases, comfyui = list[Case](), find_comfyui(str(comfyui_path()))
    wanted = [each for each in FAMILIES if any(only in each[0] for only in arguments.only)]
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        found = calibrate(pool)  # of ranks that have a core each
    with tempfile.TemporaryDirectory(prefix="tries-") as folder:
        models = write_families(Path(folder) / "models", only=[name for name, *_ in wanted]) / "diffusion_models"
        counts = count_all(wanted, models, comfyui)
        for ranks in arguments.ranks:
            with Pool(parse_devices(f"cpu:{ranks}").devices, threads_per_rank=1) as pool:
                for name, *_ in wanted:
                    path, how = models / BY_NAME[name].file, {"turns": arguments.turns, "plain": arguments.plain}
                    for case in cases_of(pool, path, counts[name], comfyui, found, **how):
                        cases.append(replace(case, name=name))
                        sys.stderr.write(section(cases[-1:], ranks)[-1] + "\n")
    told = " ".join(f"'{each}'" if " " in each else each for each in sys.argv[1:])
    arguments.write.write_text(page(cases, arguments.turns, os.getloadavg()[0], told), encoding="utf-8")
    return int(
        sum(each.behind(each.next_plan, clock=not paced(each.ranks)) <= NEAR for each in cases) < len(cases) * RIGHT
    )


if __name__ == "__main__":
    sys.exit(main())
