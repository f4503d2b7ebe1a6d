"""Tries held against every exact plan, measured exhaustively: is the kept plan the quickest? Writes tries.md.

    PYTHONPATH=tests python -m benchmarks.tries [--only NAME ...] [--turns 5] [--plain]

Six families' small files, or those whose names are given, at three sizes, each with one conditioning and, but for
`--plain`, with two, fp32, on two real CPU ranks of one thread. What is tried, and what is kept, is planner/tries.py's,
of predictions by a calibration made at the start. Then all exact plans run in turns, and their medians say what the
quickest is.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from families.variants import BY_NAME, write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.cli.calibrate import calibrate
from parallel_runtime.cli.trial import Trial
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import choose_plan
from parallel_runtime.planner.comfyui_process import find_comfyui
from parallel_runtime.planner.counted import CountedModel
from parallel_runtime.planner.hardware import GIB, Calibration
from parallel_runtime.planner.tries import LIMIT, KeptPlan, Tries, kept_of, worth_trying
from parallel_runtime.planner.work import Work
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool

from .planner_families import MODELS, PLANS, TEXT_TOKENS, core_s, count_all

PAGE = Path(__file__).with_suffix(".md")
FAMILIES, SCALES = MODELS[:6], (0.5, 0.75, 1.0)
STEPS, NEAR = 20, 1.05
RIGHT = 16 / 18  # of the cases: the target


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of work: what was predicted best, what tries kept, and the median seconds of every exact plan.

    `extra_steps`: how much longer a first run of `STEPS` steps takes with tries than without, in steps of the predicted
    plan; what the kept plan gains is taken off.
    """

    name: str
    tokens: int
    guided: bool
    predicted: ParallelPlan
    kept: KeptPlan | None
    copies: int
    extra_steps: float
    clock_s: dict[ParallelPlan, float]
    core_s: dict[ParallelPlan, float]

    @property
    def plan(self) -> ParallelPlan:
        """What runs in the end."""
        return self.predicted if self.kept is None else self.kept.plan

    def behind(self, plan: ParallelPlan, *, clock: bool = True) -> float:
        """How many times as long as the quickest plan this one takes."""
        seconds = self.clock_s if clock else self.core_s
        return seconds[plan] / min(seconds.values())


def tried(pool: Pool, trial: Trial, calls: Sequence[ModelCall], plans: Sequence[ParallelPlan]) -> tuple[Tries, float]:
    """The tries of such plans, done, and the seconds that they took."""
    tries = Tries(tuple(plans), warm=frozenset(plans[:1]), limit=LIMIT, asynchronous=False)
    began_s = time.perf_counter()
    while (plan := tries.due) is not None:
        tries.note(plan, pool.run(trial.spec, plan, calls).wall_s)
    return tries, time.perf_counter() - began_s


def exhaustive(
    pool: Pool, trial: Trial, calls: Sequence[ModelCall], plans: Sequence[ParallelPlan], turns: int
) -> tuple[dict[ParallelPlan, float], dict[ParallelPlan, float]]:
    """Medians of a step by the clock, and for which the slowest rank had a core; all plans take part in each turn."""
    pids = pool.status()["pids"]
    clocks: dict[ParallelPlan, list[float]] = {plan: [] for plan in plans}
    cores: dict[ParallelPlan, list[float]] = {plan: [] for plan in plans}
    for turn in range(turns + 1):
        for plan in plans if turn % 2 else reversed(plans):
            before = [core_s(pid) for pid in pids]
            clock = pool.run(trial.spec, plan, calls).wall_s
            if turn:
                clocks[plan].append(clock)
                cores[plan].append(max(core_s(pid) - was for pid, was in zip(pids, before, strict=True)))
    return tuple({plan: statistics.median(all_s) for plan, all_s in each.items()} for each in (clocks, cores))  # type: ignore[return-value]


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
    choice = choose_plan(model, work, [1024 * GIB] * 2, found, weights=("replicated",))
    assert choice.plan is not None  # noqa: S101  there is memory enough
    plans = [plan for plan in PLANS if model.may_run(plan) and (work.guided or plan.cfg == 1)]
    due = worth_trying(choice.table, choice.plan, steps=STEPS, asynchronous=False)
    pool.run(trial.spec, choice.plan, calls)  # which loads the model, as a run without tries does
    tries, took_s = tried(pool, trial, calls, due)  # whose first plan has run, as a proof has it run before tries
    kept = kept_of(tries)
    clocks, cores = exhaustive(pool, trial, calls, plans, turns)
    gained_s = 0.0 if kept is None else STEPS * (clocks[choice.plan] - clocks[kept.plan])
    return Case(
        name=trial.title,
        tokens=work.image_tokens,
        guided=work.guided,
        predicted=choice.plan,
        kept=kept,
        copies=tries.copies,
        extra_steps=(took_s - gained_s) / clocks[choice.plan],
        clock_s=clocks,
        core_s=cores,
    )


