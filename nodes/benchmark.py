"""Parallel Benchmark: whole sampling runs under several plans, interleaved with one rank and stock ComfyUI."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from comfy_api.latest import io

from ..parallel_runtime.errors import PoolError
from ..parallel_runtime.plan import ParallelPlan
from ..parallel_runtime.proof import relative_error
from ..parallel_runtime.report.interleave import BenchmarkCase, CaseRun, interleave, table
from .host.contract.comfyui import folder_paths
from .host.contract.version import refuse_off
from .host.panel.progress import NodeText
from .host.panel.report_history import published
from .host.proof.benchmark_cases import (
    SLOW_ATTENTION,
    RunsProgress,
    attention_is_slow,
    plan_of_settings,
    require_ours,
    sampled,
    stock_copy,
    threads,
    traced,
    under_plan,
)
from .host.sampling.applied import applied_to
from .host.sampling.stock import check_latent, sizes_of
from .host.sampling.workload_from_guider import as_sampled
from .host.vae.decoding import decode
from .report import benchmark_report, loop_of, steps_of
from .sampler import LOOPS, loop_input, sampler_inputs, uses_worker_loop
from .sockets import CATEGORY, TimingSocket

# What a run raises where its case alone may be to blame: too large for one device, refused under one plan.
OF_ONE_CASE = (PoolError, ValueError, torch.OutOfMemoryError)


class ParallelBenchmark(io.ComfyNode):
    """Times whole sampling runs under several plans. Slow by intent: every case samples `warmup` + `runs` times."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The inputs of Parallel Sampler, then what to compare; new ones are only ever appended."""
        return io.Schema(
            node_id="ParallelBenchmark",
            display_name="Parallel Benchmark",
            category=CATEGORY,
            description="Times whole sampling runs under several plans beside one rank and stock ComfyUI, in turn.",
            inputs=[
                *sampler_inputs(),
                io.String.Input(
                    "plans",
                    multiline=True,
                    default="",
                    tooltip="One a line, such as ulysses=2 or ring=2,cfg=2. Empty: the MODEL's own plan.",
                ),
                io.Int.Input("warmup", default=5, min=0, max=100, tooltip="Runs of each that are thrown away."),
                io.Int.Input("runs", default=5, min=1, max=100, tooltip="Runs of each that count."),
                io.Boolean.Input(
                    "stock",
                    default=True,
                    tooltip="Time stock ComfyUI too. Loads the file once more, into this process.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="Time the decode too, apart."),
                io.Boolean.Input(
                    "trace",
                    default=False,
                    optional=True,
                    tooltip="Write each rank's Chrome trace of one more step, by plan, to output/traces.",
                ),
                loop_input(),
            ],
            outputs=[TimingSocket.Output(display_name="timing")],
        )

    @classmethod
    def validate_inputs(cls, plans: str | None = None) -> bool | str:
        """Refuse plans that cannot be read before anything is queued."""
        try:
            read_plans(plans or "", ParallelPlan())
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        latent_image: dict,
        plans: str,
        warmup: int,
        runs: int,
        stock: bool,
        vae: io.Vae.Type | None = None,
        trace: bool = False,
        loop: str = LOOPS[0],
        **settings: object,
    ) -> io.NodeOutput:
        """Raises `ValueError` for a MODEL without workers and for plans that it cannot run, before anything runs."""
        ours = require_ours(model)
        check_latent(latent_image, "latent_image")
        latent_image = as_sampled(ours, latent_image)
        field = CaseRunner(ours, {"latent": latent_image, **settings}, worker_loop=uses_worker_loop(loop))
        compared = read_plans(plans, plan_of_settings(ours, field.settings))
        cases, warnings = field.cases(compared, stock=stock)
        progress, text = RunsProgress((warmup + runs) * len(cases)), NodeText()

        def told(name: str, run: int, of: int) -> None:
            progress.step()
            text.say(f"run {run} of {of}: {name}")

        timed = interleave(cases, warmup=warmup, runs=runs, told=told, left_out=OF_ONE_CASE)
        rows, more = table(timed, error=relative_error)
        ran = [each.case.plan for each in timed if each.case.kind == "plan" and each.failed is None]
        files = [item for plan in ran if plan is not None for item in field.write_traces(plan)] if trace else []
        decodes = [] if vae is None else [decode(vae, latent_image)[1] for _ in range(1 + runs)][1:]
        report = benchmark_report(
            ours.model.pooled,
            field.settings,
            field.last_requests,
            applied=applied_to(ours, field.settings),
            contenders=rows,
            warmup=warmup,
            runs=runs,
            warnings=warnings + more,
            decodes=decodes,
            sizes=sizes_of(ours, latent_image),
            traces=[item["filename"] for item in files],
        )
        return io.NodeOutput(report, ui=published(report) | ({"files": files} if files else {}))


