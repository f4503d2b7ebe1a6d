"""Measures what the planner's constants are on these devices, through the pool and engine that will run the images.

Owns what is measured and how constants follow from it. `doctor --calibrate` runs it and keeps the result. Everything is
the slowest rank's, with all ranks busy at once, as they are in a step.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ..checkpoint import ModelSpec
from ..devices import Device, ranks_by_machine
from ..machines.machine import Machine
from ..models.family import OwnModel
from ..models.registry import USUAL
from ..plan import ParallelPlan
from ..planner.cost import step_cost
from ..planner.hardware import NARROW, WIDE, Calibration, Interconnect, Rates, Software
from ..planner.known import EAGER, ON_CPU, known_link
from ..planner.machine import calibration_path, device_set, free_bytes
from ..planner.shapes import Work
from ..planner.store import CalibrationStore
from ..pool.pool import Pool
from ..redact_paths import with_short_home
from ..wire.replies import ProbeReply
from .verify import PlanRunner
from .workload import Workload

HEAD_DIM = 32
DEPTHS = ((4, 4), (12, 12))  # double and single blocks of the models that are nothing but overhead
RUNS = 9
SETTLING = 3
# The models whose blocks are mostly computing, and their work, by kind of device.
PASSING_DEPTHS = ((1, 2), (3, 6))
PASSING = {
    "cpu": ({"heads": 8, "head_dim": 64}, Workload(width=512, height=256, text_tokens=64)),
    "cuda": ({"heads": 8, "head_dim": 128}, Workload(width=1024, height=1024, text_tokens=512, batch=4)),
}
LAUNCH_BOUND = 1.5
OWN_SWAP_CALLS = 2  # q, k and v there in one, the output back in another

Point: TypeAlias = tuple[float, float]  # an amount, and the seconds that it took
Probes = Mapping[int, Sequence[ProbeReply]]  # by the ranks of the axis that was probed


@dataclass(frozen=True)
class Line:
    """Seconds of a call: a constant, and a rate at which it works off its amount."""

    rate: float
    latency_s: float

    @classmethod
    def through(cls, points: Sequence[Point]) -> "Line":
        """The line through (amount, seconds) of a small and a large call, or from zero when noise has it falling."""
        (small, quick), (large, slow) = points[0], points[-1]
        rate = (large - small) / (slow - quick) if large > small and slow > quick else large / slow
        return cls(rate, max(0.0, quick - small / rate))


def keep_calibration(devices: tuple[Device, ...], machines: Sequence[Machine] = ()) -> dict[str, object]:
    """Start ranks on the devices and on those of further machines, calibrate, and keep the result for `plan` and
    automatic plans.

    Returns what was measured, how long it took and where it is kept. Raises `ValueError` where that cannot be written.
    """
    store = CalibrationStore(calibration_path())
    began = time.perf_counter()
    devices += tuple(Device.of_machine(text, machine.name) for machine in machines for text in machine.devices)
    further = (lambda _: machines) if machines else None
    with tempfile.TemporaryDirectory() as folder, Pool(devices, threads_per_rank=1, machines=further) as pool:
        found = calibrate(pool, Path(folder))
    try:
        store.save(device_set(devices), found)
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a folder that can be written"
        raise ValueError(f"{store.path} cannot be written ({error.strerror}); {remedy}") from error
    return {
        "devices": device_set(devices),
        "file": with_short_home(str(store.path)),
        "wall_s": time.perf_counter() - began,
        "constants": asdict(found),
    }


def describe_calibration(kept: Mapping) -> str:
    """What was measured, in two lines for people."""
    constants = kept["constants"]
    rates, link, software = constants["rates"], constants["link"], constants["software"]
    between = ""
    if constants["between"] is not None:
        rate, latency = constants["between"]["bandwidth"], constants["between"]["latency_s"]
        between = f"between machines {rate * 8 / 1e9:.3g} Gbit/s and {latency * 1e6:.0f} us, "
    return (
        f"calibrated {kept['devices']} in {kept['wall_s']:.1f} s: matrices {rates['matmul_flops'] / 1e12:.3g} TFLOP/s, "
        f"attention {rates['attention_flops'] / 1e12:.3g} TFLOP/s, memory {rates['memory_bandwidth'] / 1e9:.3g} GB/s, "
        f"link {link['bandwidth'] / 1e9:.3g} GB/s and {link['latency_s'] * 1e6:.0f} us, "
        f"{between}block {software['block_s'] * 1e3:.2f} ms\nkept in {kept['file']}; plan uses it from now on"
    )


def calibrate(pool: Pool, folder: Path) -> Calibration:
    """Measure, in a few seconds. `folder` takes two small models of random weights. Raises `PoolError`."""
    machines = ranks_by_machine(pool.devices)
    asynchronous = pool.devices[0].kind == "cuda"
    probes = {span: pool.probe(plan) for span, plan in _spans(machines[0]).items()}
    rates = _rates(pool, probes, asynchronous=asynchronous)
    link = _link(probes)
    software = replace(_software(pool, folder, rates, link), operation_s=_operation_s(probes[max(probes)]))
    found = Calibration(rates=rates, link=link, software=software, source="measured on these devices by doctor")
    if len(machines) == 1:
        return found
    return replace(found, between=_between(pool.probe(ParallelPlan(ulysses=sum(machines)))), machines=machines)


def _spans(ranks: int) -> dict[int, ParallelPlan]:
    """The plans to probe, by the ranks of their ulysses axis: all at once, and pairs beside each other."""
    spans = {ranks: ParallelPlan(ulysses=ranks)}
    if ranks > 2 and ranks % 2 == 0:
        spans[2] = ParallelPlan(ulysses=2, ring=ranks // 2)
    return spans


def _slowest(ranks: Iterable[Sequence[Point]]) -> list[Point]:
    """(amount, seconds) of the slowest rank that measured any, by size."""
    return [max(points, key=lambda point: point[1]) for points in zip(*filter(None, ranks), strict=True)]


def _rates(pool: Pool, probes: Probes, *, asynchronous: bool) -> Rates:
    ranks = probes[max(probes)]
    return Rates(
        name=str(pool.devices[0].kind),
        matmul_flops=Line.through(_slowest(rank.matmul for rank in ranks)).rate,
        attention_flops=Line.through(_slowest(rank.attention for rank in ranks)).rate,
        memory_bandwidth=Line.through(_slowest(rank.memory for rank in ranks)).rate,
        memory_bytes=min(free_bytes(pool.devices)),
        asynchronous=asynchronous,
        elementwise_bandwidth=Line.through(_slowest(rank.elementwise for rank in ranks)).rate,
        score_s=0.0 if asynchronous else _score_s(ranks),
    )


def _score_s(ranks: Sequence[ProbeReply]) -> float:
    """What an exponential takes: FLOPs of small heads have more of them, so they are slower by that."""
    wide, narrow = (
        Line.through(_slowest(points)).rate
        for points in ((rank.attention for rank in ranks), (rank.narrow_attention for rank in ranks))
    )
    return max(0.0, (1 / narrow - 1 / wide) / (1 / (4 * NARROW) - 1 / (4 * WIDE)))


def _link(probes: Probes) -> Interconnect:
    """Bandwidth and latency of an exchange between two, and how much slower one among all is."""
    least, most = min(probes), max(probes)
    if most == 1:
        return known_link("memory")  # one rank exchanges nothing
    near = Line.through(_slowest(rank.all_to_all for rank in probes[least]))
    far = Line.through(_slowest(rank.all_to_all for rank in probes[most]))
    contention = 0.0 if least == most else max(0.0, math.log(near.rate / far.rate) / math.log(most / least))
    # Told for two ranks; where no pairs could be probed, what all of them reach at once stands for two.
    return Interconnect(name="measured", bandwidth=near.rate, latency_s=far.latency_s, contention=contention)


def _between(ranks: Sequence[ProbeReply]) -> Interconnect:
    """The link between machines, while each rank sends to all others at once."""
    line = Line.through(_slowest(rank.all_to_all for rank in ranks))
    return Interconnect(name="measured between machines", bandwidth=line.rate, latency_s=line.latency_s)


def _operation_s(ranks: Sequence[ProbeReply]) -> float:
    return 1 / Line.through(_slowest(rank.operations for rank in ranks)).rate


def _software(pool: Pool, folder: Path, rates: Rates, link: Interconnect) -> Software:
    """The host's seconds, from models so small that they are nothing else, and the passes of larger ones."""
    ranks = ranks_by_machine(pool.devices)[0]
    usual = replace(EAGER if rates.asynchronous else ON_CPU, swap_calls=OWN_SWAP_CALLS)
    models = [USUAL.sample(heads=ranks, head_dim=HEAD_DIM, depth=a, depth_single=b) for a, b in DEPTHS]
    timed = _timer(pool, folder, models, Workload(width=64, height=64, text_tokens=16))
    block_s = timed(ParallelPlan())
    exchange_s = hop_s = 0.0
    if ranks > 1:
        swapping, ringing = timed(ParallelPlan(ulysses=ranks)), timed(ParallelPlan(ring=ranks))
        # Latencies are counted with the link; what is left is the host's.
        exchange_s = max(0.0, swapping - block_s - OWN_SWAP_CALLS * link.latency_s)
        hop_s = max(0.0, (ringing - block_s - exchange_s) / (ranks - 1) - link.latency_s)
    found = replace(usual, block_s=block_s, exchange_s=exchange_s, hop_s=hop_s)
    return replace(found, passes=_passes(pool, folder, rates, found))


