"""What the answers about the GPUs mean for our ranks, in plain words, with a remedy.

Owns the verdicts. Reads no device: everything is in the `GpuFacts` it gets, so recorded answers test it.
"""

import re
from collections.abc import Sequence

from ..pool.known_errors import NEW_DRIVER, OVER_HOST, find_known
from ..process import nccl_files
from ..process.nccl_files import NcclFile
from .check import Check
from .gpu_facts import Gpu, GpuFacts

# The oldest driver for each CUDA major version: CUDA Toolkit release notes, "minor version compatibility".
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
AMPERE, TURING = (8, 0), (7, 5)
DIFFER = "the GPUs differ, and the slowest sets the pace of all"
HIDDEN_GPUS = (
    "CUDA_VISIBLE_DEVICES, or --cuda-device among ComfyUI's options, hides the others; to use them, start without it"
)
LOOK, LOOK_AMD = "look at nvidia-smi", "look at rocm-smi"


def gpu_checks(facts: GpuFacts, indices: Sequence[int]) -> list[Check]:
    """The checks of the devices named by torch's numbers."""
    known = {gpu.index: gpu for gpu in facts.gpus}
    if facts.error or not set(indices) <= set(known):
        return [check_cuda(facts)]
    gpus = [known[index] for index in indices]
    if facts.torch_hip:
        checks = [check_cuda(facts), _check_nccl(facts), _check_rocm(facts), _check_kernels(facts, gpus)]
        checks += [_check_answers(facts, gpus), _check_architecture(gpus)]
        return [*checks, _check_peers(facts, indices)] if len(gpus) > 1 else checks
    checks = [check_cuda(facts), _check_nccl(facts), _check_driver(facts), _check_kernels(facts, gpus)]
    checks += [_check_answers(facts, gpus), _check_capability(gpus), _check_compute_mode(facts, gpus), _check_mig(gpus)]
    if facts.mps:
        checks.append(_check_mps())
    if len(gpus) > 1:
        checks.append(_check_peers(facts, indices))
    return checks


def check_cuda(facts: GpuFacts) -> Check:
    """Whether torch sees devices, and why not."""
    if not facts.error and facts.gpus:
        seen, sees = f"torch {facts.torch} sees {len(facts.gpus)} device(s)", len(facts.gpus)
        if facts.driver_gpus <= sees or any(gpu.mig for gpu in facts.gpus):
            return Check(name="cuda", ok=True, seen=seen)
        seen = f"{seen}; the driver sees {facts.driver_gpus}"
        return Check(name="cuda", ok=False, seen=seen, remedy=HIDDEN_GPUS, needed=False)
    reason = facts.error or "torch sees no device"
    found = find_known(reason) or find_known("", facts.driver_error)
    others = f"; the driver sees {facts.driver_gpus}" if facts.driver_gpus else ""
    seen = f"{(found and found.cause) or reason}{others}"
    return Check(name="cuda", ok=False, seen=seen, remedy=found.known.remedy if found else _look_at(facts))


def _check_nccl(facts: GpuFacts) -> Check:
    library, build = ("RCCL", "ROCm") if facts.torch_hip else ("NCCL", "CUDA")
    seen = f"{library} {facts.nccl}" if facts.nccl else "missing from this torch"
    return Check(name="nccl", ok=bool(facts.nccl), seen=seen, remedy=f"install a {build} build of torch for Linux")


def check_nccl_files(files: Sequence[NcclFile]) -> Check:
    """What NCCL's configuration files set. Ranks are not started where they would meet elsewhere."""
    name, refused = "NCCL files", nccl_files.refusal(files)
    if refused is not None:
        return Check(name=name, ok=False, seen=refused, remedy=nccl_files.REMEDY)
    told = [f"{file.name} sets {', '.join(file.settings)}" for file in files if file.settings]
    lost = sorted({setting for file in files for setting in file.without_effect})
    return Check(
        name=name,
        ok=not lost,
        seen="; ".join(told) or "none set anything",
        remedy=f"ranks are on this machine's loopback, so {', '.join(lost)} has no effect here",
        needed=False,
    )


