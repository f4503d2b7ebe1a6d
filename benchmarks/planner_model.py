"""Reads published rows and predicts each with the planner's own formulas, under a given set of constants.

Owns how a row of planner_rows.json becomes a model as the planner counts one, a work, a plan and a machine. The
constants are planner_constants.json, made by planner_fit.py, or those of the planner's own table.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_runtime.plan import PLAN_AXES, ParallelPlan
from parallel_runtime.planner.choose import Prediction
from parallel_runtime.planner.cost import shown_heads_s, step_cost
from parallel_runtime.planner.counted import CountedModel
from parallel_runtime.planner.hardware import Calibration, Interconnect, Rates, Software
from parallel_runtime.planner.known import DEVICES, known_calibration, known_rates
from parallel_runtime.planner.memory import PlannedMemory
from parallel_runtime.planner.work import Work

HERE = Path(__file__).resolve().parent
AXES = {axis.short: name for name, axis in PLAN_AXES.items()}
# The device of each machine, and how many it has.
MACHINES = {
    "8xH100 NVLink": ("H100", 8),
    "8xA100 NVLink": ("A100", 8),
    "8xH20 NVLink": ("H20", 8),
    "8xL40 PCIe": ("L40", 8),
    "8xL20 PCIe (xDiT)": ("L20", 8),
    "4xL20 PCIe (cache-dit)": ("L20", 4),
    "4xL20 PCIe (diffusers)": ("L20", 4),
    "4x4090-48G PCIe": ("RTX 4090", 4),
    "2xRTX 2000 Ada SYS": ("RTX 2000 Ada", 2),
    "2 CPU cores": ("cpu", 2),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A published transformer with joint attention: `blocks` (double, single), and an MLP four times as wide.

    `modulation`: the matrices of the adaptive norms in units of width * width, of a block of either kind.
    `other_params`: weights outside of the blocks. `channels`: numbers of the latent that make a token.
    """

    name: str
    blocks: tuple[int, int]
    width: int
    heads: int
    modulation: tuple[int, int] = (12, 3)
    other_params: int = 0
    channels: int = 64

    def counted(self, work: Work, engine: Mapping[str, float], *, weight_bytes: int = 2) -> CountedModel:
        """As the planner counts a model, whose blocks an engine runs with these operations and passes each."""
        (double, single), width, element_bytes = self.blocks, self.width, work.element_bytes
        blocks, token_params = double + single, 12 * width**2
        own = tuple(2 * token_params + self.modulation[0] * width**2 for _ in range(double))
        own += tuple(token_params + self.modulation[1] * width**2 for _ in range(single))
        sent = _a_token(2.0 * element_bytes * width * blocks)
        flops = 4.0 * width * blocks
        return CountedModel(
            name=self.name,
            numbers_per_token=float(self.channels),
            key_heads=self.heads,
            weight_bytes=round((sum(own) + self.other_params) * weight_bytes),
            block_bytes=tuple(each * weight_bytes for each in own),
            staged_blocks=blocks,
            whole={
                "attended.attention_flops": (0.0, 0.0, flops, 0.0, 2 * flops, flops),
                "key_bytes": sent,
                "query_bytes": sent,
                "exchanges": (float(blocks),),
                "gathers": (1.0,),
                "gathered_bytes": (0.0, float(self.channels * element_bytes)),
                "module.operations": ((blocks + 1) * engine["block_operations"],),
                "exchange.operations": (blocks * engine["exchange_operations"],),
            },
            shared={
                "module.matmul_flops": (
                    0.0,
                    2.0 * token_params * blocks + 4.0 * self.channels * width,
                    0.0,
                    2.0 * token_params * blocks,
                ),
                "module.moved_bytes": _a_token(engine["passes"] * width * element_bytes * blocks),
            },
        )