def page(cases: Sequence[Case], turns: int, load: float, told: str = "") -> str:
    """The text of tries.md; `told` is what the command was given."""
    right = {clock: sum(each.behind(each.plan, clock=clock) <= NEAR for each in cases) for clock in (True, False)}
    guessed = {
        clock: sum(each.behind(each.predicted, clock=clock) <= NEAR for each in cases) for clock in (True, False)
    }
    worst, families = max(each.extra_steps for each in cases), len({each.name for each in cases})
    lines = [
        "# Tries beside every exact plan",
        "",
        f"`{' '.join(f'PYTHONPATH=tests python -m benchmarks.tries {told}'.split())}` wrote this page",
        f"(without `--only` and `--plain` it takes six families): small files of {families} families with random",
        f"weights, fp32, two real CPU ranks of one thread on {os.cpu_count()} cores. Each case is a first run of",
        f"{STEPS} steps: plans that may pay are tried as SP Config's auto tries them, then all exact plans run in",
        f"turns (medians of {turns}). **Others used the machine meanwhile** (load {load:.1f}), so seconds for which",
        "the slowest rank had a core stand beside the clock's. Three and four ranks, and other links than this",
        "machine's memory, are not in here.",
        "",
        "| figure | by the clock | seconds on a core | target |",
        "| --- | --- | --- | --- |",
        f"| kept plan is the quickest of all exact plans, or within 5 % | {right[True]} of {len(cases)} "
        f"| {right[False]} of {len(cases)} | {math.ceil(len(cases) * RIGHT)} of {len(cases)} |",
        f"| the same of the predicted plan, without tries | {guessed[True]} of {len(cases)} "
        f"| {guessed[False]} of {len(cases)} | |",
        f"| a first run is longer than without tries by at most | {worst:.1f} steps | | 3 steps |",
        "",
        "Steps are those of the predicted plan; what the kept plan gains in the run is taken off.",
        "",
        "| model | tokens | predicted | kept | copies | longer by, steps | kept behind, clock / core | all plans, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in cases:
        every = ", ".join(f"{plan.name.removesuffix('-ring1-uly1')} {s * 1e3:.0f}" for plan, s in each.clock_s.items())
        lines.append(
            f"| {each.name}{', cfg' * each.guided} | {each.tokens} | {each.predicted.name} | "
            f"{'not tried' if each.kept is None else each.kept.plan.name} | {each.copies} | {each.extra_steps:.1f} | "
            f"{each.behind(each.plan) - 1:.0%} / {each.behind(each.plan, clock=False) - 1:.0%} | {every} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line. 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names contain one of these")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="with one conditioning alone")
    arguments = parser.parse_args()
    devices, cases = parse_devices("cpu:2").devices, list[Case]()
    comfyui = find_comfyui(str(comfyui_path()))
    wanted = [each for each in FAMILIES if any(only in each[0] for only in arguments.only)]
    with tempfile.TemporaryDirectory(prefix="tries-") as folder, Pool(devices, threads_per_rank=1) as pool:
        models = write_families(Path(folder) / "models", only=[name for name, *_ in wanted]) / "diffusion_models"
        counts, found = count_all(wanted, models, comfyui), calibrate(pool)
        for name, *_ in wanted:
            path = models / BY_NAME[name].file
            for case in cases_of(
                pool, path, counts[name], comfyui, found, turns=arguments.turns, plain=arguments.plain
            ):
                cases.append(replace(case, name=name))
                sys.stderr.write(page(cases, arguments.turns, os.getloadavg()[0]).splitlines()[-1] + "\n")
    told = " ".join(f"'{each}'" if " " in each else each for each in sys.argv[1:])
    PAGE.write_text(page(cases, arguments.turns, os.getloadavg()[0], told), encoding="utf-8")
    return int(sum(each.behind(each.plan) <= NEAR for each in cases) < len(cases) * RIGHT)


if __name__ == "__main__":
    sys.exit(main())