def _check_rocm(facts: GpuFacts) -> Check:
    """AMD's driver has no NVML: what it is and which modes it has stays unasked."""
    return Check(
        name="rocm",
        ok=False,
        seen=f"torch is built for ROCm (HIP {facts.torch_hip}); driver and modes not checked",
        remedy="nobody has run this pack on AMD GPUs yet: compare a picture with stock ComfyUI's first, and tell us",
        needed=False,
    )


def _check_architecture(gpus: Sequence[Gpu]) -> Check:
    listed = ", ".join(f"cuda:{gpu.index} {gpu.name} {gpu.arch}" for gpu in gpus)
    differ = len({gpu.arch for gpu in gpus}) > 1
    remedy = DIFFER if differ else ""
    return Check(name="capability", ok=not differ, seen=listed, remedy=remedy, needed=False)


def _check_driver(facts: GpuFacts) -> Check:
    """A driver runs what was built for its own CUDA version or an older one, and mostly for the same major version."""
    if not facts.driver:
        why = facts.driver_error or "pynvml is not installed"
        return Check(name="driver", ok=False, seen=f"not checked: {why}", remedy=LOOK, needed=False)
    driver, built = divmod(facts.driver_cuda, 1000), tuple(int(part) for part in facts.torch_cuda.split(".")[:2])
    driver_cuda = (driver[0], driver[1] // 10)
    seen = f"driver {facts.driver} speaks CUDA {driver_cuda[0]}.{driver_cuda[1]}, torch is built for {facts.torch_cuda}"
    if driver_cuda >= built:
        return Check(name="driver", ok=True, seen=seen)
    if driver_cuda[0] == built[0]:
        remedy = "it works, but compiled blocks may not; install a driver at least as new as torch's CUDA"
        return Check(name="driver", ok=False, seen=seen, remedy=remedy, needed=False)
    oldest = OLDEST_DRIVER.get(built[0])
    remedy = f"install driver {oldest} or newer, or a torch built for an older CUDA" if oldest else NEW_DRIVER
    return Check(name="driver", ok=False, seen=seen, remedy=remedy)


def _check_kernels(facts: GpuFacts, gpus: Sequence[Gpu]) -> Check:
    lacking = [gpu for gpu in gpus if not _has_kernels(facts.kernels, gpu)]
    named = ", ".join(f"cuda:{gpu.index} ({gpu.arch or _dotted(gpu)})" for gpu in lacking)
    remedy = "install a torch built for this GPU (RTX 50xx need CUDA 12.8 or newer)"
    if facts.torch_hip:
        remedy = "install a torch built for it; HSA_OVERRIDE_GFX_VERSION=10.3.0 lets gfx1031 to gfx1036 run as gfx1030"
    if others := ",".join(f"cuda:{gpu.index}" for gpu in gpus if gpu not in lacking):
        remedy = f"name {others} in devices, or {remedy}"
    return Check(
        name="kernels",
        ok=not lacking,
        seen=f"torch has none for {named}; it has {' '.join(facts.kernels)}" if lacking else "torch has them for all",
        remedy=remedy,
    )


def _has_kernels(kernels: Sequence[str], gpu: Gpu) -> bool:
    """Machine code (sm_86) runs on its major version, from its minor on; code to compile (compute_80) on all later.

    AMD's (gfx90a) runs on that architecture alone.
    """
    if gpu.arch:
        return gpu.arch in kernels
    matches = (re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", kernel) for kernel in kernels)
    built = ((match[1], (int(match[2]), int(match[3]))) for match in matches if match)
    capability = gpu.capability
    return any(each <= capability and (kind == "compute" or each[0] == capability[0]) for kind, each in built)


def _check_answers(facts: GpuFacts, gpus: Sequence[Gpu]) -> Check:
    """Whether each device took a context of this process a moment ago."""
    silent = [gpu for gpu in gpus if gpu.error]
    causes = [find_known(gpu.error) for gpu in silent]
    found = causes[0] if silent else None
    seen = "; ".join(f"cuda:{gpu.index} does not: {gpu.error}" for gpu in silent)
    return Check(
        name="devices answer",
        ok=not silent,
        seen=seen or "each takes a new process",
        remedy=found.known.remedy if found else _look_at(facts),
        needed=not silent or any(each is None or not each.known.out_of_memory for each in causes),
    )


def _check_capability(gpus: Sequence[Gpu]) -> Check:
    listed = ", ".join(f"cuda:{gpu.index} {gpu.name} {_dotted(gpu)}" for gpu in gpus)
    least, most = min(gpu.capability for gpu in gpus), max(gpu.capability for gpu in gpus)
    remarks = []
    if least < AMPERE:
        slow = "no bfloat16 in hardware and no flash attention below 8.0: slower, and float16 is the better dtype"
        remarks.append(slow if least >= TURING else f"{slow}; below 7.5 nobody has tried it")
    if least != most:
        remarks.append(DIFFER)
    return Check(
        name="capability",
        ok=not remarks,
        seen=listed,
        remedy="; ".join(remarks),
        needed=False,
    )


def _check_compute_mode(facts: GpuFacts, gpus: Sequence[Gpu]) -> Check:
    """ComfyUI and its rank share a device: cuda:0 unless ComfyUI was told otherwise. MPS makes one process of many."""
    modes = {gpu.index: gpu.compute_mode for gpu in gpus}
    closed = [index for index, mode in modes.items() if mode == "prohibited"]
    single = [index for index, mode in modes.items() if mode.startswith("exclusive") and not facts.mps]
    remedy = "sudo nvidia-smi -c 0 lets several processes in"
    if closed:
        seen = f"{_listed(closed)} takes no process at all (mode: prohibited)"
        return Check(name="compute mode", ok=False, seen=seen, remedy=remedy)
    if single:
        seen = f"{_listed(single)} takes one process, and ComfyUI and its worker are two (mode: exclusive process)"
        return Check(name="compute mode", ok=False, seen=seen, remedy=remedy, needed=0 in single)
    if not all(modes.values()):
        return Check(name="compute mode", ok=True, seen="not told, so the usual: several processes", needed=False)
    return Check(name="compute mode", ok=True, seen="several processes may use each device")


def _check_mig(gpus: Sequence[Gpu]) -> Check:
    slices = [gpu.index for gpu in gpus if gpu.mig]
    return Check(
        name="mig",
        ok=not slices,
        seen=f"{_listed(slices)} is a slice of a GPU (MIG)" if slices else "whole GPUs",
        remedy="a process sees one slice alone and NCCL joins none: one rank works; sudo nvidia-smi -mig 0 for more",
        needed=False,
    )


def _check_mps() -> Check:
    return Check(
        name="mps",
        ok=False,
        seen="CUDA's Multi-Process Service runs",
        remedy="it works, but one process's crash may end the others; echo quit | nvidia-cuda-mps-control stops it",
        needed=False,
    )


def _check_peers(facts: GpuFacts, indices: Sequence[int]) -> Check:
    pairs = [pair for pair in facts.peer_access if set(map(int, pair.split("-"))) <= set(indices)]
    cut = [pair for pair in pairs if not facts.peer_access[pair]]
    if not cut:
        linked = [pair for pair in pairs if pair in facts.nvlink]
        over = ", over NVLink" if len(linked) == len(pairs) else ", over PCIe" if not linked else ", some over NVLink"
        told = "" if facts.torch_hip else over  # AMD's own links are not asked for
        return Check(name="peer access", ok=True, seen=f"every device reaches every other{told}", needed=False)
    reasons = {facts.p2p_reason[pair] for pair in cut if pair in facts.p2p_reason}
    why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
    remedy = f"nothing is broken: {OVER_HOST}"
    return Check(name="peer access", ok=False, seen=f"none between {', '.join(cut)}{why}", remedy=remedy, needed=False)


def _look_at(facts: GpuFacts) -> str:
    return LOOK_AMD if facts.torch_hip else LOOK


def _dotted(gpu: Gpu) -> str:
    return f"{gpu.capability[0]}.{gpu.capability[1]}"


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(f"cuda:{index}" for index in indices)