def _a_token(amount: float) -> tuple[float, ...]:
    """So much of each token, of the picture and of the text."""
    return 0.0, amount, 0.0, amount


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="flux1-dev", blocks=(19, 38), width=3072, heads=24, modulation=(12, 3), other_params=92_000_000),
        Shape(name="sd3-medium", blocks=(24, 0), width=1536, heads=24, modulation=(12, 0), other_params=60_000_000),
        Shape(name="cogvideox-5b", blocks=(0, 42), width=3072, heads=48, modulation=(0, 0), other_params=500_000_000),
        Shape(name="cogvideox-2b", blocks=(0, 30), width=1920, heads=30, modulation=(0, 0), other_params=200_000_000),
        Shape(
            name="hunyuan-video", blocks=(20, 40), width=3072, heads=24, modulation=(12, 3), other_params=200_000_000
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure: seconds of a run, or of a step where the table has no steps."""

    table: str
    machine: str
    software: str
    shape: Shape
    weight_bytes: int
    work: Work
    plan: ParallelPlan
    plan_name: str  # as the table has it
    per_step: bool
    decoded_megapixels: float
    seconds: float
    use: str  # fitted, held out, or unseen: held out and first read when everything was final

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to it."""
        return self.use == "fitted"

    @property
    def engine(self) -> str:
        """How the software runs blocks: eager, compiled, or on a CPU."""
        return self.software.split(",")[0]

    @property
    def published(self) -> bool:
        """Whether others measured it."""
        return not self.table.startswith("own-")


def read_rows(path: Path = HERE / "planner_rows.json") -> list[Row]:
    """All rows. Raises `ValueError` for a plan that cannot be read."""
    return [row for table in json.loads(path.read_text()) for row in _rows_of(table)]


def parse_plan(name: str) -> ParallelPlan:
    """`single`, `uly2`, `cfg2-ring2-uly2`."""
    degrees: dict[str, int] = {}
    for part in name.split("-") if name != "single" else ():
        match = re.fullmatch(r"([a-z]+)([0-9]+)", part)
        if match is None:
            raise ValueError(f"plan {name!r} is not written as uly2 or cfg2-ring2")
        degrees[AXES[match[1]]] = int(match[2])
    return ParallelPlan(**degrees)  # type: ignore[arg-type]


def predict_row(row: Row, constants: dict, calibration: Calibration | None = None) -> Prediction:
    """Seconds as the row counts them, on its machine as calibrated unless one is given; what a run takes of memory is
    left out."""
    calibration = calibration_of(row, constants) if calibration is None else calibration
    model = row.shape.counted(row.work, constants["software"][row.engine], weight_bytes=row.weight_bytes)
    cost = step_cost(model, row.work, row.plan, calibration)
    seconds = cost.step_s
    if not row.per_step:
        # `plan` predicts steps alone; what a published run decodes takes the same time under every plan.
        decode = row.decoded_megapixels * 1e6 * constants["decode_flops_per_pixel"] / calibration.rates.matmul_flops
        seconds = cost.image_s(row.work.steps) + decode
    nothing = PlannedMemory(weights=0, activations=0, buffers=0, runtime=0)
    shown_s = shown_heads_s(model, row.work, row.plan, calibration)
    return Prediction(plan=row.plan, cost=cost, memory=nothing, run_s=seconds, fits=True, shown_s=shown_s)


def calibration_of(row: Row, constants: dict) -> Calibration:
    """The constants fitted for the machine and the software of a row: what a calibrated machine has."""
    link = constants["links"].get(row.machine, constants["links"]["NVLink"])
    device, _ = MACHINES[row.machine]
    bandwidth = link["bandwidth"] * (2 / 3 if device == "A100" else 1)  # NVLink 3 has 600 GB/s where NVLink 4 has 900
    return Calibration(
        rates=_rates(device, constants["devices"][device]),
        link=Interconnect(
            name=row.machine,
            bandwidth=bandwidth,
            latency_s=link["latency_s"],
            contention=link["contention"],
        ),
        software=_software(row, constants),
        source="planner_constants.json",
    )


def table_calibration(row: Row, constants: dict) -> Calibration:
    """What `plan` and auto take for a row's machine where nobody has calibrated it: the table that ships.

    Without what this project measured of its own engine: the rows are other engines', which are counted as they are.
    """
    device, count = MACHINES[row.machine]
    table = known_calibration(device, devices=count, measured=False)
    return replace(table, rates=replace(table.rates, most_chunks=1), software=_software(row, constants))


def new_machine(row: Row, constants: dict) -> Calibration:
    """The same, were this machine not among those that the table's PCIe links were fitted to."""
    shipped = table_calibration(row, constants)
    without = constants["table_links_without"].get(row.machine)
    return shipped if without is None else replace(shipped, link=replace(shipped.link, **without))


def _software(row: Row, constants: dict) -> Software:
    engine = constants["software"][row.engine]
    return Software(name=row.software, merge_passes=engine["merge_passes"], operation_s=engine["operation_s"])


def _rates(device: str, reached: dict) -> Rates:
    """As the constants have them. No engine in the rows sends heads in chunks."""
    if device == "cpu":
        return replace(
            known_calibration("cpu").rates,
            matmul_flops=reached["matmul_flops"],
            attention_flops=reached["matmul_flops"] * reached["attention"],
            memory_bandwidth=reached["memory_bandwidth"],
            most_chunks=1,
        )
    peak = DEVICES[device].tflops * 1e12
    return replace(
        known_rates(device),
        matmul_flops=peak * reached["matmul"],
        attention_flops=peak * reached["attention"],
        most_chunks=1,
    )


def _rows_of(table: dict) -> list[Row]:
    work = Work(
        image_tokens=table["image_tokens"],
        text_tokens=table["text_tokens"],
        guided=table["guided"],
        steps=max(table["steps"], 1),
        element_bytes=table["element_bytes"],
    )
    return [
        Row(
            table=table["id"],
            machine=table["machine"],
            software=table["software"],
            shape=shape_of(table["model"]),
            weight_bytes=table["weight_bytes"],
            work=_in_one_call(work, parse_plan(plan)),
            plan=parse_plan(plan),
            plan_name=plan,
            per_step=table["steps"] == 0,
            decoded_megapixels=table["decoded_megapixels"],
            seconds=seconds,
            use=use,
        )
        for plan, seconds, use in table["rows"]
    ]


def _in_one_call(work: Work, plan: ParallelPlan) -> Work:
    """Engines call the model once for prompt and negative, where one batch group has both."""
    return replace(work, guided=False, batch=2 * work.batch) if work.guided and plan.cfg == 1 else work


def shape_of(name: str) -> Shape:
    """A published shape, or `flux-DEPTH-SINGLE-WIDTH` with heads of 64."""
    match = re.fullmatch(r"flux-(\d+)-(\d+)-(\d+)", name)
    if match is None:
        return SHAPES[name]
    double, single, width = (int(group) for group in match.groups())
    return Shape(name=name, blocks=(double, single), width=width, heads=width // 64)
