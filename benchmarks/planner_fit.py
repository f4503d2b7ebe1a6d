"""Fits the planner's constants to the rows marked `fitted`, and to no others, and writes planner_constants.json.

    python -m benchmarks.planner_fit

Each constant has a meaning and stands for something a calibration on the machine measures; coordinate descent on their
logarithms, least squares of the logarithm of predicted over published seconds.

Also fits the two PCIe links of the planner's own table, for machines that nobody has calibrated: one to the fitted rows
of all machines with few devices, one to those with many; and each once more without the rows of one machine, to judge
what the table is worth on a machine it never saw.
"""

import copy
import json
import math
import sys
from dataclasses import replace

from benchmarks.planner_model import HERE, MACHINES, Row, predict_row, read_rows, table_calibration
from parallel_runtime.planner.hardware import Interconnect
from parallel_runtime.planner.known import EAGER, SHARED_ABOVE

OPERATION_S = EAGER.operation_s  # the host's time for one: of engines whose operations nobody counted, as for ours
START = {
    "decode_flops_per_pixel": 80e6,
    "software": {
        "eager": {
            "passes": 94.0,
            "merge_passes": 12.0,
            "block_operations": 120.0,
            "exchange_operations": 130.0,
            "operation_s": OPERATION_S,
        },
        "compiled": {
            "passes": 22.0,
            "merge_passes": 8.0,
            "block_operations": 50.0,
            "exchange_operations": 20.0,
            "operation_s": OPERATION_S,
        },
        "cpu": {
            "passes": 30.0,
            "merge_passes": 4.0,
            "block_operations": 30.0,
            "exchange_operations": 30.0,
            "operation_s": OPERATION_S,
        },
    },
    "devices": {
        "H100": {"matmul": 0.6, "attention": 0.4},
        "A100": {"matmul": 0.75, "attention": 0.70},
        "H20": {"matmul": 0.9, "attention": 0.6},
        "L40": {"matmul": 0.8, "attention": 0.7},
        "L20": {"matmul": 0.9, "attention": 0.9},
        "RTX 4090": {"matmul": 0.85, "attention": 0.85},
        "RTX 2000 Ada": {"matmul": 0.8, "attention": 0.8},
        "cpu": {"matmul_flops": 80e9, "attention": 1.0, "memory_bandwidth": 10e9},
    },
    "links": {
        "NVLink": {"bandwidth": 270e9, "latency_s": 25e-6, "contention": 0.0},
        "8xL40 PCIe": {"bandwidth": 16e9, "latency_s": 40e-6, "contention": 2.0},
        "8xL20 PCIe (xDiT)": {"bandwidth": 16e9, "latency_s": 40e-6, "contention": 0.5},
        "4xL20 PCIe (cache-dit)": {"bandwidth": 16e9, "latency_s": 40e-6, "contention": 0.5},
        "4xL20 PCIe (diffusers)": {"bandwidth": 16e9, "latency_s": 40e-6, "contention": 0.5},
        "4x4090-48G PCIe": {"bandwidth": 16e9, "latency_s": 40e-6, "contention": 0.5},
        "2xRTX 2000 Ada SYS": {"bandwidth": 8e9, "latency_s": 40e-6, "contention": 0.0},
        "2 CPU cores": {"bandwidth": 2.0e9, "latency_s": 0.21e-3, "contention": 0.0},
    },
}
FREE = (
    ("decode_flops_per_pixel",),
    ("software", "eager", "passes"),
    ("software", "eager", "block_operations"),
    ("software", "eager", "exchange_operations"),
    ("software", "eager", "merge_passes"),
    ("software", "cpu", "block_operations"),
    ("software", "cpu", "exchange_operations"),
    ("devices", "H100", "matmul"),
    ("devices", "H100", "attention"),
    ("devices", "A100", "matmul"),
    ("devices", "H20", "attention"),
    ("devices", "L40", "matmul"),
    ("devices", "L40", "attention"),
    ("devices", "L20", "matmul"),
    ("devices", "L20", "attention"),
    ("devices", "RTX 2000 Ada", "matmul"),
    ("devices", "cpu", "matmul_flops"),
    ("links", "8xL40 PCIe", "bandwidth"),
    ("links", "8xL40 PCIe", "contention"),
    ("links", "8xL20 PCIe (xDiT)", "bandwidth"),
    ("links", "8xL20 PCIe (xDiT)", "contention"),
    ("links", "4xL20 PCIe (cache-dit)", "bandwidth"),
    ("links", "4xL20 PCIe (cache-dit)", "contention"),
    ("links", "4xL20 PCIe (diffusers)", "bandwidth"),
    ("links", "4x4090-48G PCIe", "bandwidth"),
    ("links", "2xRTX 2000 Ada SYS", "bandwidth"),
)
ROUNDS = 60
# Nothing reaches more than its spec sheet: a fraction of 1, PCIe 4.0 with 16 lanes, and 8 lanes on the
# RTX 2000 Ada.
PCIE4_BANDWIDTH = 31.5e9
LIMITS = {"2xRTX 2000 Ada SYS": PCIE4_BANDWIDTH / 2}


