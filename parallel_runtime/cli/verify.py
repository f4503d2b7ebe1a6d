"""`verify`: does a plan compute what one process computes without this pack?

What runs are as many calls as the plan's cfg degree, as cond and uncond, of unequal text; rows of their batch are what
the data degree shares out. The one process is ComfyUI's own module; for Flux.1, `--against diffusers` takes the
unmodified diffusers model instead (trials/trial.py).

fp32 must agree to 1e-5. In bf16 and fp16 nothing agrees to the last digit, so both the plan and one process in that
dtype are held against one process in fp32, and the plan may be at most 10 % further away than one process is. All of
them are given the inputs of each step as ComfyUI rounds them to that dtype: what is compared is the model's arithmetic,
which is a few thousandths off in bf16, while a plan that is wrong is off by far more.

Layers of int8, and of other formats that a device multiplies in, round what they are given, and a last digit decides
between two steps: then the plan may be as far away as that moves an output (models/hosted/formats.py).

With `--step-cache` the calls run once more with a first-block cache, by the plan and by one rank: both must skip the
same calls and agree, and how far that is from the exact result is shown with it (cached.py).

A pipeline is held to that while every step is warm-up. After its warm-up it attends to keys a step old, on purpose:
that difference is shown with it, and is no tolerance.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial

import torch

from ..plan import ParallelPlan
from ..planner.machine import overlap
from ..pool.pool import Pool
from ..pool.ranks import deadline_from
from ..proof import relative_error
from ..trials.plan_runner import PlanRunner
from ..trials.trial import Results, Trial
from ..trials.workload import Workload, choose_devices, refuse_uncompilable, worst
from ..wire.replies import RankStep
from .cached import Cached, describe_cached
from .terminal import SILENT, Paint, PhaseLine, plain

FP32_TOLERANCE = 1e-5
HALF_ALLOWANCE = 1.1
OPTION_OF = {"warmup_steps": "warmup"}


def run(arguments: argparse.Namespace, progress: PhaseLine = SILENT) -> dict:
    """Run the comparison. Raises `ValueError` for what cannot be run, `PoolError` when a rank fails."""
    pipeline = {"patches": arguments.patches, "warmup_steps": arguments.warmup}
    plan = chosen_plan(arguments.plan, arguments.weights, **pipeline)
    workload = workload_of(arguments)
    _refuse_steps(arguments, plan)
    control = control_options(plan, workload) if arguments.negative_control else {}
    selection = choose_devices(arguments.devices, plan)
    if arguments.compile:
        refuse_uncompilable(selection.devices)
    given = {name: getattr(arguments, name) for name in ("steps", "comfyui", "against")} | {
        "device": selection.devices[0],
        "step_cache": arguments.step_cache or 0.0,
    }
    progress.phase("computing random calls in a ComfyUI process")
    with closing(Trial(arguments.model, arguments.dtype, workload, [plan], **given)) as trial:
        progress.phase(f"starting {len(selection.devices)} rank(s) and loading the model")
        chunks = partial(overlap, selection.devices)
        with Pool(
            selection.devices,
            deadline_s=deadline_from(os.environ),
            threads_per_rank=arguments.threads_per_rank,
            overlap=chunks,
        ) as pool:
            loaded = pool.load(trial.spec, plan, progress=progress.count)
            progress.phase(f"computing {plan.name}")
            options = {**control, "compiled": arguments.compile, "exact_fp32": True}
            rows = arguments.negative_control and not control
            runner = PlanRunner(pool, trial.spec, plan, options=options, first_row=rows)
            results = trial.results(runner.run)
            stale = _stale(runner, trial) if plan.pipefusion > 1 else None
            cached = Cached.of(runner, trial, arguments.step_cache, progress)
        progress.phase(f"computing the same by {trial.reference_model} in one process")
        references = trial.references(torch.float32, dtype := getattr(torch, loaded.dtype))
        tolerance, one_process = _tolerance(trial, dtype, references)
    report = {
        "dtype": loaded.dtype,
        **trial.sizes,
        "steps": arguments.steps,
        "negative_control": arguments.negative_control,
        "tolerance": tolerance,
        "parameter_bytes_per_rank": loaded.parameter_bytes[: plan.ranks],
        "warnings": [*selection.warnings, *idle_groups(plan, runner.ranks)],
    }
    report |= _plan_report(plan, runner.ranks) | _errors(trial, results, references, runner.ranks)
    report["within_tolerance"] = report["max_rel_err"] <= tolerance
    if cached is not None:
        report["step_cache"] = cached.report(references)
        report["within_tolerance"] = report["within_tolerance"] and cached.agrees(tolerance)
    if arguments.compile:
        report["graphs_by_rank"], uncompiled = _graphs_of(runner.ranks)
        report["warnings"] += uncompiled
    if stale is not None:
        report |= {"warmup_steps": plan.warmup_steps, "patches": plan.num_patches}
        report["stale_difference"] = worst([relative_error(*pair) for pair in zip(stale, references, strict=True)])
    return report if one_process is None else report | {"one_process_rel_err": one_process}


def _graphs_of(ranks: Sequence[RankStep]) -> tuple[list[int], list[str]]:
    """How many graphs each rank has that compiled, and why blocks run without, once each."""
    compiled = [rank.compiled for rank in ranks if rank.compiled is not None]
    reasons = dict.fromkeys(each.reason for each in compiled if each.reason)
    return [each.graphs for each in compiled], [f"blocks run uncompiled: {reason}" for reason in reasons]


def _refuse_steps(arguments: argparse.Namespace, plan: ParallelPlan) -> None:
    if arguments.steps < 1:
        raise ValueError(f"--steps={arguments.steps} is below 1; use at least one step")
    if plan.pipefusion > 1 and plan.warmup_steps > arguments.steps:
        raise ValueError(f"warmup_steps={plan.warmup_steps} is more than --steps={arguments.steps}; use at most that")
    if arguments.step_cache is None:
        return
    if not 0.0 < arguments.step_cache < math.inf:
        raise ValueError(
            f"--step-cache={arguments.step_cache:g} is no number above 0; use for example 0.1, or leave it out"
        )
    if plan.pipefusion > 1:
        raise ValueError(
            f"--step-cache needs all blocks on one rank, and pipefusion={plan.pipefusion} gives each some; leave "
            "--step-cache out, or use a plan of ulysses, ring or cfg"
        )
    if arguments.steps == 1:
        raise ValueError("--step-cache skips what a step before it computed; use --steps 2 or more")
    if plan.data > 1:
        raise ValueError(f"--step-cache: replicas of data={plan.data} decide apart, one rank for all; leave data out")


def _stale(runner: PlanRunner, trial: Trial) -> Results:
    """The calls once more as one sampling run, of whose steps only the first are warm-up."""
    runner.sampling_run = "verify"
    return trial.results(runner.run)


def _plan_report(plan: ParallelPlan, ranks: Sequence[RankStep]) -> dict:
    """The plan, and what each rank sent a step."""
    return {
        "plan": plan.describe(),
        "name": plan.name,
        "weights": plan.weights,
        "lanes": plan.batch_groups,
        "lane_by_rank": [rank.batch_group for rank in ranks],
        "bytes_per_step": [rank.sent_bytes for rank in ranks],
        "calls_per_step": [rank.collectives for rank in ranks],
        "weight_bytes_per_step": [rank.weight_bytes for rank in ranks],
    }


def _errors(trial: Trial, results: Results, references: Results, ranks: Sequence[RankStep]) -> dict:
    """The largest error of all, of each rank (None for one without work), and of each piece of each rank."""
    found: list[list[dict]] = []
    for rank in ranks:
        found.append([])
        for piece in rank.pieces:
            pair = (tensors[piece.call][piece.start : piece.stop] for tensors in (results, references))
            found[-1].append({**piece._asdict(), "rel_err": relative_error(*pair)})
    per_rank = [worst([piece["rel_err"] for piece in ran]) if ran else None for ran in found]
    whole = [relative_error(*pair) for pair in zip(results, references, strict=True)]
    return {
        "text_tokens_by_call": trial.text_tokens,
        "max_rel_err": worst([*(error for error in per_rank if error is not None), *whole]),
        "per_rank": per_rank,
        "pieces_by_rank": found,
    }


def chosen_plan(text: str, weights: str | None, **pipeline: int | None) -> ParallelPlan:
    """The plan of `--plan` with the weights of `--weights`, and with what `pipeline` has but None.

    Raises `ValueError`, also when they disagree.
    """
    for key, value in {"weights": weights, **pipeline}.items():
        if value is None:
            continue
        if key in text:
            raise ValueError(
                f"--{OPTION_OF.get(key, key)} {value} and --plan {text} both name the {key}; name them once"
            )
        text = f"{text},{key}={value}"
    return ParallelPlan.parse(text)


def workload_of(arguments: argparse.Namespace) -> Workload:
    """The size of a call. Raises `ValueError` for one that is out of range."""
    sizes = ("width", "height", "text_tokens", "batch", "seed", "frames")
    return Workload(**{name: getattr(arguments, name) for name in sizes})


def idle_groups(plan: ParallelPlan, ranks: Sequence[RankStep]) -> list[str]:
    """A warning for every batch group that had no work."""
    size = plan.ranks // plan.batch_groups
    return [
        f"batch group {first // size} of {plan.batch_groups} had no work ({_named(first, first + size)}); "
        "use a larger --batch or fewer batch groups (data x cfg)"
        for first in range(0, plan.ranks, size)
        if not ranks[first].pieces
    ]


def _named(first: int, stop: int) -> str:
    return f"rank {first}" if stop == first + 1 else f"ranks {first} to {stop - 1}"


def control_options(plan: ParallelPlan, workload: Workload) -> dict[str, object]:
    """Options that make a plan wrong, as its ranks exchange nothing; {} where its batch groups shall all compute the
    first row.

    Raises `ValueError` for one row over batch groups, where there is nothing to confuse.
    """
    if plan.parts > 1 or plan.ranks == 1:
        return {"local_attention": True}
    if plan.cfg * workload.batch == 1:
        raise ValueError(f"--negative-control of {plan.name} needs two rows to confuse; use --batch 2 or more")
    return {}


def _tolerance(trial: Trial, dtype: torch.dtype, references: Results) -> tuple[float, float | None]:
    """What the plan is allowed, and the error of one process in the same dtype where that is the measure."""
    if dtype == torch.float32:
        return max(FP32_TOLERANCE, trial.coarse), None
    pairs = zip(trial.references(dtype, dtype), references, strict=True)
    one_process = worst([relative_error(*pair) for pair in pairs])
    return max(HALF_ALLOWANCE * one_process, trial.coarse), one_process


def describe(report: Mapping, paint: Paint = plain) -> str:
    """The report for people: the answer, what each rank did, and the answer again."""
    well = report["within_tolerance"]
    verdict = "equal to one process" if well else "NOT equal to one process"
    control = " (negative control: made wrong on purpose)" if report["negative_control"] else ""
    texts = " and ".join(str(tokens) for tokens in report["text_tokens_by_call"])
    lines = [
        f"{report['name']}: {verdict}{control}: relative error {report['max_rel_err']:.2e}, "
        f"tolerance {report['tolerance']:.2e}, {report['dtype']}",
        f"  {_size(report)} + {texts} text tokens, batch {report['batch']}, {report['steps']} step(s)",
    ]
    if "stale_difference" in report:
        stale = report["steps"] - report["warmup_steps"]
        lines[0] += ", every step a warm-up"
        lines.append(
            f"  after {report['warmup_steps']} step(s) of warm-up, {stale} with keys a step old, in "
            f"{report['patches']} patches: {report['stale_difference']:.2e} from one process, as PipeFusion is"
        )
    if "step_cache" in report:
        lines.append(f"  {describe_cached(report['step_cache'])}")
    lines += [_describe_rank(report, rank) for rank in range(len(report["per_rank"]))]
    answer = paint(f"{report['name']}: {verdict}{control}", "good" if well else "bad")
    lines[0] = lines[0].replace(f"{report['name']}: {verdict}{control}", answer, 1)
    return "\n".join([*lines, *(paint(f"warning: {text}", "note") for text in report["warnings"]), answer])


def _size(report: Mapping) -> str:
    frames = f" x {report['frames']} latent frames" if "frames" in report else ""
    return f"{report['model']}, {report['width']} x {report['height']} px{frames}"


def _describe_rank(report: Mapping, rank: int) -> str:
    error, pieces = report["per_rank"][rank], report["pieces_by_rank"][rank]
    batch_group, rows, weights = "", "", ""
    if report["lanes"] > 1:
        batch_group = f", batch group {report['lane_by_rank'][rank]}"
        runs = [f"rows {piece['start']} to {piece['stop'] - 1} of call {piece['call']}" for piece in pieces]
        rows = f" ({', '.join(runs)})"
    if report["weights"] != "replicated":
        weights = f" and {report['weight_bytes_per_step'][rank]:,} of weights"
    ran = "no work" if error is None else f"relative error {error:.2e}{rows}"
    return (
        f"  rank {rank}{batch_group}: {ran}, {report['calls_per_step'][rank]} collectives and "
        f"{report['bytes_per_step'][rank]:,} bytes{weights} sent a step, "
        f"{report['parameter_bytes_per_rank'][rank]:,} bytes of parameters"
    )