class CaseRunner:
    """What all cases share, and how each runs once. `worker_loop`: with our loop there, where it can be."""

    def __init__(self, model: object, settings: Mapping[str, object], *, worker_loop: bool) -> None:
        self.model, self.settings, self.worker_loop = require_ours(model), settings, worker_loop
        self.last_requests: list = []

    def cases(self, plans: list[ParallelPlan], *, stock: bool) -> tuple[list[BenchmarkCase], list[str]]:
        """One rank, stock ComfyUI, and the plans; and what the user should know of them."""
        alone, warnings, found = ParallelPlan(), [], []
        if alone.layout.kind == self.model.plan.layout.kind:
            found.append(self._ours(alone, "one rank", "one_rank"))
        else:
            warnings.append(
                f"no one rank to compare with: this MODEL's weights are {self.model.plan.layout.name}, "
                "one rank's would be whole"
            )
        if stock:
            found += self._stock(plans)
            if attention_is_slow(self.model.load_device):
                warnings.append(SLOW_ATTENTION)
        names = Counter(plan.name for plan in plans)  # it says nothing of patches and warm-up
        told = [plan.name if names[plan.name] == 1 else plan.describe() for plan in plans]
        return found + [self._ours(plan, name, "plan") for plan, name in zip(plans, told, strict=True)], warnings

    def write_traces(self, plan: ParallelPlan) -> list[dict[str, str]]:
        """Write each rank's trace under a plan to the output folder; the files as clients are told of them."""
        refuse_off("files")
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            f"traces/{plan.name}", folder_paths.get_output_directory()
        )
        items = []
        for rank, data in enumerate(traced(under_plan(self.model, plan), self.settings)):
            filename = f"{name}_{counter:05}_rank{rank}.json.gz"
            (Path(folder) / filename).write_bytes(data)
            items.append({"filename": filename, "subfolder": subfolder, "type": "output"})
        return items

    def _ours(self, plan: ParallelPlan, name: str, kind: str) -> BenchmarkCase:
        pooled = self.model.model.pooled
        model = under_plan(self.model, plan)

        def run_once() -> CaseRun:
            before = pooled.pool.last_failure
            try:
                latent, record = sampled(model, self.settings, worker_loop=self.worker_loop)
            except PoolError:
                if pooled.pool.last_failure is not before:  # it is told as this case's, and keeps no other from workers
                    pooled.pool.retract_failure()
                raise
            self.last_requests = record.requests
            return CaseRun(result=latent, spans=steps_of(record), began_s=record.began_s, loop=loop_of(record))

        return BenchmarkCase(
            name=name,
            kind=kind,
            engine="parallel-dit",
            run=run_once,
            plan=plan,
            devices=pooled.devices[: plan.ranks],
            threads=self._threads(plan),
        )

    def _stock(self, plans: list[ParallelPlan]) -> list[BenchmarkCase]:
        """Stock ComfyUI with as many threads as each plan has, where threads play a part."""
        copy = stock_copy(self.model)

        def running(count: int | None) -> Callable[[], CaseRun]:
            def run_once() -> CaseRun:
                with threads(count):
                    latent, record = sampled(copy, self.settings)
                return CaseRun(result=latent, loop=loop_of(record))

            return run_once

        numbers = sorted({self._threads(plan) or 0 for plan in plans})
        return [
            BenchmarkCase(
                name=f"ComfyUI, {number} thread{'s' * (number > 1)}" if number else "ComfyUI, one device",
                kind="one_process",
                engine="comfyui",
                run=running(number or None),
                threads=number or None,
            )
            for number in numbers
        ]

    def _threads(self, plan: ParallelPlan) -> int | None:
        """CPU threads of all ranks of a plan; None where they compute on GPUs."""
        pooled = self.model.model.pooled
        return pooled.pool.threads_per_rank * plan.ranks if pooled.devices[0].kind == "cpu" else None


def read_plans(text: str, default: ParallelPlan) -> list[ParallelPlan]:
    """The plans of the lines, without repeats; `default` when there are none. Raises `ValueError`."""
    plans = [ParallelPlan.parse(line) for line in text.splitlines() if line.strip()]
    return list(dict.fromkeys(plans)) or [default]
