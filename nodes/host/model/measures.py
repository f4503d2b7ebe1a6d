"""What a user should know of devices that differ, and of kernels that a plan leaves out. Owns the limits for that."""

from collections.abc import Callable, Sequence

from ....parallel_runtime.devices import Device
from ....parallel_runtime.models.hosted.stock_attention import SPARSE
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.choose import HEADROOM
from ....parallel_runtime.planner.machine import kinds_here, whole_bytes
from ....parallel_runtime.pool.pool import Pool
from ....parallel_runtime.shares import shares_by_speed
from ....parallel_runtime.weights.host_memory import host_memory
from ....parallel_runtime.wire.replies import MeasureReply
from ..contract.comfyui import comfy
from ..contract.version import off
from .pools import POOLS

START_TAKES = 3 << 29  # bytes of a GPU: a rank's context, NCCL's buffers and what is measured
SLOWER = 0.10  # a step takes as long as its slowest rank
LESS_MEMORY = 0.25  # every rank keeps the same, whatever its device has room for


def unequal(devices: Sequence[Device], measured: Sequence[MeasureReply]) -> list[str]:
    """Warnings about devices of different kinds, and of some much slower, or with much less memory free, than the best.

    `measured` is `Pool.measure_devices` of the ranks of a plan. Ranks on the CPU share one processor and one memory:
    what differs between them is chance.
    """
    pairs = zip(devices, measured, strict=False)
    gpus = [(found, f"{device} ({found.name})") for device, found in pairs if device.kind != "cpu"]
    if len(gpus) < 2:
        return []
    warnings = []
    kinds = {found.name: label for found, label in reversed(gpus)}
    if len(kinds) > 1:
        warnings.append(
            f"{' and '.join(reversed(kinds.values()))} are of different kinds: each takes the layers and attention "
            "kernels that ComfyUI takes on it, so ranks may round differently; use devices of one kind for the result "
            "of one of them"
        )
    (fastest, quick), (slowest, slow) = (choose(gpus, key=lambda gpu: gpu[0].gflops) for choose in (max, min))
    if slowest.gflops < (1 - SLOWER) * fastest.gflops:
        warnings.append(
            f"{slow} is {1 - slowest.gflops / fastest.gflops:.0%} slower than {quick}, and "
            "the others wait for it where shares are equal; leave it out of devices in SP Config, or let it do less of "
            "other things"
        )
    (roomiest, empty), (fullest, full) = (choose(gpus, key=lambda gpu: gpu[0].free_bytes) for choose in (max, min))
    if fullest.free_bytes < (1 - LESS_MEMORY) * roomiest.free_bytes:
        warnings.append(
            f"{full} has {fullest.free_bytes / 1e9:.1f} GB free, {empty} "
            f"{roomiest.free_bytes / 1e9:.1f} GB; every rank needs as much as another"
        )
    return warnings


def measured_shares(devices: tuple[Device, ...], check_cancelled: Callable[[], None]) -> tuple[int, ...]:
    """How much each device computes by its measured speed; () where they are of one kind, as ranks on the CPU are.

    The first run measures, which starts the workers; what it found is kept for them. GPUs of one kind are not asked
    for: ComfyUI has not made room for workers yet; of several kinds, room for their start alone. Raises `PoolError`.
    """
    if len(devices) < 2 or any(device.kind == "cpu" for device in devices):
        return ()
    if not any(device.machine for device in devices) and len(kinds_here(devices)) == 1:
        return ()

    def measure(pool: Pool) -> list[MeasureReply]:
        if not off("room"):
            _make_room({device.index for device in devices if not device.machine})
        return pool.measure_devices(check_cancelled=check_cancelled)

    found = POOLS.measured(devices, measure)
    return shares_by_speed([each.name for each in found], [each.gflops for each in found])


def _make_room(gpus: set[int]) -> None:
    """Have ComfyUI leave room on those of these GPUs that it uses: to ask another one would take a context there."""
    management = comfy.model_management
    used = {management.get_torch_device(), *(each.device for each in management.current_loaded_models)}
    for gpu in used:
        if gpu.type == "cuda" and (gpu.index or 0) in gpus:
            management.free_memory(START_TAKES, gpu)


