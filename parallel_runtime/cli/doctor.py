"""`doctor`: what will and will not work on this machine, and what to do about it.

Owns the order of the checks, those that start ranks, and the report. Every finding is a verdict, what was seen, and a
remedy where the verdict is no. The last checks send a byte pattern from every rank to every other and hold a small
model against one process. What the machine and its GPUs say is machine_checks.py's and gpu_checks.py's. Nothing here
makes a CUDA context: a device in exclusive mode would refuse the ranks.
"""

import argparse
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..devices import Device, DeviceSelection, missing_system, parse_devices
from ..errors import OutOfMemoryInRankError, PoolError
from ..machines.connection import listen_address, read_token
from ..machines.server import MachineServer, Offer
from ..machines.versions import own_versions
from ..models.hosted.contract_check import newer_than_tested
from ..plan import ParallelPlan, auto_plan
from ..planner.comfyui_process import ComfyUIProcess, find_comfyui
from ..planner.comfyui_process import version_of as version_of_comfyui
from ..pool.known_errors import NO_PEERS, OVER_HOST, find_known
from ..pool.pool import Pool
from ..pool.ranks import deadline_from
from ..process.nccl_files import present_files
from ..process.nccl_segments import leftovers
from ..proof import ProofStore, relative_error
from ..trials.plan_runner import PlanRunner
from ..trials.trial import Trial
from ..trials.workload import Workload
from .calibrate import describe_calibration, keep_calibration
from .check import Check
from .doctor_model import describe as describe_the_file
from .doctor_model import describe_file
from .gpu_checks import check_cuda, check_nccl_files, gpu_checks
from .gpu_facts import GpuFacts, look
from .machine_checks import (
    PACKAGES,
    check_leftovers,
    check_segment_room,
    has_memory_elsewhere,
    machine_checks,
    segment_room_bytes,
    version_of,
)
from .sample import HEADS, write_sample
from .terminal import SILENT, Paint, PhaseLine, plain
from .verify import FP32_TOLERANCE

JOIN_S = 120.0
WRONG_IMAGES = "images would be wrong; please report it with all that the doctor says"
REPORTED = (*PACKAGES, "diffusers")  # of `verify --against diffusers`; nothing else needs it


def run(arguments: argparse.Namespace, progress: PhaseLine = SILENT) -> dict:
    """Look at the machine and try it. Raises `ValueError` for devices, machines and files that cannot be used."""
    offered = _offered(arguments)
    progress.phase("looking at the machine")
    selection = _selection(arguments.devices)
    # A build of torch for the CPU knows no device.
    facts = look() if torch.version.cuda or torch.version.hip else GpuFacts()
    devices = [_describe_device(device, facts) for device in selection.devices]
    file = {}
    if arguments.model is not None:
        free = [each["free_bytes"] for each in devices]
        progress.phase(f"reading {os.path.basename(arguments.model)}")
        file = {"file": describe_file(arguments.model, arguments.comfyui, selection.devices, free)}
    checks = machine_checks()
    if missing_system() is None:
        checks.extend(_device_checks(selection, facts))
        progress.phase("starting ComfyUI in a process of its own")
        checks.extend(_check_comfyui(arguments.comfyui))
    if all(check.ok for check in checks if check.needed):
        checks.extend(_live_checks(selection.devices, arguments.comfyui, progress))
    can_run = all(check.ok for check in checks if check.needed)
    calibrates = arguments.calibrate and can_run and all(check.ok for check in checks if check.name == "workers")
    if calibrates:
        progress.phase("measuring the devices")
    measured = {"calibration": _calibrated(offered, selection)} if calibrates else {}
    return (
        file
        | measured
        | {
            "can_run": can_run,
            "devices": devices,
            "warnings": list(selection.warnings),
            "backends": _backends(),
            "peer_access": _peer_access(facts, selection),
            "gpus": asdict(facts.nameless()),
            "memory": {"total_bytes": psutil.virtual_memory().total, "free_bytes": psutil.virtual_memory().available},
            "dev_shm": _shared_memory_folder(),
            "versions": {"python": platform.python_version(), **{name: version_of(name) for name in REPORTED}},
            "checks": [asdict(check) for check in checks],
        }
    )