def _passes(pool: Pool, folder: Path, rates: Rates, software: Software) -> float:
    """How often activations cross memory in a block: what one rank takes beyond matrices, attention and launch."""
    kind = "cuda" if rates.asynchronous else "cpu"
    sizes, workload = PASSING[kind]
    models = [USUAL.sample(**sizes, depth=a, depth_single=b) for a, b in PASSING_DEPTHS]
    measured = _timer(pool, folder, models, workload)(ParallelPlan())
    element_bytes = 2 if rates.asynchronous else 4
    shape = models[0].shape()
    work = Work(
        image_tokens=workload.image_tokens,
        text_tokens=workload.text_tokens,
        batch=workload.batch,
        element_bytes=element_bytes,
        weight_bytes=element_bytes,
    )
    none = Calibration(rates=rates, link=known_link("memory"), software=replace(software, passes=0.0), source="")
    known = step_cost(replace(shape, other_params=0, channels=0), work, ParallelPlan(), none)
    rest = measured - (known.step_s - known.launch_s) / shape.blocks
    if not rates.asynchronous:
        rest -= software.block_s
    elif measured < LAUNCH_BOUND * software.block_s:
        return software.passes  # the host is the limit, so this says nothing of the device
    return max(0.0, rest) * rates.memory_bandwidth / (work.batch * work.tokens * shape.hidden * element_bytes)


