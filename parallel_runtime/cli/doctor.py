"""`doctor`: what will and will not work on this machine, and what to do about it.

Every finding is a check with a verdict, what was seen, and a remedy where the verdict is no. With several devices, the
last checks run on them: a byte pattern sent from every rank to every other, and a small model held against one process.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from ..checkpoint import ModelSpec
from ..devices import Device, DeviceSelection, parse_devices
from ..errors import PoolError
from ..plan import auto_plan
from ..pool.pool import Pool
from .calibrate import describe_calibration, keep_calibration
from .judge import REMEDY, NoJudgeError, load_judge
from .sample_model import sample_config, write_sample
from .verify import FP32_TOLERANCE, PlanRunner
from .workload import Workload, relative_error

PACKAGES = ("torch", "safetensors", "psutil")
REPORTED = (*PACKAGES, "diffusers")  # the judge of parity; nothing else needs it
OLDEST_TORCH = (2, 6)
DESCRIPTORS = 256
FREE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. `needed` checks decide whether anything can run at all."""

    name: str
    ok: bool
    seen: str
    remedy: str = ""
    needed: bool = True


def run(arguments: argparse.Namespace) -> dict:
    """Look at the machine and try it. Raises `ValueError` when `--devices` names what does not exist."""
    selection = _selection(arguments.devices)
    checks = [check() for check in _static_checks()]
    checks.extend(_device_checks(selection))
    if all(check.ok for check in checks if check.needed):
        checks.extend(_live_checks(selection.devices))
    can_run = all(check.ok for check in checks if check.needed)
    measured = {"calibration": keep_calibration(selection.devices)} if arguments.calibrate and can_run else {}
    return measured | {
        "can_run": can_run,
        "devices": [_describe_device(device) for device in selection.devices],
        "warnings": list(selection.warnings),
        "backends": {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()},
        "peer_access": _peer_access(selection.devices),
        "memory": {"total_bytes": psutil.virtual_memory().total, "free_bytes": psutil.virtual_memory().available},
        "dev_shm": _shared_memory_folder(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in REPORTED}},
        "checks": [asdict(check) for check in checks],
    }


def describe(report: Mapping) -> str:
    """The report for people: passes, then problems with their remedies."""
    lines = [f"warning: {text}" for text in report["warnings"]]
    lines += ["versions: " + ", ".join(f"{name} {version}" for name, version in report["versions"].items())]
    for device in report["devices"]:
        free = f", {device['free_bytes'] / 2**30:.1f} GiB free of {device['total_bytes'] / 2**30:.1f}"
        lines.append(f"device {device['device']}: {device['name']}{free}")
    for check in report["checks"]:
        mark = "pass" if check["ok"] else "FAIL" if check["needed"] else "note"
        remedy = f"; {check['remedy']}" if check["remedy"] and not check["ok"] else ""
        lines.append(f"{mark}  {check['name']}: {check['seen']}{remedy}")
    if "calibration" in report:
        lines.append(describe_calibration(report["calibration"]))
    lines.append(
        "everything needed is there" if report["can_run"] else "it cannot run here until the FAIL lines are mended"
    )
    return "\n".join(lines)


def _selection(text: str | None) -> DeviceSelection:
    if text is not None:
        return parse_devices(text)
    # Without a GPU two CPU ranks still show whether processes, memory and collectives work.
    return parse_devices("all") if torch.cuda.device_count() else parse_devices("cpu:2")


def _static_checks() -> list[Callable[[], Check]]:
    return [
        _check_system,
        _check_torch,
        _check_packages,
        _check_shared_memory,
        _check_descriptors,
        _check_temporary,
        _check_loopback,
    ]


def _check_system() -> Check:
    return Check(
        name="system",
        ok=sys.platform == "linux",
        seen=f"{platform.system()} {platform.release()}",
        remedy="more than one rank runs on Linux only; use WSL 2 on Windows",
    )


def _check_torch() -> Check:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Check(
        name="torch",
        ok=version >= OLDEST_TORCH and dist.is_available(),
        seen=f"{torch.__version__}, distributed {'built in' if dist.is_available() else 'missing'}",
        remedy="install torch 2.6 or newer, a build with torch.distributed",
    )


def _check_packages() -> Check:
    missing = [name for name in PACKAGES if _version(name) == "missing"]
    return Check(
        name="packages",
        ok=not missing,
        seen="all there" if not missing else f"missing {', '.join(missing)}",
        remedy="pip install -r requirements.txt with ComfyUI's python",
    )


def _check_shared_memory() -> Check:
    from ..wire.channel import Segment

    try:
        _, descriptor = Segment.create(1 << 20)
        os.close(descriptor)
    except (OSError, AttributeError) as error:
        return Check(name="shared memory", ok=False, seen=f"no sealed memfd: {error}", remedy="use Linux 3.17 or newer")
    return Check(name="shared memory", ok=True, seen="sealed memfd works; /dev/shm is not used")