def _offered(arguments: argparse.Namespace) -> tuple[Offer, bytes] | None:
    """Where machines may join, and their token; None where none are to. Raises `ValueError` for what cannot be."""
    told = {"--machines": arguments.machines, "--token-file": arguments.token_file}
    given = " and ".join(name for name, value in told.items() if value)
    if given and not arguments.calibrate:
        raise ValueError(f"{given} without --calibrate would do nothing; add --calibrate, or leave it out")
    offer = Offer.parse(arguments.machines)
    if offer is None:
        return None
    if arguments.token_file is None:
        raise ValueError(f"--machines {arguments.machines} needs --token-file FILE, the token of those that join")
    token = read_token(arguments.token_file)
    listen_address(offer.address)
    return offer, token


def _calibrated(offered: tuple[Offer, bytes] | None, selection: DeviceSelection) -> dict[str, object]:
    """What was measured of the devices, with further machines where they are to join. Raises `ValueError`."""
    if offered is None:
        return keep_calibration(selection.devices)
    offer, token = offered
    try:
        server = MachineServer(offer.address, token, versions=own_versions(""))
    except OSError as error:
        raise ValueError(error.strerror) from error
    with closing(server):
        return keep_calibration(selection.devices, server.wait_for(offer.count, JOIN_S))


def describe(report: Mapping, paint: Paint = plain) -> str:
    """The report for people: the answer, what is to be mended, to be known and well, and the answer again."""
    answer = _answer(report, paint)
    lines = [answer, *(paint(f"warning: {text}", "note") for text in report["warnings"])]
    told = [(_mark(check), check) for check in report["checks"]]
    for wanted, colour in (("FAIL", "bad"), ("note", "note"), ("pass", "good")):
        for mark, check in told:
            if mark == wanted:
                remedy = f"; {check['remedy']}" if check["remedy"] and not check["ok"] else ""
                lines.append(f"{paint(mark, colour)}  {check['name']}: {check['seen']}{remedy}")
    lines += ["versions: " + ", ".join(f"{name} {version}" for name, version in report["versions"].items())]
    for device in report["devices"]:
        free = ""
        if device["free_bytes"] is not None:
            free = f", {device['free_bytes'] / 2**30:.1f} GiB free of {device['total_bytes'] / 2**30:.1f}"
        lines.append(f"device {device['device']}: {device['name']}{free}")
    if "file" in report:
        lines += describe_the_file(report["file"])
    if "calibration" in report:
        lines.append(describe_calibration(report["calibration"]))
    return "\n".join([*lines, answer])


def _mark(check: Mapping) -> str:
    return "pass" if check["ok"] else "FAIL" if check["needed"] else "note"


def _answer(report: Mapping, paint: Paint) -> str:
    failed = [check["name"] for check in report["checks"] if _mark(check) == "FAIL"]
    if not report["can_run"]:
        return paint(f"it cannot run here until this is mended: {', '.join(failed)}", "bad")
    notes = [check["name"] for check in report["checks"] if _mark(check) == "note"]
    return paint("everything needed is there" + (f"; look at: {', '.join(notes)}" if notes else ""), "good")


def _selection(text: str | None) -> DeviceSelection:
    if text is not None:
        return parse_devices(text)
    # Without a GPU two CPU ranks still show whether processes, memory and collectives work.
    return parse_devices("all") if torch.cuda.device_count() else parse_devices("cpu:2")


