"""Holds the planner to measurements on calibrated CPU ranks, for ten families; writes planner_families.md.

    PYTHONPATH=tests python -m benchmarks.planner_families [--only TEXT] [--turns 5] [--page]

Each model is counted, never run, before it is predicted. Its plans run in turns, and the ranks are calibrated before
every third model. What is held to the prediction is the time that the slowest rank had a core, by the kernel's own
books: that is a step's time where nobody else wants the cores. The clock's time stands beside it. What was measured is
kept in build/planner_families.json, so that the page can be written again by another planner.

Owns the measurements and the page. The models are small files of tests/families.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from families.variants import BY_NAME, write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import EQUAL, choose_plan
from parallel_runtime.planner.comfyui_process import ComfyUIProcess, find_comfyui
from parallel_runtime.planner.counted import CountedModel
from parallel_runtime.planner.counting import USUAL_SIZE
from parallel_runtime.planner.hardware import GIB, Calibration, Interconnect, Rates, Software
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.work import Work
from parallel_runtime.pool.pool import Pool
from parallel_runtime.trials.calibrate import calibrate
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

from .before_after import core_s

PAGE = Path(__file__).with_suffix(".md")
KEPT = Path(__file__).parents[1] / "build" / "planner_families.json"
CALIBRATED = 3  # a calibration for so many models
# A variant, and pixels with which its small file computes most of the time.
MODELS: tuple[tuple[str, int, int], ...] = (
    ("wan 2.1 t2v", 512, 384),
    ("ltx-video t2v", 1024, 768),
    ("flux.2 klein", 512, 512),
    ("hunyuanvideo t2v", 256, 192),
    ("krea 2", 512, 384),
    ("sd3.5 large", 512, 512),
    ("lens", 640, 512),
    ("joyimage", 512, 512),
    ("kandinsky 5 t2v", 384, 384),
    ("minimax h3 t2v", 640, 512),
)
TEXT_TOKENS, CFG = 64, 2
ALONE, BY_HEADS = ParallelPlan(), ParallelPlan(ulysses=2)
PLANS = (ALONE, BY_HEADS, ParallelPlan(ring=2), ParallelPlan(cfg=2))
MEDIAN_ERROR, RIGHT = 0.15, 0.90  # the targets


@dataclass(frozen=True)
class Row:
    """A model under a plan: seconds of a step, of the slowest rank on its core and by the clock; medians of turns."""

    model: CountedModel
    plan: ParallelPlan
    work: Work
    core_s: float
    clock_s: float

    @property
    def contest(self) -> tuple[str, bool]:
        """Rows that one choice is made between."""
        return self.model.name, self.work.guided

    def predicted(self, calibration: Calibration) -> float:
        """Seconds of a step."""
        return _by_plan(self.model, self.work, calibration)[self.plan]


def _by_plan(model: CountedModel, work: Work, calibration: Calibration) -> dict[ParallelPlan, float]:
    """Predicted seconds of each plan, the best first."""
    choice = choose_plan(model, work, [1024 * GIB] * 2, calibration, weights=("replicated",))
    best = [] if choice.chosen is None else [choice.chosen]
    return {row.plan: row.cost.step_s for row in (*best, *choice.table)}


def measure(pool: Pool, path: Path, counted: Mapping[str, Any], *, comfyui: ComfyUI, turns: int) -> list[dict]:
    """All plans of a model, in turns, with one conditioning and with two: its rows, as they are kept."""
    model, size = CountedModel.of(path.name, counted), counted["size"]
    pids = pool.status()["pids"]
    workload = Workload(width=size["width"], height=size["height"], text_tokens=TEXT_TOKENS)
    device, (cfg,) = pool.devices[0], [plan for plan in PLANS if plan.cfg == CFG]
    with closing(Trial(str(path), "float32", workload, [cfg], steps=1, comfyui=comfyui.path, device=device)) as trial:
        cases = [
            (guided, plan, PlanRunner(pool, trial.spec, plan, options={"timed": False}))
            for guided in (False, True)
            for plan in PLANS
            if model.may_run(plan) and (guided or plan.cfg == 1)
        ]
        taken: list[list[tuple[float, float]]] = [[] for _ in cases]
        for turn in range(turns + 1):
            for number, (guided, _, runner) in enumerate(cases):
                before, began = [core_s(pid) for pid in pids], time.perf_counter()
                runner.run(trial.calls if guided else trial.calls[:1])
                clock = time.perf_counter() - began
                core = max(core_s(pid) - was for pid, was in zip(pids, before, strict=True))
                if turn:  # the first warms up
                    taken[number].append((core, clock))
        pool.unload(trial.spec)
    return [
        {"plan": plan.describe(), "guided": guided, "turns": times}
        for (guided, plan, _), times in zip(cases, taken, strict=True)
    ]


def read_rows(kept: Mapping[str, Any]) -> list[Row]:
    """The rows that were measured."""
    found = []
    for name, each in kept["models"].items():
        model = CountedModel.of(name, each["counted"])
        for row in each["rows"]:
            work = Work(
                image_tokens=model.image_tokens(each["counted"]["numbers"]),
                text_tokens=TEXT_TOKENS,
                guided=row["guided"],
                element_bytes=each["counted"]["element_bytes"],
            )
            core, clock = (statistics.median(times) for times in zip(*row["turns"], strict=True))
            found.append(Row(model, ParallelPlan.parse(row["plan"]), work, core, clock))
    return found


def read_calibrations(kept: Mapping[str, Any]) -> list[Calibration]:
    """The calibrations that were made meanwhile."""
    return [
        Calibration(
            rates=Rates(**each["rates"]),
            link=Interconnect(**each["link"]),
            software=Software(**each["software"]),
            source=each["source"],
        )
        for each in kept["calibrations"]
    ]


def middle(found: Sequence[Calibration]) -> Calibration:
    """Of each constant the median of all calibrations."""
    parts = {}
    for part in ("rates", "link", "software"):
        first = getattr(found[0], part)
        values = {
            each.name: statistics.median(getattr(getattr(one, part), each.name) for one in found)
            for each in fields(first)
            if isinstance(getattr(first, each.name), float)
        }
        parts[part] = replace(first, **values)
    return replace(found[0], **parts)


def errors(rows: Sequence[Row], calibration: Calibration, *, clock: bool = False) -> list[float]:
    """Of each row, prediction over measurement - 1."""
    return [row.predicted(calibration) / (row.clock_s if clock else row.core_s) - 1 for row in rows]


def median_error(rows: Sequence[Row], calibration: Calibration, *, clock: bool = False) -> float:
    """The middle of the sizes of the errors."""
    return statistics.median(map(abs, errors(rows, calibration, clock=clock)))


def contests(rows: Sequence[Row]) -> dict[tuple[str, bool], list[Row]]:
    """Rows by the choice that is made between them, where there is one."""
    found: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        found.setdefault(row.contest, []).append(row)
    return {name: group for name, group in found.items() if len(group) > 1}


def right(group: Sequence[Row], plan: ParallelPlan, *, clock: bool = False) -> bool:
    """Whether a plan is the quickest measured, or as quick as what the planner takes for equal."""
    times = {row.plan: row.clock_s if clock else row.core_s for row in group}
    return plan in times and times[plan] <= EQUAL * min(times.values())


def chosen(group: Sequence[Row], calibration: Calibration) -> ParallelPlan:
    """The plan that auto takes."""
    return next(iter(_by_plan(group[0].model, group[0].work, calibration)))


def flops_alone(calibration: Calibration) -> Calibration:
    """A planner that counts nothing but FLOPs: the control."""
    rates = replace(calibration.rates, score_s=0.0, elementwise_bandwidth=1e15, memory_bandwidth=1e15)
    link = replace(calibration.link, bandwidth=1e15, latency_s=0.0)
    return replace(calibration, rates=rates, link=link, software=replace(calibration.software, operation_s=0.0))


def page(kept: Mapping[str, Any]) -> str:
    """The text of planner_families.md."""
    rows, calibration = read_rows(kept), middle(read_calibrations(kept))
    groups = contests(rows)
    lines = [*_introduction(kept), "", *_summary(rows, groups, calibration), "", *_reading(calibration), ""]
    lines += [
        "| model | tokens | plan | predicted s | on a core s | error | by the clock s | chosen |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_line(row, groups, calibration, kept["models"][row.model.name]["variant"]) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _introduction(kept: Mapping[str, Any]) -> list[str]:
    loads, cores, count = kept["loads"], kept["cores"], len(kept["models"])
    return [
        "# The planner beside measurements, family by family",
        "",
        f"`make planner-families` writes this page. {count} models of ComfyUI's own classes, small files with",
        f"random weights, fp32, on 1 and 2 CPU ranks of one thread, {cores} cores; medians of {kept['turns']} turns in",
        "which all plans take part. Models are counted, not run, before they are predicted; constants are the medians",
        "of what `doctor --calibrate` measures, once before every third model.",
        "",
        f"**Others used the machine meanwhile**: its load was {min(loads):.1f} to {max(loads):.1f} on {cores}",
        "cores, the ranks' own among it. So what is predicted is held to the seconds for which the slowest rank had a",
        "core in a step (`/proc/PID/task/*/schedstat`), which is what a step takes when nobody else wants the cores,",
        "up to what a rank waits for a message. Calibration's probes go by the same books.",
        "Seconds by the clock stand beside them.",
    ]


def _summary(rows: list[Row], groups: Mapping[Any, list[Row]], calibration: Calibration) -> list[str]:
    """The table of errors and right choices: the planner, and what it is held against."""
    planners = {
        "calibrated": calibration,
        "table, not calibrated": known_calibration("cpu"),
        "FLOPs alone (control)": flops_alone(calibration),
    }
    by_core = _figures(
        "median relative time error, seconds on a core", planners, lambda c: f"{median_error(rows, c):.1%}"
    )
    by_clock = _figures("the same, by the clock", planners, lambda c: f"{median_error(rows, c, clock=True):.1%}")
    lines = [
        "| figure | " + " | ".join(planners) + " | two ranks by heads | target |",
        "| --- " * (len(planners) + 3) + "|",
        f"{by_core} | | at most {MEDIAN_ERROR:.0%} |",
        f"{by_clock} | | |",
    ]
    for clock, how in ((False, "seconds on a core"), (True, "by the clock")):
        by_rule = sum(right(group, BY_HEADS, clock=clock) for group in groups.values())
        target = "" if clock else f"at least {RIGHT:.0%}"

        def share(each: Calibration, clock: bool = clock) -> str:
            good = sum(right(group, chosen(group, each), clock=clock) for group in groups.values())
            return f"{good} of {len(groups)}"

        cells = _figures(f"best plan found, {how}", planners, share)
        lines.append(f"{cells} | {by_rule} of {len(groups)} | {target} |")
    return lines


def _reading(calibration: Calibration) -> list[str]:
    """What counts as right, and the constants that the predictions are made of."""
    return [
        f"A choice is right when its plan is the quickest measured, or within {EQUAL - 1:.0%} of it, which the planner",
        "takes for equal. Constants: "
        f"matrices {calibration.rates.matmul_flops / 1e9:.0f} GFLOP/s, attention "
        f"{calibration.rates.attention_flops / 1e9:.0f}, {calibration.rates.score_s * 1e9:.2f} ns a score, between "
        f"matrices {calibration.rates.elementwise_bandwidth / 1e9:.1f} GB/s,",
        f"link {calibration.link.bandwidth / 1e9:.2f} GB/s and {calibration.link.latency_s * 1e6:.0f} us, "
        f"{calibration.software.operation_s * 1e6:.1f} us an operation.",
    ]


def _line(row: Row, groups: Mapping[Any, list[Row]], calibration: Calibration, name: str) -> str:
    """A model under a plan, of the table of all."""
    guess, group = row.predicted(calibration), groups.get(row.contest, [row])
    mark = ("right" if right(group, row.plan) else "wrong") if row.plan == chosen(group, calibration) else ""
    name += ", cfg" * row.work.guided + " (real calls)" * row.model.from_real_calls
    return (
        f"| {name} | {row.work.image_tokens} | {row.plan.name} | {guess:.3f} | {row.core_s:.3f} | "
        f"{guess / row.core_s - 1:+.0%} | {row.clock_s:.3f} | {mark} |"
    )


def _figures(name: str, planners: Mapping[str, Calibration], figure: Callable[[Calibration], str]) -> str:
    return f"| {name} | " + " | ".join(figure(each) for each in planners.values())


def main() -> int:
    """Command line. 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--comfyui", help="its folder (default: that of the tests)")
    parser.add_argument("--keep", type=Path, default=KEPT, help="where the measurements go (default: %(default)s)")
    parser.add_argument("--more", action="store_true", help="go on with a run that ended: models that are not kept yet")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page again of what was kept")
    arguments = parser.parse_args()
    if not arguments.page:
        run(arguments)
    kept = json.loads(arguments.keep.read_text(encoding="utf-8"))
    rows, calibration = read_rows(kept), middle(read_calibrations(kept))
    error, groups = median_error(rows, calibration), contests(rows).values()
    good = sum(right(group, chosen(group, calibration)) for group in groups)
    if arguments.keep == KEPT:
        PAGE.write_text(page(kept), encoding="utf-8")
    print(f"median error {error:.1%}, best plan {good} of {len(groups)}")  # noqa: T201
    return int(error > MEDIAN_ERROR or good < RIGHT * len(groups))


