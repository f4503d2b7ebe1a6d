"""Reads published rows and predicts each with the planner's own formulas, under a given set of constants.

Owns how a row of planner_rows.json becomes a model, a work, a plan and a machine. The constants are
planner_constants.json, made by planner_fit.py, or those of the planner's own table.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.cost import Cost, step_cost
from parallel_runtime.planner.hardware import Calibration, Interconnect, Rates, Software
from parallel_runtime.planner.known import DEVICES, known_calibration, known_rates
from parallel_runtime.planner.work import ModelShape, Work

HERE = Path(__file__).resolve().parent
AXES = {"data": "data", "cfg": "cfg", "pipe": "pipefusion", "ring": "ring", "uly": "ulysses"}
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


def _shape(
    name: str, blocks: tuple[int, int], width: tuple[int, int], modulation: tuple[int, int], other: int
) -> ModelShape:
    """`blocks`: double, single; `width`: hidden, heads. An MLP is four times as wide. The engine runs none of them."""
    return ModelShape(
        name=name,
        double_blocks=blocks[0],
        single_blocks=blocks[1],
        hidden=width[0],
        heads=width[1],
        mlp_hidden=4 * width[0],
        modulation=modulation,
        other_params=other,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("flux1-dev", (19, 38), (3072, 24), (12, 3), 92_000_000),
        _shape("sd3-medium", (24, 0), (1536, 24), (12, 0), 60_000_000),
        _shape("cogvideox-5b", (0, 42), (3072, 48), (0, 0), 500_000_000),
        _shape("cogvideox-2b", (0, 30), (1920, 30), (0, 0), 200_000_000),
        _shape("hunyuan-video", (20, 40), (3072, 24), (12, 3), 200_000_000),
    )
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure: seconds of a run, or of a step where the table has no steps."""

    table: str
    machine: str
    software: str
    shape: ModelShape
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


def predict_row(row: Row, constants: dict, calibration: Calibration | None = None) -> tuple[float, Cost]:
    """(seconds as the row counts them, the step's cost), on the row's machine as calibrated unless one is given."""
    calibration = calibration_of(row, constants) if calibration is None else calibration
    cost = step_cost(row.shape, row.work, row.plan, calibration)
    if row.per_step:
        return cost.step_s, cost
    # `plan` predicts steps alone; what a published run decodes takes the same time under every plan.
    decode = row.decoded_megapixels * 1e6 * constants["decode_flops_per_pixel"] / calibration.rates.matmul_flops
    return cost.image_s(row.work.steps) + decode, cost


def calibration_of(row: Row, constants: dict) -> Calibration:
    """The constants fitted for the machine and the software of a row: what a calibrated machine has."""
    software = dict(constants["software"][row.software.split(",")[0]])
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
        software=Software(name=row.software, **software),
        source="planner_constants.json",
    )


def table_calibration(row: Row, constants: dict) -> Calibration:
    """What `plan` and auto take for a row's machine where nobody has calibrated it: the table that ships.

    Without what this project measured of its own engine: the rows are other engines'.
    """
    device, count = MACHINES[row.machine]
    return known_calibration(device, devices=count, compiled=row.software.startswith("compiled"), measured=False)


def new_machine(row: Row, constants: dict) -> Calibration:
    """The same, were this machine not among those that the table's PCIe links were fitted to."""
    shipped = table_calibration(row, constants)
    without = constants["table_links_without"].get(row.machine)
    return shipped if without is None else replace(shipped, link=replace(shipped.link, **without))


def _rates(device: str, reached: dict) -> Rates:
    if device == "cpu":
        return Rates(
            name="cpu",
            matmul_flops=reached["matmul_flops"],
            attention_flops=reached["matmul_flops"] * reached["attention"],
            memory_bandwidth=reached["memory_bandwidth"],
            memory_bytes=2**34,
            asynchronous=False,
        )
    peak = DEVICES[device].tflops * 1e12
    return replace(
        known_rates(device),
        matmul_flops=peak * reached["matmul"],
        attention_flops=peak * reached["attention"],
    )


def _rows_of(table: dict) -> list[Row]:
    work = Work(
        image_tokens=table["image_tokens"],
        text_tokens=table["text_tokens"],
        guided=table["guided"],
        steps=max(table["steps"], 1),
        element_bytes=table["element_bytes"],
        weight_bytes=table["weight_bytes"],
    )
    return [
        Row(
            table=table["id"],
            machine=table["machine"],
            software=table["software"],
            shape=shape_of(table["model"]),
            work=work,
            plan=parse_plan(plan),
            plan_name=plan,
            per_step=table["steps"] == 0,
            decoded_megapixels=table["decoded_megapixels"],
            seconds=seconds,
            use=use,
        )
        for plan, seconds, use in table["rows"]
    ]


def shape_of(name: str) -> ModelShape:
    """A published shape, or `flux-DEPTH-SINGLE-WIDTH` with heads of 64."""
    match = re.fullmatch(r"flux-(\d+)-(\d+)-(\d+)", name)
    if match is None:
        return SHAPES[name]
    double, single, width = (int(group) for group in match.groups())
    return ModelShape(
        name=name,
        double_blocks=double,
        single_blocks=single,
        hidden=width,
        heads=width // 64,
        mlp_hidden=4 * width,
    )