def _check_descriptors() -> Check:
    import resource  # here, because Windows has none and must still be told what is missing

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return Check(
        name="descriptors",
        ok=unlimited or soft >= DESCRIPTORS,
        seen="unlimited" if unlimited else f"{soft} open files allowed",
        remedy=f"raise it to {DESCRIPTORS} or more (ulimit -n 1024)",
    )


def _check_temporary() -> Check:
    remedy = "free some space in the temporary folder, or set TMPDIR to a folder with 64 MiB"
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:  # it has tried to write to each
        return Check(name="temporary folder", ok=False, seen=str(error.strerror), remedy=remedy)
    free = shutil.disk_usage(folder).free
    return Check(
        name="temporary folder",
        ok=os.access(folder, os.W_OK) and free >= FREE_BYTES,
        seen=f"{free / 2**20:,.0f} MiB free",  # not where: people show this to others
        remedy=remedy,
    )


def _check_loopback() -> Check:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        return Check(name="loopback", ok=False, seen=str(error), remedy="bring up the interface lo (ip link set lo up)")
    return Check(name="loopback", ok=True, seen="127.0.0.1 can be bound; nothing else ever is")


def _device_checks(selection: DeviceSelection) -> list[Check]:
    kinds = {device.kind for device in selection.devices}
    if kinds == {"cpu"}:
        there = torch.cuda.device_count()
        seen = "CPU ranks only" if there else "no CUDA device; CPU ranks work, for trying things out"
        return [Check(name="devices", ok=bool(there), seen=seen, remedy="look at nvidia-smi", needed=False)]
    checks = [
        Check(
            name="nccl",
            ok=dist.is_nccl_available(),
            seen="available" if dist.is_nccl_available() else "missing from this torch",
            remedy="install a CUDA build of torch for Linux",
        )
    ]
    peers = _peer_access(selection.devices)
    cut = [pair for pair, reachable in peers.items() if not reachable]
    if peers:
        seen = "every device reaches every other" if not cut else f"no peer access {', '.join(cut)}"
        checks.append(
            Check(name="peer access", ok=not cut, seen=seen, remedy="copies go through host memory", needed=False)
        )
    return checks


def _live_checks(devices: tuple[Device, ...]) -> list[Check]:
    """Start ranks on the devices and try them."""
    plan = auto_plan(len(devices), sample_config().num_heads)
    with closing(Pool(devices, threads_per_rank=1, check_peers=False)) as pool, tempfile.TemporaryDirectory() as folder:
        try:
            pool.start()
            checks = [Check(name="workers", ok=True, seen=f"{len(devices)} rank(s) started")]
            if plan.ranks > 1:
                checks.append(_check_pattern(pool.exchange_pattern(plan)))
            checks.append(_check_parity(pool, Path(folder) / "sample.safetensors"))
        except PoolError as error:
            first, _, _ = str(error).partition("\n")
            return [Check(name="workers", ok=False, seen=first, remedy="run verify for the whole text of the failure")]
    return checks


def _check_pattern(wrong_bytes: list[int]) -> Check:
    broken = [f"rank {rank} got {count} wrong bytes" for rank, count in enumerate(wrong_bytes) if count]
    return Check(
        name="byte pattern",
        ok=not broken,
        seen="every byte arrived as it was sent" if not broken else "; ".join(broken),
        remedy="peer copies corrupt data here: workers will copy through the host's memory instead, which is slower",
    )


def _check_parity(pool: Pool, path: Path) -> Check:
    try:
        judge = load_judge()
    except NoJudgeError as missing:
        return Check(name="parity", ok=False, seen=f"not checked: {missing.cause}", remedy=REMEDY, needed=False)
    config = sample_config()
    write_sample(path, config)
    plan = auto_plan(len(pool.devices), config.num_heads)
    tensors = Workload(width=200, height=136, text_tokens=19).tensors(config)
    result = PlanRunner(pool, ModelSpec.of(path, "float32"), plan, options={})(tensors)
    error = relative_error(result, judge(str(path))(tensors))
    return Check(
        name="parity",
        ok=error <= FP32_TOLERANCE,
        seen=f"{plan.name} differs from one process by {error:.1e}, at most {FP32_TOLERANCE:.0e} is right",
        remedy="images would be wrong; please report it with this output",
    )


def _describe_device(device: Device) -> dict[str, object]:
    if device.kind == "cpu":
        memory = psutil.virtual_memory()
        free, total, name = memory.available, memory.total, f"{platform.machine()}, {os.cpu_count()} cores"
    else:
        free, total = torch.cuda.mem_get_info(device.index)
        name = torch.cuda.get_device_name(device.index)
    return {"device": str(device), "name": name, "free_bytes": free, "total_bytes": total}


def _peer_access(devices: tuple[Device, ...]) -> dict[str, bool]:
    """Whether each CUDA device can read each other's memory directly, by pair."""
    cuda = [device for device in devices if device.kind == "cuda"]
    return {
        f"{a}-{b}": torch.cuda.can_device_access_peer(a.index, b.index)
        for a in cuda
        for b in cuda
        if a.index != b.index
    }


def _shared_memory_folder() -> dict[str, int]:
    try:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108  # only its size is looked at
    except OSError:
        return {}
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
