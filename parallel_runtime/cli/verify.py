"""`verify`: is a plan equal to one process? The judge is the unmodified diffusers model.

fp32 must agree to 1e-5. In bf16 and fp16 nothing agrees to the last digit, so both the plan and one process in that
dtype are held against one process in fp32, and the plan may be at most 10 % further away than one process is.
"""

import argparse
from collections.abc import Mapping

import torch

from ..adapters.flux_config import FluxConfig
from ..adapters.flux_inputs import check_plan
from ..checkpoint import ModelSpec, read_header
from ..patch import PRISTINE
from ..plan import ParallelPlan
from ..pool.pool import Pool
from .judge import load_judge
from .workload import Workload, choose_devices, error_by_rank, euler, relative_error, worst

FP32_TOLERANCE = 1e-5
HALF_ALLOWANCE = 1.1


class PlanRunner:
    """One plan of one model as a function from a step's tensors to its output."""

    def __init__(self, pool: Pool, spec: ModelSpec, plan: ParallelPlan, *, options: Mapping[str, object]) -> None:
        self.pool, self.spec, self.plan, self.options = pool, spec, plan, options
        self.out_channels = FluxConfig.from_header(read_header(spec.path)).out_channels
        self.patches = PRISTINE
        self.ranks: list[dict] = []

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        shape = (*tensors["img"].shape[:2], self.out_channels)
        result = self.pool.step(
            self.spec,
            self.plan,
            tensors,
            out_shape=shape,
            out_dtype=torch.float32,
            options=self.options,
            patches=self.patches,
        )
        self.ranks = result.ranks[: self.plan.ranks]
        return result.out


def run(arguments: argparse.Namespace) -> dict:
    """Run the comparison. Raises `ValueError` for what cannot be run, `PoolError` when a rank fails."""
    plan = ParallelPlan.parse(arguments.plan)
    workload = Workload(
        width=arguments.width,
        height=arguments.height,
        text_tokens=arguments.text_tokens,
        batch=arguments.batch,
        seed=arguments.seed,
    )
    if arguments.steps < 1:
        raise ValueError(f"--steps={arguments.steps} is below 1; use at least one step")
    judge = load_judge()
    config = FluxConfig.from_header(read_header(arguments.model))
    check_plan(config, plan)
    spec = ModelSpec.of(arguments.model, arguments.dtype)
    selection = choose_devices(arguments.devices, plan)
    tensors = workload.tensors(config)
    with Pool(selection.devices, threads_per_rank=arguments.threads_per_rank) as pool:
        loaded = pool.load(spec)
        runner = PlanRunner(pool, spec, plan, options={"local_attention": arguments.negative_control})
        result = euler(runner, tensors, arguments.steps)
    dtype = getattr(torch, loaded.dtype)
    reference = euler(judge(spec.path, dtype=torch.float32), tensors, arguments.steps)
    tolerance, one_process = _tolerance(spec.path, dtype, tensors, reference, steps=arguments.steps)
    per_rank = error_by_rank(result, reference, plan=plan, text_tokens=workload.text_tokens)
    error = worst([*per_rank, relative_error(result, reference)])
    report = {
        "plan": plan.describe(),
        "name": plan.name,
        "dtype": loaded.dtype,
        "weights": plan.weights,
        "image_tokens": workload.image_tokens,
        "text_tokens": workload.text_tokens,
        "batch": workload.batch,
        "steps": arguments.steps,
        "negative_control": arguments.negative_control,
        "max_rel_err": error,
        "per_rank": per_rank,
        "tolerance": tolerance,
        "within_tolerance": error <= tolerance,
        "parameter_bytes_per_rank": loaded.parameter_bytes[: plan.ranks],
        "bytes_per_step": [rank["bytes"] for rank in runner.ranks],
        "calls_per_step": [rank["calls"] for rank in runner.ranks],
        "warnings": list(selection.warnings),
    }
    return report if one_process is None else report | {"one_process_rel_err": one_process}


def _tolerance(
    path: str, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor], reference: torch.Tensor, *, steps: int
) -> tuple[float, float | None]:
    """What the plan is allowed, and the error of one process in the same dtype where that is the measure."""
    if dtype == torch.float32:
        return FP32_TOLERANCE, None
    one_process = relative_error(euler(load_judge()(path, dtype=dtype), tensors, steps), reference)
    return HALF_ALLOWANCE * one_process, one_process


def describe(report: Mapping) -> str:
    """The report for people."""
    verdict = "equal to one process" if report["within_tolerance"] else "NOT equal to one process"
    control = " (negative control: attention exchange switched off)" if report["negative_control"] else ""
    lines = [
        f"{report['name']}: {verdict}{control}: relative error {report['max_rel_err']:.2e}, "
        f"tolerance {report['tolerance']:.2e}, {report['dtype']}",
        f"  {report['image_tokens']} image + {report['text_tokens']} text tokens, batch {report['batch']}, "
        f"{report['steps']} step(s)",
    ]
    for rank, error in enumerate(report["per_rank"]):
        lines.append(
            f"  rank {rank}: relative error {error:.2e}, {report['calls_per_step'][rank]} collectives and "
            f"{report['bytes_per_step'][rank]:,} bytes sent a step, "
            f"{report['parameter_bytes_per_rank'][rank]:,} bytes of parameters"
        )
    return "\n".join([*(f"warning: {text}" for text in report["warnings"]), *lines])