# Machines on PCIe 4.0 with all lanes, which the table's links stand for.
TABLE_CONSTANTS = 4  # bandwidth and contention of two links
TABLE_MACHINES = tuple(name for name in MACHINES if name.endswith(("PCIe", ")")))


def loss(rows: list[Row], constants: dict) -> float:
    """Sum of squared logarithms of predicted over published seconds."""
    return sum(math.log(predict_row(row, constants).run_s / row.seconds) ** 2 for row in rows)


def fit(rows: list[Row]) -> dict:
    """The constants at which the fitted rows are met best, by coordinate descent with shrinking factors."""
    constants = copy.deepcopy(START)
    best = loss(rows, constants)
    factor = 1.3
    for _ in range(ROUNDS):
        for path in FREE:
            for scale in (factor, 1 / factor):
                best = _try(rows, constants, path, scale, best)
        factor = 1 + (factor - 1) * 0.88
    return constants


def table_rows(rows: list[Row], *, shared: bool) -> list[Row]:
    """The rows that tell of the table's PCIe link between few devices, or of the one that many share."""
    return [
        row
        for row in rows
        if row.machine in TABLE_MACHINES and row.plan.ranks > 1 and (MACHINES[row.machine][1] > SHARED_ABOVE) == shared
    ]


def table_loss(rows: list[Row], constants: dict, link: dict) -> float:
    """The loss of rows by the planner's own table with this link."""
    total = 0.0
    for row in rows:
        shipped = table_calibration(row, constants)
        changed: Interconnect = replace(shipped.link, **link)
        seconds = predict_row(row, constants, replace(shipped, link=changed)).run_s
        total += math.log(seconds / row.seconds) ** 2
    return total


def fit_table_link(rows: list[Row], constants: dict) -> dict:
    """Bandwidth and contention at which the table meets the rows best."""
    link = {"bandwidth": 20e9, "contention": 1.0}
    best, factor = table_loss(rows, constants, link), 1.3
    for _ in range(ROUNDS):
        for key in link:
            for scale in (factor, 1 / factor):
                tried = {**link, key: link[key] * scale}
                tried["bandwidth"] = min(tried["bandwidth"], PCIE4_BANDWIDTH)
                if (now := table_loss(rows, constants, tried)) < best:
                    link, best = tried, now
        factor = 1 + (factor - 1) * 0.88
    return link


def fit_table(rows: list[Row], constants: dict) -> dict:
    """`table_links` by name, `table_links_without` the rows of a machine by that machine, and what two are better."""
    groups = {False: table_rows(rows, shared=False), True: table_rows(rows, shared=True)}
    without = {}
    for machine in TABLE_MACHINES:
        group = groups[MACHINES[machine][1] > SHARED_ABOVE]
        without[machine] = fit_table_link([row for row in group if row.machine != machine], constants)
    links = {
        "pcie4": fit_table_link(groups[False], constants),
        "pcie4-shared": fit_table_link(groups[True], constants),
    }
    one = fit_table_link([*groups[False], *groups[True]], constants)
    losses = {
        "one link for all": table_loss([*groups[False], *groups[True]], constants, one),
        "two": table_loss(groups[False], constants, links["pcie4"])
        + table_loss(groups[True], constants, links["pcie4-shared"]),
    }
    return {"table_links": links, "table_links_without": without, "table_losses": losses}


def _try(rows: list[Row], constants: dict, path: tuple[str, ...], scale: float, best: float) -> float:
    holder = constants
    for key in path[:-1]:
        holder = holder[key]
    before = holder[path[-1]]
    after = before * scale
    if path[0] == "devices" and path[-1] in ("matmul", "attention"):
        after = min(after, 1.0)
    if path[0] == "links" and path[-1] == "bandwidth":
        after = min(after, LIMITS.get(path[1], PCIE4_BANDWIDTH))
    holder[path[-1]] = after
    now = loss(rows, constants)
    if now < best:
        return now
    holder[path[-1]] = before
    return best


def main() -> int:
    """Fit and write."""
    rows = [row for row in read_rows() if row.fitted]
    constants = fit(rows)
    constants |= fit_table(rows, constants)
    rounded = json.loads(json.dumps(constants), parse_float=lambda text: float(f"{float(text):.3g}"))
    (HERE / "planner_constants.json").write_text(json.dumps(rounded, indent=2) + "\n")
    sys.stdout.write(f"{len(FREE)} constants, {len(rows)} rows, loss {loss(rows, rounded):.4f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