def held_by_memory(plan: ParallelPlan, devices: tuple[Device, ...], num_bytes: int) -> ParallelPlan:
    """The plan with the shares by which sharded weights of so many bytes are loaded where the user gave none: by the
    devices' memory, and as the plan has them where that hardly differs, where weights are in host memory, and where a
    device would have no room."""
    layout = plan.layout
    if layout.shards == 1 or layout.stages > 1 or layout.offloaded or any(device.kind == "cpu" for device in devices):
        return plan
    found = whole_bytes(devices)
    shared = plan.with_shares(shares_by_speed(list(map(str, found)), found))
    return plan if held_beyond_room(shared, devices, num_bytes) else shared


def held_beyond_room(
    plan: ParallelPlan, devices: tuple[Device, ...], num_bytes: int
) -> list[tuple[Device, float, float]]:
    """Each device whose part of weights of `num_bytes` is larger than what it has, with bytes of both."""
    held = [num_bytes * plan.layout.part_of(rank) for rank in range(plan.ranks)]
    rows = zip(devices, held, whole_bytes(devices), strict=False)
    return [row for row in rows if not plan.layout.offloaded and row[1] > HEADROOM * row[2]]


def refuse_beyond_room(
    plan: ParallelPlan, devices: tuple[Device, ...], shares: tuple[int, ...] | None, num_bytes: int
) -> None:
    """Raise `ValueError` for shares that a user wrote by which a device would hold more weights than it has memory."""
    if not shares or not (beyond := held_beyond_room(plan.with_shares(shares), devices, num_bytes)):
        return
    device, held, room = max(beyond, key=lambda row: row[1] / row[2])
    raise ValueError(
        f"shares={', '.join(map(str, shares))} give {device} {held / 1e9:.1f} GB of weights, and it has "
        f"{room / 1e9:.1f} GB; give it a smaller number in SP Config's shares, or set shares to equal"
    )


def held_by_host(plan: ParallelPlan, devices: tuple[Device, ...], num_bytes: int) -> float:
    """How many bytes of this machine's memory GPUs keep weights of `num_bytes` in."""
    if not plan.layout.offloaded:
        return 0.0
    here = [rank for rank in range(plan.ranks) if devices[rank].kind == "cuda" and not devices[rank].machine]
    return num_bytes * sum(plan.layout.part_of(rank) for rank in here)


def refuse_beyond_host(plan: ParallelPlan, devices: tuple[Device, ...], num_bytes: int) -> None:
    """Raise `ValueError` for weights that take more of this machine's memory than there is."""
    held, (_, total) = held_by_host(plan, devices, num_bytes), host_memory()
    if held > total:
        raise ValueError(
            f"weights=offloaded keeps {held / 1e9:.1f} GB in host memory, and this machine has {total / 1e9:.1f} GB; "
            "use a smaller file such as fp8, weights=sharded on more devices, or add memory"
        )


def widened(formats: Sequence[str]) -> list[str]:
    """A warning where the device has no product of numbers in these formats of a file."""
    if not formats:
        return []
    return [
        f"the device cannot multiply in {', '.join(formats)}: as in ComfyUI, weights are widened in each step, with "
        "the same result and more time; a file in int8, or in bf16 where it fits, is quicker here"
    ]


def other_attention(kernel: str, ring: int) -> list[str]:
    """A warning where ComfyUI computes attention by `kernel`, which rounds, and Ring by ours, which are exact; or ranks
    by an exact one under every plan."""
    if SPARSE in kernel:
        return [
            f"workers attend to all tokens, not by {kernel}, which the file asks for and which leaves some out: it is "
            "slower and nearer to an exact result"
        ]
    if ring == 1 or not kernel:
        return []
    return [
        f"ring={ring} attends with exact kernels, not with {kernel}, which ComfyUI or the file asks for: it is slower "
        "and nearer to an exact result; use ulysses to keep that kernel"
    ]