def _device_checks(selection: DeviceSelection, facts: GpuFacts) -> list[Check]:
    indices = _cuda_indices(selection)
    if indices:
        peers = _peer_access(facts, selection)
        pairs = {f"{a}-{b}" for a in indices for b in indices if a < b}
        room = check_segment_room(
            segment_room_bytes(),
            ranks=len(indices),
            over_host=not all(peers.values()),
            linked=bool(facts.torch_hip) or pairs <= set(facts.nvlink),  # AMD's own links are not asked for
            elsewhere=not facts.torch_hip and has_memory_elsewhere(facts.nccl, facts.driver_cuda),
        )
        checks = [*gpu_checks(facts, indices), check_nccl_files(present_files())]
        return [*checks, room, check_leftovers(leftovers())]
    there = len(facts.gpus) or torch.cuda.device_count()
    seen = "CPU ranks only" if there else "no CUDA device; CPU ranks work, for trying things out"
    checks = [Check(name="devices", ok=bool(there), seen=seen, remedy=_without_gpu(), needed=False)]
    return [*checks, replace(check_cuda(facts), needed=False)] if facts.error else checks


def _check_comfyui(told: str | None) -> list[Check]:
    """Whether models can be run and verified from here, and what else is to be known of this ComfyUI."""
    try:
        comfyui = find_comfyui(told)
        with ComfyUIProcess(comfyui, "cpu") as process:
            seen = f"{version_of_comfyui(comfyui) or 'a version without a number'} can be imported"
            off = process.ask("contract")["off"]
        checks = [Check(name="comfyui", ok=True, seen=seen, remedy="", needed=False)]
        causes = "; ".join(each.rpartition("; ")[0] for each in off)
        whole = causes or "this ComfyUI has all of `comfy` that the pack relies on"
        remedy = off[0].rpartition("; ")[2] if off else ""
        checks.append(Check(name="host contract", ok=not off, seen=whole, remedy=remedy, needed=False))
        store = ProofStore.of_user()
        if newer := newer_than_tested(version_of_comfyui(comfyui), store):
            checks.append(
                Check(
                    name="newer comfyui",
                    ok=False,
                    seen=newer,
                    remedy="look for a newer version of the pack",
                    needed=False,
                )
            )
        return checks
    except ValueError as error:
        cause, _, remedy = str(error).rpartition("; ")
        seen = f"no model can be run here: {cause}"
        return [Check(name="comfyui", ok=False, seen=seen, remedy=remedy, needed=False)]


