"""What torch and the driver's library NVML say of this machine's GPUs.

Owns the asking. torch for ROCm answers as torch for CUDA does, with AMD's names of architectures; there is no NVML.
What an answer means is gpu_checks.py's. `look` asks in a process of its own, because some questions make a CUDA
context: it takes memory, and a device in exclusive mode would then refuse the ranks. NVML is asked through pynvml where
that is installed; without it its fields stay empty.

`python -m parallel_runtime.cli.gpu_facts` prints the answers as one line of JSON.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ..nvlink import P2P_NVLINK, handle_of, p2p_status

PACK_ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0  # importing torch and making a context on each of eight devices, on a slow disk
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
# nvmlGpuP2PStatus_t, in plain words.
P2P_STATUS = {
    1: "the chipset does not support it",
    2: "the GPU or its driver does not support it",
    3: "they are on different processors",
    4: "it is switched off in the driver's settings",
    5: "not supported",
}
P2P_READ = 0  # nvmlGpuP2PCapsIndex_t


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device as torch numbers it. `error`: why it took no context. Empty or None: not known.

    `arch` is AMD's name of the architecture, such as gfx90a; empty on CUDA.
    """

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    uuid: str = ""
    free_bytes: int | None = None
    error: str = ""
    compute_mode: str = ""
    mig: str = ""  # "slice": it is one; "on": the GPU is cut into slices
    arch: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """All answers. `driver_cuda` is 12040 for CUDA 12.4; pairs are named "0-1", lower index first.

    `torch_hip` is set where torch is built for ROCm: `nccl` is then RCCL's version.
    """

    torch: str = ""
    torch_cuda: str = ""
    torch_hip: str = ""
    nccl: str = ""
    kernels: tuple[str, ...] = ()  # what torch was built for: sm_90, compute_90, gfx90a
    error: str = ""  # why torch sees no device
    gpus: tuple[Gpu, ...] = ()
    peer_access: dict[str, bool] = field(default_factory=dict)
    driver: str = ""
    driver_cuda: int = 0
    driver_gpus: int = 0
    driver_error: str = ""
    p2p_reason: dict[str, str] = field(default_factory=dict)
    nvlink: tuple[str, ...] = ()
    mps: bool = False

    def nameless(self) -> "GpuFacts":
        """Without the GPUs' UUIDs, for a report that people show to others."""
        return replace(self, gpus=tuple(replace(gpu, uuid="") for gpu in self.gpus))


def look() -> GpuFacts:
    """Ask in a process of its own. When that ends badly, `error` has the last line it printed."""
    try:
        done = subprocess.run(  # noqa: S603  our own interpreter, no shell
            [sys.executable, "-m", __name__],
            cwd=PACK_ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return GpuFacts(error=f"CUDA gave no answer for {LIMIT_S:.0f} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return GpuFacts(error=last)
    return of_json(done.stdout.strip().splitlines()[-1])


def of_json(line: str) -> GpuFacts:
    """The facts that a line of `python -m parallel_runtime.cli.gpu_facts` holds."""
    body = json.loads(line)
    gpus = tuple(Gpu(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in body["gpus"])
    return GpuFacts(**body | {"gpus": gpus, "kernels": tuple(body["kernels"]), "nvlink": tuple(body["nvlink"])})


def ask(torch: Any, nvml: Any | None, *, mps: bool) -> GpuFacts:  # noqa: ANN401  modules
    """Ask torch, then NVML (None: not installed)."""
    facts = replace(_ask_torch(torch), mps=mps)
    return facts if nvml is None or facts.torch_hip else _ask_nvml(nvml, facts)


def _ask_torch(torch: Any) -> GpuFacts:  # noqa: ANN401
    version = torch.version
    facts = GpuFacts(torch=torch.__version__, torch_cuda=version.cuda or "", torch_hip=version.hip or "")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build for the CPU alone
        return replace(facts, error=str(error).strip().partition("\n")[0])
    gpus = tuple(_ask_device(torch, index) for index in range(torch.cuda.device_count()))
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return replace(
        facts,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
        kernels=tuple(torch.cuda.get_arch_list()),
        gpus=gpus,
        peer_access={
            f"{a.index}-{b.index}": torch.cuda.can_device_access_peer(a.index, b.index)
            and torch.cuda.can_device_access_peer(b.index, a.index)
            for a in gpus
            for b in gpus
            if a.index < b.index
        },
    )


def _ask_device(torch: Any, index: int) -> Gpu:  # noqa: ANN401
    found = torch.cuda.get_device_properties(index)
    gpu = Gpu(
        index=index,
        name=found.name,
        capability=(found.major, found.minor),
        total_bytes=found.total_memory,
        uuid=str(found.uuid) if hasattr(found, "uuid") else "",  # torch 2.6 and newer have it on CUDA
        arch=found.gcnArchName.partition(":")[0] if torch.version.hip else "",  # gfx90a:sramecc+:xnack-
    )
    try:
        return replace(gpu, free_bytes=torch.cuda.mem_get_info(index)[0])
    except RuntimeError as error:
        return replace(gpu, error=str(error).strip().partition("\n")[0])


def _ask_nvml(nvml: Any, facts: GpuFacts) -> GpuFacts:  # noqa: ANN401
    try:
        nvml.nvmlInit()
        facts = replace(
            facts,
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            driver_cuda=nvml.nvmlSystemGetCudaDriverVersion(),
            driver_gpus=nvml.nvmlDeviceGetCount(),
        )
    except nvml.NVMLError as error:
        return replace(facts, driver_error=str(error))
    handles = {gpu.index: handle_of(nvml, gpu.uuid) for gpu in facts.gpus}
    gpus = tuple(_with_modes(nvml, gpu, handles[gpu.index]) for gpu in facts.gpus)
    reasons, linked = {}, []
    for pair in facts.peer_access:
        first, second = (handles[int(index)] for index in pair.split("-"))
        if (reason := P2P_STATUS.get(p2p_status(nvml, first, second, P2P_READ) or 0)) is not None:
            reasons[pair] = reason
        if p2p_status(nvml, first, second, P2P_NVLINK) == 0:
            linked.append(pair)
    return replace(facts, gpus=gpus, p2p_reason=reasons, nvlink=tuple(linked))


def _with_modes(nvml: Any, gpu: Gpu, handle: Any | None) -> Gpu:  # noqa: ANN401
    if handle is None:
        return gpu
    try:
        if nvml.nvmlDeviceIsMigDeviceHandle(handle):
            return replace(gpu, mig="slice")
        gpu = replace(gpu, compute_mode=COMPUTE_MODES.get(nvml.nvmlDeviceGetComputeMode(handle), ""))
        return replace(gpu, mig="on" if nvml.nvmlDeviceGetMigMode(handle)[0] == 1 else "")
    except nvml.NVMLError:  # "Not Supported": a GPU without MIG, or a virtual one
        return gpu


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found  # old pynvml gives bytes


def _mps_runs() -> bool:
    """Whether CUDA's Multi-Process Service is there for this process: its daemon, or its pipe."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")  # noqa: S108  CUDA's default
    names = (process.info["name"] or "" for process in psutil.process_iter(["name"]))
    return pipe.exists() or any(name.startswith("nvidia-cuda-mps") for name in names)


def _main() -> None:
    torch = importlib.import_module("torch")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        nvml = None
    sys.stdout.write(json.dumps(asdict(ask(torch, nvml, mps=_mps_runs()))) + "\n")


if __name__ == "__main__":
    _main()
