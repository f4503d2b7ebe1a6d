"""`bench`: are plans faster, and than what? Everything is interleaved in one run, so that drift hits all alike.

Each plan is timed as it works in the middle of a run (steady.py). Baselines: one rank of the same engine, and the model
in one process that knows nothing of ours (trial.py: unmodified diffusers, or ComfyUI's own module), with the threads of
one rank and with as many threads as each plan has (on a GPU, threads play no part: one process, one device). The report
is the one that docs/report.md explains.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import torch

from ..plan import ParallelPlan
from ..planner.machine import overlap
from ..pool.pool import Pool
from ..report.build import Span, new_report
from ..report.chart import draw, require_chart
from ..report.interleave import BenchmarkCase, Run, Timed, interleave, table
from ..report.text import describe as in_words
from ..report.text import verdict
from .open_trial import open_trial
from .steady import SteadyPlan, WeightLayouts
from .terminal import SILENT, Paint, Progress, plain
from .trial import Trial
from .verify import workload_of
from .workload import choose_devices, refuse_uncompilable, relative_error


def run(arguments: argparse.Namespace, progress: Progress = SILENT) -> dict:
    """Time the cases and return the report. Raises `ValueError` for what cannot be run."""
    if arguments.runs < 1 or arguments.warmup < 0:
        raise ValueError(f"--runs={arguments.runs} --warmup={arguments.warmup}; use at least 1 run and 0 warm-up")
    if arguments.chart is not None:
        require_chart(arguments.chart)
    if arguments.trace is not None and not os.path.isdir(arguments.trace):
        raise ValueError(f"--trace={arguments.trace} is no folder; make it first")
    plans = [ParallelPlan.parse(text) for text in arguments.plan]
    workload = workload_of(arguments)
    selection = choose_devices(arguments.devices, max(plans, key=lambda plan: plan.ranks))
    with closing(open_trial(arguments, workload, plans, selection.devices, progress)) as trial:
        if arguments.compile:
            refuse_uncompilable(selection.devices)
        progress.phase(f"starting {len(selection.devices)} rank(s) and loading the model")
        chunks = partial(overlap, selection.devices)
        with Pool(selection.devices, threads_per_rank=arguments.threads_per_rank, overlap=chunks) as pool:
            places = WeightLayouts.of(pool, trial.spec, [ParallelPlan(), *plans])
            race = Race(places, trial, arguments.threads_per_rank)
            began = time.perf_counter()
            loaded = places.load(ParallelPlan())
            load_s = time.perf_counter() - began
            cases = [race.one_rank(), *race.processes(plans, loaded.dtype), *map(race.plan, plans)]
            if arguments.compile:
                cases += map(race.compiled, dict.fromkeys((ParallelPlan(), *plans)))
            if arguments.step_cache is not None:
                cases += [race.skipped(plan, arguments.step_cache) for plan in dict.fromkeys((ParallelPlan(), *plans))]
            rounds = arguments.warmup + arguments.runs
            progress.phase(f"timing {len(cases)} cases in turn, {rounds} runs of each")
            done = itertools.count()

            def told(name: str, number: int, of: int) -> None:
                progress.count(next(done), rounds * len(cases), f"{name}, run {number} of {of}")

            timed = interleave(cases, warmup=arguments.warmup, runs=arguments.runs, told=told)
            traces = [name for plan in plans for name in race.trace(plan, arguments.trace)] if arguments.trace else []
    rows, warnings = table(timed, error=relative_error)
    for row in rows:
        row |= race.graphs(row["name"])
    _add_loads(timed, rows, loaded.rank_load_s)
    report = new_report(
        "benchmark",
        devices=selection.devices,
        **trial.versions,
        contenders=rows,
        warmup=arguments.warmup,
        runs=arguments.runs,
        model={"file": os.path.basename(trial.spec.path), "dtype": loaded.dtype},
        sizes={name: value for name, value in trial.sizes.items() if name != "model"},
        inputs={"seed": workload.seed},
        timings={"load_s": load_s},
        warnings=[*selection.warnings, *places.warnings, *warnings],
        traces=traces,
    )
    if arguments.chart is not None:
        draw([report], arguments.chart)
    return report


def describe(report: Mapping, paint: Paint = plain) -> str:
    """The report for people: the answer, all cases, and the answer again."""
    first, *lines = in_words(report).split("\n")
    answer = paint(verdict(report), "good")
    return "\n".join([answer, first, *lines[:-1], answer])


def _add_loads(timed: Sequence[Timed], rows: Sequence[dict], rank_load_s: Mapping[int, float]) -> None:
    """How long each rank loaded before all runs, in the rows of plans that such weights serve."""
    for each, row in zip(timed, rows, strict=True):
        plan = each.case.plan
        if plan is not None and plan.layout.kind == ParallelPlan().layout.kind:
            for rank in row["ranks"]:
                rank["load_s"] = rank_load_s[rank["rank"]]


@dataclass(frozen=True)
class Race:
    """What all cases share: workers with a file, the inputs of a step's calls, and CPU threads of a rank."""

    places: WeightLayouts
    trial: Trial
    threads_per_rank: int
    with_graphs: dict[str, SteadyPlan] = field(default_factory=dict)  # those whose blocks are compiled, by case

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks are on the CPU, where threads play a part."""
        return self.places.pool.devices[0].kind == "cpu"

    def one_rank(self) -> BenchmarkCase:
        """The same engine, alone."""
        return self._ours(ParallelPlan(), "one rank", "one_rank")

    def plan(self, plan: ParallelPlan) -> BenchmarkCase:
        """The engine under a plan."""
        return self._ours(plan, called(plan), "plan")

    def compiled(self, plan: ParallelPlan) -> BenchmarkCase:
        """The engine under a plan with its blocks compiled."""
        return self._ours(plan, f"{called(plan)}, compiled", "plan", compiled=True)

    def skipped(self, plan: ParallelPlan, threshold: float) -> BenchmarkCase:
        """The engine under a plan whose step cache skips the step: it follows one of the same latent."""
        return self._ours(plan, f"{called(plan)}, skipped step", "plan", step_cache=threshold)

    def graphs(self, name: str) -> dict:
        """What the graphs of a case took, which has none unless it is compiled."""
        runner = self.with_graphs.get(name)
        return {} if runner is None else {"compile_s": runner.compile_s, "graphs": runner.graphs}

    def trace(self, plan: ParallelPlan, folder: str) -> list[str]:
        """Write each rank's Chrome trace of one run more, which is not timed. Returns the files' names."""
        runner = SteadyPlan(self.places, plan, self.trial.calls, options={"trace": True})
        runner.prepare()
        runner.run()
        stem = called(plan).replace(", ", "-").replace(" ", "-")
        names = [f"{stem}.rank{number}.json.gz" for number in range(plan.ranks)]
        for number, name in enumerate(names):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(runner.traces[number])
        return names

    def processes(self, plans: list[ParallelPlan], dtype: str) -> list[BenchmarkCase]:
        """One process: with one rank's and each plan's threads on the CPU, else on the first device."""
        per_rank, computed_in = self.threads_per_rank, getattr(torch, dtype)
        numbers: list[int | None] = [None]
        if self.on_cpu:
            numbers = list(sorted({per_rank, *(per_rank * plan.ranks for plan in plans)}))
        return [self._process(number, self.trial.one_process(computed_in, number)) for number in numbers]

    def _process(self, threads: int | None, run: Callable[[], torch.Tensor]) -> BenchmarkCase:
        how = "one process" if threads is None else f"{threads} thread{'s' * (threads > 1)}"
        reference_model = self.trial.reference_model
        return BenchmarkCase(
            name=f"{reference_model}, {how}",
            kind="one_process",
            engine=reference_model.lower(),
            run=lambda: Run(result=run()),
            threads=threads,
        )

    def _ours(self, plan: ParallelPlan, name: str, kind: str, **more: object) -> BenchmarkCase:
        compiled = bool(more.get("compiled"))
        runner = SteadyPlan(self.places, plan, self.trial.calls, options={"timed": True, "compiled": False, **more})
        if compiled:
            self.with_graphs[name] = runner

        def run_once() -> Run:
            began = time.perf_counter()
            result = torch.cat(runner.run())
            span = Span(wall_s=time.perf_counter() - began, requests=[runner.replies])
            return Run(result=result, spans=[span], began_s=began)

        return BenchmarkCase(
            name=name,
            kind=kind,
            engine="parallel-dit",
            run=run_once,
            prepare=runner.prepare,
            plan=plan,
            devices=self.places.pool.devices[: plan.ranks],
            threads=self.threads_per_rank * plan.ranks if self.on_cpu else None,
        )


def called(plan: ParallelPlan) -> str:
    """A plan's name with what else tells pipelines of the same stages apart."""
    parts = [plan.name]
    if plan.patches:
        parts.append(f"{plan.patches} patches")
    if plan.warmup_steps > 1:
        parts.append(f"{plan.warmup_steps} warm-up steps")
    return ", ".join(parts)