def _timer(pool: Pool, folder: Path, models: Sequence[OwnModel], workload: Workload) -> Callable[[ParallelPlan], float]:
    """Writes the models, which differ in depth alone; returns seconds that a further block takes under a plan.

    What a step takes once (embedders, head, the request) is in both, and so in none of it: of a step of three blocks on
    a GPU it is a quarter.
    """
    runners = []
    dtype = "bfloat16" if pool.devices[0].kind == "cuda" else "float32"
    for model in models:
        path = folder / f"{model.shape().hidden}-{model.shape().blocks}.safetensors"
        model.write_sample(path)
        runners.append((ModelSpec.of(path, dtype), workload.tensors(model.config)))
    blocks = [model.shape().blocks for model in models]

    def timed(plan: ParallelPlan) -> float:
        taken: list[list[float]] = [[] for _ in models]
        for (spec, tensors), seconds in zip(runners, taken, strict=True):
            runner = PlanRunner(pool, spec, plan, options={"timed": False})
            for _ in range(SETTLING + RUNS):
                runner(tensors)
                seconds.append(max(rank.step_s for rank in runner.ranks))
        # On a CPU, others on the same cores only ever make a step longer.
        typical = min if pool.devices[0].kind == "cpu" else statistics.median
        shallow, deep = (typical(each[SETTLING:]) for each in taken)
        further = deep - shallow
        return further / (blocks[1] - blocks[0]) if further > 0 else deep / blocks[1]

    return timed
