"""`verify`: is a plan equal to one process? The judge is the unmodified diffusers model.

What runs are as many calls as the plan's cfg degree, as cond and uncond, of unequal text; rows of their batch are what
the data degree shares out.

fp32 must agree to 1e-5. In bf16 and fp16 nothing agrees to the last digit, so both the plan and one process in that
dtype are held against one process in fp32, and the plan may be at most 10 % further away than one process is. All of
them are given the inputs of each step as ComfyUI rounds them to that dtype: what is compared is the model's arithmetic,
which is a few thousandths off in bf16, while a plan that is wrong is off by far more.

A pipeline is held to that while every step is warm-up. After its warm-up it attends to keys a step old, on purpose:
that difference is shown beside it, and nobody's tolerance.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch

from ..checkpoint import ModelSpec, read_header
from ..models.family import MakeReference, OwnModel
from ..models.registry import USUAL, read_own
from ..patch import PRISTINE
from ..plan import ParallelPlan
from ..pool.calls import ModelCall
from ..pool.pool import Pool
from ..wire.replies import RankStep, StepReply
from .judge import load_judge
from .workload import Workload, choose_devices, euler, piece_errors, refuse_uncompilable, relative_error, worst

FP32_TOLERANCE = 1e-5
HALF_ALLOWANCE = 1.1
OPTION_OF = {"warmup_steps": "warmup"}
RunCalls: TypeAlias = Callable[[list[dict[str, torch.Tensor]]], list[torch.Tensor]]


class PlanRunner:
    """One plan of one model as a function from a step's tensors to its output, of one call or of several."""

    def __init__(self, pool: Pool, spec: ModelSpec, plan: ParallelPlan, *, options: Mapping[str, object]) -> None:
        self.pool, self.spec, self.plan, self.options = pool, spec, plan, options
        self.out_channels = read_own(read_header(spec.path)).config.out_channels
        self.patches = PRISTINE
        self.replies: list[StepReply] = []  # of the plan's ranks, to the last request
        self.traces: dict[int, bytes] = {}
        self.sampling_run: str | None = None  # of which calls are; a pipeline uses keys of the step before within one

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.run([tensors])[0]

    def run(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Several calls in one request, shared out over the plan's lanes."""
        calls = [
            ModelCall(
                tensors=tensors,
                out_shape=(*tensors["img"].shape[:2], self.out_channels),
                out_dtype=torch.float32,
                options=self._options_of(number),
            )
            for number, tensors in enumerate(inputs)
        ]
        result = self.pool.run(self.spec, self.plan, calls, patches=self.patches)
        self.replies, self.traces = result.ranks[: self.plan.ranks], result.traces
        return result.outs

    @property
    def ranks(self) -> list[RankStep]:
        """What each of the plan's ranks ran and sent in the last request."""
        return [reply.ran for reply in self.replies if reply.ran is not None]

    def _options_of(self, call: int) -> dict[str, object]:
        if self.sampling_run is None:
            return dict(self.options)
        return {**self.options, "pipeline": {"run": self.sampling_run, "key": f"call {call}"}}


def run(arguments: argparse.Namespace) -> dict:
    """Run the comparison. Raises `ValueError` for what cannot be run, `PoolError` when a rank fails."""
    pipeline = {"patches": arguments.patches, "warmup_steps": arguments.warmup}
    plan = chosen_plan(arguments.plan, arguments.weights, **pipeline)
    workload = Workload(
        width=arguments.width,
        height=arguments.height,
        text_tokens=arguments.text_tokens,
        batch=arguments.batch,
        seed=arguments.seed,
    )
    if arguments.steps < 1:
        raise ValueError(f"--steps={arguments.steps} is below 1; use at least one step")
    if plan.pipefusion > 1 and plan.warmup_steps > arguments.steps:
        raise ValueError(f"warmup_steps={plan.warmup_steps} is more than --steps={arguments.steps}; use at most that")
    judge = load_judge(USUAL)  # refused before anything starts
    model = read_own(read_header(arguments.model))
    model.check_plan(plan)
    spec = ModelSpec.of(arguments.model, arguments.dtype)
    selection = choose_devices(arguments.devices, plan)
    if arguments.compile:
        refuse_uncompilable(selection.devices)
    calls = workload.calls(model.config, plan.cfg)
    options = control_options(plan, workload) if arguments.negative_control else {}
    options = {**options, "compiled": arguments.compile}
    with Pool(selection.devices, threads_per_rank=arguments.threads_per_rank) as pool:
        loaded = pool.load(spec, plan)
        runner = PlanRunner(pool, spec, plan, options=options)
        run_plan = _cast_to(model, dtype := getattr(torch, loaded.dtype), runner.run)
        results = euler(run_plan, calls, arguments.steps)
        stale = _stale(runner, run_plan, calls, steps=arguments.steps) if plan.pipefusion > 1 else None
    on_cpu = selection.devices[0].kind == "cpu"
    one_process_in = partial(_one_process, judge, model, spec.path, on_cpu=on_cpu, compute_dtype=dtype)
    references = euler(one_process_in(torch.float32), calls, arguments.steps)
    tolerance, one_process = _tolerance(one_process_in, dtype, calls, references, steps=arguments.steps)
    report = {
        "dtype": loaded.dtype,
        "image_tokens": workload.image_tokens,
        "text_tokens": workload.text_tokens,
        "batch": workload.batch,
        "steps": arguments.steps,
        "negative_control": arguments.negative_control,
        "tolerance": tolerance,
        "parameter_bytes_per_rank": loaded.parameter_bytes[: plan.ranks],
        "warnings": [*selection.warnings, *idle_lanes(plan, runner.ranks)],
    }
    report |= _plan_report(plan, runner.ranks) | _errors(plan, calls, results, references, runner.ranks)
    report["within_tolerance"] = report["max_rel_err"] <= tolerance
    if arguments.compile:
        report["graphs_by_rank"] = [rank.compiled.graphs for rank in runner.ranks if rank.compiled is not None]
    if stale is not None:
        report |= {"warmup_steps": plan.warmup_steps, "patches": plan.num_patches}
        report["stale_difference"] = worst([relative_error(*pair) for pair in zip(stale, references, strict=True)])
    return report if one_process is None else report | {"one_process_rel_err": one_process}


def _cast_to(model: OwnModel, dtype: torch.dtype, run: RunCalls) -> RunCalls:
    """`run`, its calls' inputs rounded first as ComfyUI rounds them for a model that computes in `dtype`."""
    return lambda calls: run([model.cast_inputs(call, dtype) for call in calls])


def _stale(
    runner: PlanRunner, run: RunCalls, calls: list[dict[str, torch.Tensor]], *, steps: int
) -> list[torch.Tensor]:
    """`run`, which calls `runner`, once more as one sampling run, of whose steps only the first are warm-up."""
    runner.sampling_run = "verify"
    return euler(run, calls, steps)


def _plan_report(plan: ParallelPlan, ranks: Sequence[RankStep]) -> dict:
    """The plan, and what each rank sent a step."""
    return {
        "plan": plan.describe(),
        "name": plan.name,
        "weights": plan.weights,
        "lanes": plan.lanes,
        "lane_by_rank": [rank.lane for rank in ranks],
        "bytes_per_step": [rank.sent_bytes for rank in ranks],
        "calls_per_step": [rank.collectives for rank in ranks],
        "weight_bytes_per_step": [rank.weight_bytes for rank in ranks],
    }


def _errors(
    plan: ParallelPlan,
    calls: Sequence[Mapping[str, torch.Tensor]],
    results: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    ranks: Sequence[RankStep],
) -> dict:
    """The largest error of all, of each rank (None for one without work), and of each piece of each rank."""
    texts = [call["txt"].shape[1] for call in calls]
    pieces = piece_errors(results, references, plan=plan, text_tokens=texts, ranks=ranks)
    per_rank = [worst([piece["rel_err"] for piece in ran]) if ran else None for ran in pieces]
    whole = [relative_error(*pair) for pair in zip(results, references, strict=True)]
    return {
        "text_tokens_by_call": texts,
        "max_rel_err": worst([*(error for error in per_rank if error is not None), *whole]),
        "per_rank": per_rank,
        "pieces_by_rank": pieces,
    }


def chosen_plan(text: str, weights: str | None, **pipeline: int | None) -> ParallelPlan:
    """The plan of `--plan` with the weights of `--weights`, and with what `pipeline` has beside None.

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


def idle_lanes(plan: ParallelPlan, ranks: Sequence[RankStep]) -> list[str]:
    """A warning for every lane that had no work."""
    size = plan.ranks // plan.lanes
    return [
        f"lane {first // size} of {plan.lanes} had no work ({_named(first, first + size)}); "
        "use a larger --batch or fewer lanes (data x cfg)"
        for first in range(0, plan.ranks, size)
        if not ranks[first].pieces
    ]


def _named(first: int, stop: int) -> str:
    return f"rank {first}" if stop == first + 1 else f"ranks {first} to {stop - 1}"


def control_options(plan: ParallelPlan, workload: Workload) -> dict[str, object]:
    """Options that make a plan wrong: its ranks exchange nothing, or its lanes all compute the first row.

    Raises `ValueError` for one row over lanes, where there is nothing to confuse.
    """
    if plan.parts > 1 or plan.ranks == 1:
        return {"local_attention": True}
    if plan.cfg * workload.batch == 1:
        raise ValueError(f"--negative-control of {plan.name} needs two rows to confuse; use --batch 2 or more")
    return {"first_row": True}


def _one_process(
    judge: MakeReference, model: OwnModel, path: str, dtype: torch.dtype, *, on_cpu: bool, compute_dtype: torch.dtype
) -> RunCalls:
    """The reference model in `dtype`, with inputs and scales as they are rounded for ranks that compute in another."""
    oracle = judge(path, dtype=dtype, scale_dtype=compute_dtype if on_cpu else torch.float32)
    return _cast_to(model, compute_dtype, lambda calls: [oracle(call) for call in calls])


def _tolerance(
    one_process_in: Callable[[torch.dtype], RunCalls],
    dtype: torch.dtype,
    calls: list[dict[str, torch.Tensor]],
    references: list[torch.Tensor],
    *,
    steps: int,
) -> tuple[float, float | None]:
    """What the plan is allowed, and the error of one process in the same dtype where that is the measure."""
    if dtype == torch.float32:
        return FP32_TOLERANCE, None
    results = euler(one_process_in(dtype), calls, steps)
    one_process = worst([relative_error(*pair) for pair in zip(results, references, strict=True)])
    return HALF_ALLOWANCE * one_process, one_process


def describe(report: Mapping) -> str:
    """The report for people."""
    verdict = "equal to one process" if report["within_tolerance"] else "NOT equal to one process"
    control = " (negative control: made wrong on purpose)" if report["negative_control"] else ""
    texts = " and ".join(str(tokens) for tokens in report["text_tokens_by_call"])
    lines = [
        f"{report['name']}: {verdict}{control}: relative error {report['max_rel_err']:.2e}, "
        f"tolerance {report['tolerance']:.2e}, {report['dtype']}",
        f"  {report['image_tokens']} image + {texts} text tokens, batch {report['batch']}, {report['steps']} step(s)",
    ]
    if "stale_difference" in report:
        stale = report["steps"] - report["warmup_steps"]
        lines[0] += ", every step a warm-up"
        lines.append(
            f"  after {report['warmup_steps']} step(s) of warm-up, {stale} with keys a step old, in "
            f"{report['patches']} patches: {report['stale_difference']:.2e} from one process, as PipeFusion is"
        )
    lines += [_describe_rank(report, rank) for rank in range(len(report["per_rank"]))]
    return "\n".join([*(f"warning: {text}" for text in report["warnings"]), *lines])


def _describe_rank(report: Mapping, rank: int) -> str:
    error, pieces = report["per_rank"][rank], report["pieces_by_rank"][rank]
    lane, rows, weights = "", "", ""
    if report["lanes"] > 1:
        lane = f", lane {report['lane_by_rank'][rank]}"
        runs = [f"rows {piece['start']} to {piece['stop'] - 1} of call {piece['call']}" for piece in pieces]
        rows = f" ({', '.join(runs)})"
    if report["weights"] != "replicated":
        weights = f" and {report['weight_bytes_per_step'][rank]:,} of weights"
    ran = "no work" if error is None else f"relative error {error:.2e}{rows}"
    return (
        f"  rank {rank}{lane}: {ran}, {report['calls_per_step'][rank]} collectives and "
        f"{report['bytes_per_step'][rank]:,} bytes{weights} sent a step, "
        f"{report['parameter_bytes_per_rank'][rank]:,} bytes of parameters"
    )
