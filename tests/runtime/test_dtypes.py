"""Every plan in each dtype that people compute in: as near to fp32 as one process is, and wrong plans are rejected.

The reference is unmodified diffusers, given a step's inputs as ComfyUI rounds them to that dtype, so that all it
measures is the model's arithmetic. That rounding itself is held against ComfyUI in tests/comfy/test_rounding.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner, control_options
from parallel_runtime.cli.workload import Workload, relative_error, worst
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.family import FluxModel
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

KINDS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8 scaled in bf16": "bfloat16"}
PLANS = [
    ParallelPlan.parse(text)
    for text in ("ulysses=2", "ring=2", "ring=3", "ulysses=2,ring=2", "ring=8", "pipefusion=2", "cfg=2", "data=2")
]
WORKLOAD = Workload(width=256, height=256, text_tokens=77)
PAIR = Workload(width=232, height=136, text_tokens=19, batch=2)  # for plans whose control confuses rows
EXACT = 1e-5  # fp32: sums in another order, of a few hundred terms
ALLOWANCE = 1.1  # halves: rounding at random places of two blocks; a tenth more than one process is chance
ONE_PROCESS = 2e-2  # more than any half's arithmetic makes of two blocks, less than half of what a wrong plan does


@dataclass(frozen=True)
class Reference:
    """What must come out of each call, and how far one process in the same dtype is from it."""

    expected: list[torch.Tensor]
    one_process: float

    @classmethod
    def of(cls, path: str, dtype: torch.dtype, calls: list[Mapping[str, torch.Tensor]]) -> "Reference":
        """Of the file's model, for calls whose inputs are rounded already."""
        exact, rounded = (ReferenceModel(path, dtype=each, scale_dtype=dtype) for each in (torch.float32, dtype))
        expected = [exact(call) for call in calls]
        errors = [relative_error(rounded(call), out) for call, out in zip(calls, expected, strict=True)]
        return cls(expected, worst(errors))

    def error(self, outs: list[torch.Tensor]) -> float:
        """Of the worst call."""
        return worst([relative_error(*pair) for pair in zip(outs, self.expected, strict=True)])


@pytest.fixture(scope="module")
def files(sample: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By kind the file to load: the sample, and once more with the matrices of its blocks in scaled fp8."""
    stored = {}
    for name, tensor in load_file(sample.path).items():
        matrix = "_blocks." in name and tensor.ndim == 2
        scale = tensor.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        stored[name] = (tensor / scale).to(torch.float8_e4m3fn) if matrix else tensor.to(torch.bfloat16)
        if matrix:
            stored[name.replace(".weight", ".weight_scale")] = scale
    path: Path = tmp_path_factory.mktemp("fp8") / "scaled.safetensors"
    save_file(stored, path)
    return {kind: str(path) if "fp8" in kind else sample.path for kind in KINDS}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "bf16" else [pytest.mark.full]) for kind in KINDS]
)
def test_every_plan_is_as_near_to_fp32_as_one_process_and_without_its_exchange_none_is(
    eight_ranks: Pool, files: dict[str, str], kind: str
) -> None:
    spec = ModelSpec.of(files[kind], KINDS[kind])
    dtype = getattr(torch, KINDS[kind])
    config = FluxConfig.from_header(read_header(spec.path))
    found: dict[Workload, tuple[list[dict[str, torch.Tensor]], Reference]] = {}
    for workload in (WORKLOAD, PAIR):
        calls = [FluxModel(config).cast_inputs(call, dtype) for call in workload.calls(config, 2)]
        found[workload] = calls, Reference.of(spec.path, dtype, calls)
        assert found[workload][1].one_process < ONE_PROCESS
    for plan in PLANS:
        workload = WORKLOAD if plan.parts > 1 else PAIR
        calls, reference = found[workload]
        allowed = max(EXACT, ALLOWANCE * reference.one_process)
        error = reference.error(PlanRunner(eight_ranks, spec, plan, options={}).run(calls))
        assert error <= allowed, plan.name
        assert kind == "fp32" or error > 10 * EXACT, f"{plan.name}: so near to fp32, it did not run in {kind}"
        control = control_options(plan, workload)
        wrong = reference.error(PlanRunner(eight_ranks, spec, plan, options=control).run(calls))
        assert wrong > 2 * max(allowed, ONE_PROCESS), f"{plan.name}: the control would pass"
    eight_ranks.unload(spec)