def _backends() -> dict[str, bool]:
    """Which there are; none of a torch without torch.distributed, which has not even the questions."""
    there = dist.is_available()
    return {"gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available()}


def _without_gpu() -> str:
    """What to do where torch sees no GPU: there may be one, or none."""
    if torch.version.hip:
        return "if the machine has a GPU, look at rocm-smi; if not, try things out with cpu:2 in SP Config's devices"
    if torch.version.cuda:
        return "if the machine has a GPU, look at nvidia-smi; if not, try things out with cpu:2 in SP Config's devices"
    return "if there is a GPU, install a torch made for it; if not, try things out with cpu:2 in SP Config's devices"


def _live_checks(devices: tuple[Device, ...], comfyui: str | None, progress: PhaseLine) -> list[Check]:
    """Start ranks on the devices as ComfyUI's are, without peer access where that is broken, and try them."""
    plan, checks = auto_plan(len(devices), HEADS), list[Check]()
    with closing(Pool(devices, deadline_s=deadline_from(os.environ), threads_per_rank=1)) as pool:
        try:
            progress.phase(f"starting {len(devices)} rank(s)")
            pool.start()
            checks.append(Check(name="workers", ok=True, seen=f"{len(devices)} rank(s) started"))
            if pool.broken_copies:
                checks.append(_broken_copies(pool.broken_copies))
            if plan.ranks > 1:
                progress.phase("copying a pattern between all ranks")
                checks.append(_check_pattern(pool.exchange_pattern(plan)))
            progress.phase("holding a small model against one process")
            checks.append(_check_parity(pool, plan, comfyui))
        except PoolError as error:
            return [*filter(lambda check: not check.ok, checks), _failed(error, devices)]
    return checks


def _failed(error: PoolError, devices: tuple[Device, ...]) -> Check:
    """What the failure of workers says of the machine: nothing where other programs have the devices' memory."""
    ranks, first = len(devices), str(error).partition("\n")[0]
    found = find_known(str(error)) if isinstance(error, OutOfMemoryInRankError) else None
    if found is not None and not found.known.name.startswith(("cublas", "cudnn")):  # of which another may be loaded
        remedy = "press Release or close ComfyUI, then ask again"
        return Check(name="workers", ok=False, seen=first, remedy=remedy, needed=False)
    named = ",".join(map(str, devices)) if devices[0].kind == "cuda" else f"cpu:{ranks}"
    command = ("python", "-m", "parallel_runtime", "verify", "--model=FILE", f"--plan=ulysses={ranks}")
    remedy = f"{' '.join((*command, f'--devices={named}'))}, in the pack's folder, prints the whole failure"
    return Check(name="workers", ok=False, seen=first, remedy=remedy)


def _broken_copies(why: str) -> Check:
    return Check(
        name="peer copies",
        ok=False,
        seen=why,
        remedy=f"{OVER_HOST}; to save the try, {NO_PEERS}",
        needed=False,
    )


def _check_pattern(wrong_bytes: list[int]) -> Check:
    broken = [f"rank {rank} got {count} wrong bytes" for rank, count in enumerate(wrong_bytes) if count]
    return Check(
        name="byte pattern",
        ok=not broken,
        seen="every byte arrived as it was sent" if not broken else "; ".join(broken),
        remedy=WRONG_IMAGES,
    )


def _check_parity(pool: Pool, plan: ParallelPlan, comfyui: str | None) -> Check:
    """A small model under a plan compared with ComfyUI's own module, on the CPU, in one process. Raises PoolError."""
    with tempfile.TemporaryDirectory() as folder:
        write_sample(path := os.path.join(folder, "sample.safetensors"))
        size = Workload(width=200, height=136, text_tokens=19, frames=1)
        try:
            trial = Trial(path, "float32", size, [plan], steps=1, comfyui=comfyui, device=Device("cpu", 0))
        except ValueError as error:
            cause, _, remedy = str(error).rpartition("; ")
            return Check(name="parity", ok=False, seen=f"not checked: {cause}", remedy=remedy, needed=False)
        with closing(trial):
            (result,) = trial.results(PlanRunner(pool, trial.spec, plan, options={"exact_fp32": True}).run)
            apart = relative_error(result, trial.references(torch.float32, torch.float32)[0])
    return Check(
        name="parity",
        ok=apart <= FP32_TOLERANCE,
        seen=f"{plan.name} differs from one process by {apart:.1e}, at most {FP32_TOLERANCE:.0e} is right",
        remedy=WRONG_IMAGES,
    )


def _describe_device(device: Device, facts: GpuFacts) -> dict[str, Any]:
    if device.kind == "cpu":
        memory = psutil.virtual_memory()
        name = f"{platform.machine()}, {os.cpu_count()} cores"
        return _described(device, name, memory.available, memory.total)
    gpu = next((gpu for gpu in facts.gpus if gpu.index == device.index), None)
    if gpu is None:
        return _described(device, "it does not answer", None, None)
    return _described(device, gpu.name, gpu.free_bytes, gpu.total_bytes)


def _described(device: Device, name: str, free: int | None, total: int | None) -> dict[str, Any]:
    return {"device": str(device), "name": name, "free_bytes": free, "total_bytes": total}


def _cuda_indices(selection: DeviceSelection) -> list[int]:
    return [device.index for device in selection.devices if device.kind == "cuda"]


def _peer_access(facts: GpuFacts, selection: DeviceSelection) -> dict[str, bool]:
    """Whether each CUDA device and each other can read each other's memory directly, by pair."""
    indices = _cuda_indices(selection)
    return {
        f"cuda:{a}-cuda:{b}": facts.peer_access.get(f"{min(a, b)}-{max(a, b)}", False)
        for a in indices
        for b in indices
        if a != b
    }


def _shared_memory_folder() -> dict[str, int]:
    room = segment_room_bytes()
    return {} if room is None else {"total_bytes": room[1], "free_bytes": room[0]}