def run(arguments: argparse.Namespace) -> None:
    """Measure, and keep what was measured after each model."""
    comfyui = find_comfyui(arguments.comfyui or str(comfyui_path()))
    wanted = [each for each in MODELS if arguments.only in each[0]]
    kept: dict[str, Any] = {"turns": arguments.turns, "cores": os.cpu_count(), "loads": [], "calibrations": []}
    kept["models"] = {}
    if arguments.more:
        kept = json.loads(arguments.keep.read_text(encoding="utf-8"))
        wanted = [each for each in wanted if each[0] not in {known["variant"] for known in kept["models"].values()}]
    devices = parse_devices("cpu:2").devices
    with tempfile.TemporaryDirectory(prefix="planner-") as folder, Pool(devices, threads_per_rank=1) as pool:
        models = write_families(Path(folder) / "models", only=[name for name, *_ in wanted]) / "diffusion_models"
        counts = count_all(wanted, models, comfyui)
        for number, (name, *_) in enumerate(wanted):
            path = models / BY_NAME[name].file
            if number % CALIBRATED == 0:
                kept["calibrations"].append(asdict(calibrate(pool)))
            rows = measure(pool, path, counts[name], comfyui=comfyui, turns=arguments.turns)
            kept["models"][path.name] = {"variant": name, "counted": counts[name], "rows": rows}
            kept["loads"].append(os.getloadavg()[0])
            arguments.keep.parent.mkdir(exist_ok=True)
            arguments.keep.write_text(json.dumps(kept) + "\n", encoding="utf-8")
            print(f"{name}, load {kept['loads'][-1]:.1f}", flush=True)  # noqa: T201


def count_all(wanted: Sequence[tuple[str, int, int]], models: Path, comfyui: ComfyUI) -> dict[str, dict[str, Any]]:
    """The counts of all models by variant, as `plan` asks for them, in one process."""
    found = {}
    with ComfyUIProcess(comfyui, "cpu", counting=True) as process:
        for name, width, height in wanted:
            size = {**USUAL_SIZE, "width": width, "height": height}
            path = str(models / BY_NAME[name].file)
            found[name] = process.ask("count", path=path, dtype="float32", size=size) | {"size": size}
    return found


if __name__ == "__main__":
    sys.exit(main())
