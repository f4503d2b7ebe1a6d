"""What every rank of a pool is started with, and the environment that its process gets.

Owns both. Does not own how a rank is started (process/rank_process.py on ComfyUI's machine, machines/launch.py
elsewhere).

The environment is written out here, because ComfyUI's own may hold what is wrong for a rank, such as the allocator that
ComfyUI chose for itself (a user's settings of torch's own one are taken over) or another program's rendezvous address.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6

from ..compiling import compile_environment
from ..devices import Device

PACK_ROOT = Path(__file__).resolve().parents[2]

WHOLE_BLOCKS = "PARALLEL_DIT_WHOLE_BLOCKS"  # "0": of sharded or offloaded weights no block stays whole on a device
# Not where ranks exchange over NCCL: a launch that waits for its kernel waits for the other rank's, and two stages that
# send each other large parts at once wait for ever.
NOT_OVER_NCCL = "CUDA_LAUNCH_BLOCKING"
# Taken over where the caller has them; nothing else is.
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONUSERBASE", "PYTHONDONTWRITEBYTECODE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES"),
    *("NVIDIA_DRIVER_CAPABILITIES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("CUDA_MODULE_LOADING", NOT_OVER_NCCL, "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_CACHE_PATH"),
    *("CUDA_DISABLE_PERF_BOOST", "NVIDIA_TF32_OVERRIDE", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CC", "CXX", "THP_MEM_ALLOC_ENABLE", WHOLE_BLOCKS),
    # What changes a result: ComfyUI sets or reads some of them itself.
    *("CUBLAS_WORKSPACE_CONFIG", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "OCL_SET_SVM_SIZE"),
    *("COMFYUI_ENABLE_MIOPEN", "ATEN_CPU_CAPABILITY", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "MKL_CBWR"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT", "FLASH_ATTENTION_TRITON_AMD_ENABLE"),
)
# And all that begins so: the known ways around trouble with a board or a driver are set there. torch's variables had
# names without TORCH_ before, which it still reads; some NCCL_ ones are among them. The others are ROCm's: which GPUs
# a process sees, and how it computes on those that ROCm does not list.
PASSED_ON_FAMILIES = (
    *("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_MPS_"),
    *("HIP_", "HSA_", "MIOPEN_", "RCCL_", "ROCBLAS_", "HIPBLASLT_"),
)
# Settings of torch's allocator, "key:value,key:[1:2,3:4]"; torch reads the first of these that is set.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Of the families, what makes NCCL listen, or meet others, where another user says.
NEVER_PASSED_ON = ("NCCL_COMM_ID", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_RAS_ADDR")
# Both backends listen where these say: no process outside this machine can connect. No file of NCCL's changes what is
# set here (nccl_files.py). The address of its RAS subsystem is the default one.
LISTEN_HERE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_OOB_NET_IFNAME": "=lo",
    "NCCL_RAS_ADDR": "localhost:28028",
}
# What a rank has unless the caller says otherwise.
DEFAULTS = {
    # torch asks for huge pages where it takes 2 MB and more of the host's memory and the system leaves it to programs:
    # a rank on a CPU spent up to half of its time on pages of 4 KB, a large tensor's being new ones each time.
    "THP_MEM_ALLOC_ENABLE": "1",
}
# And, through NCCL.
NCCL_DEFAULTS = {
    # Exchanges go ahead of matrix products that would fill the device; of all groups, those of new_group included.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # The parent watches: NCCL's own monitor ends a rank whose machine was frozen for eight minutes, and
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # its watchdog, seeing a CUDA error first, aborts the process before Python has said which.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # torch 2.6 and 2.7.0 make NCCL's calls non-blocking where a group has a device, and may then hang (PyTorch issue
    # 153960).
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    # NCCL shows a peer the buffers of a recorded exchange by one handle each. Memory of expandable segments has
    # several: a replay reads what is not mapped, or waits for ever (NCCL issue 1820, torchtitan issue 3306).
    "NCCL_GRAPH_REGISTER": "0",
}
# torch's NCCL backend notes the Python stack of each exchange in a buffer, for a monitor that ranks do not have. The
# size of it has the first name from torch 2.9 on, which reads the other one where the first is not set.
RECORDED_SINCE_2_9, RECORDED = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
# And before torch 2.8 the allocator keeps what a collective used until the device has run it, while the host is blocks
# ahead, unless this is 1: exchanges hold their tensors themselves (parallel/collectives.py). Messages between two ranks
# are kept so anyway.
HELD_BY_EXCHANGES = "TORCH_NCCL_AVOID_RECORD_STREAMS"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where `ranks` ranks of several machines meet: a store at `address`, "HOST:PORT".

    `interface`: this machine's network interface towards the others. `on_cuda`: each rank has a CUDA device of its own.
    """

    address: str
    interface: str
    ranks: int
    on_cuda: bool


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What every rank of a pool is started with. `python_path` is searched after the pack's own folder.

    `devices` are those of this machine; with a `meeting` there are ranks elsewhere, too.
    Without `peer_access`, NCCL copies between GPUs through the host's memory.
    """

    devices: tuple[Device, ...]
    threads: int
    engine: str
    python_path: tuple[str, ...] = ()
    peer_access: bool = True
    meeting: Meeting | None = None

    @property
    def backend(self) -> str:
        """NCCL where each rank has a CUDA device of its own, gloo elsewhere."""
        on_cuda = on_own_cuda(self.devices) if self.meeting is None else self.meeting.on_cuda
        return "nccl" if on_cuda else "gloo"

    @property
    def over_nccl(self) -> bool:
        """Whether ranks exchange over NCCL."""
        return self.backend == "nccl" and self.num_ranks > 1

    @property
    def num_ranks(self) -> int:
        """All ranks, those of other machines included."""
        return len(self.devices) if self.meeting is None else self.meeting.ranks


def blocks_may_stay(environment: Mapping[str, str]) -> bool:
    """Whether blocks of sharded or offloaded weights may stay whole on a device."""
    return environment.get(WHOLE_BLOCKS) != "0"


def interface_of(address: str) -> str:
    """The network interface that has an address of this machine, for ranks to listen on.

    Raises ValueError where none has, and where gloo and NCCL, which know interfaces by name alone, would listen on
    another address of it: they take its first one (gloo/transport/tcp/device.cc; NCCL_SOCKET_IFNAME). A private IPv4
    address before an IPv6 one is let pass, as nearly every interface has one.
    """
    import psutil  # here, since most ranks need no address

    found = {
        name: [each.address.partition("%")[0] for each in there if each.family in (AF_INET, AF_INET6)]
        for name, there in psutil.net_if_addrs().items()
    }
    for name, addresses in found.items():
        if address not in addresses:
            continue
        first = (found.get(name.partition(":")[0]) or addresses)[0]  # of eth0 for a label, eth0:1, as NCCL has it
        if first != address and (
            ip_address(first).version == ip_address(address).version or ip_address(first).is_global
        ):
            raise ValueError(
                f"{name} has the address {first} before {address}, and workers would listen on that; use {first} "
                f"between the machines, or make {address} the first address of an interface"
            )
        return name
    raise ValueError(f"no network interface of this machine has the address {address}; give one that `ip addr` shows")


def on_own_cuda(devices: Sequence[Device]) -> bool:
    """Whether ranks on these devices of one machine each have a CUDA device of their own."""
    return len(set(devices)) == len(devices) and all(device.kind == "cuda" for device in devices)


def rank_environment(ours: Mapping[str, str], settings: RankSettings) -> dict[str, str]:
    """A rank's whole environment, from the caller's."""
    families = {name for name in ours if name.startswith(PASSED_ON_FAMILIES)}.difference(NEVER_PASSED_ON)
    taken_over = {name: ours[name] for name in (*PASSED_ON, *sorted(families)) if name in ours}
    if settings.over_nccl:
        taken_over.pop(NOT_OVER_NCCL, None)
    if taken_over.get("NCCL_CONF_FILE"):  # a rank's current folder is another
        taken_over["NCCL_CONF_FILE"] = str(Path(taken_over["NCCL_CONF_FILE"]).absolute())
    return (
        DEFAULTS
        | (NCCL_DEFAULTS | _nccl_defaults_of_torch(ours) if settings.backend == "nccl" else {})
        | taken_over
        | _allocator_settings(ours)
        | compile_environment(taken_over)
        | ({} if settings.peer_access else {"NCCL_P2P_DISABLE": "1"})
        | {
            # Last, where the caller itself finds packages before those that are installed.
            "PYTHONPATH": os.pathsep.join((str(PACK_ROOT), *settings.python_path, *_own_python_path(ours))),
            **({"PYTHONNOUSERSITE": "1"} if sys.flags.no_user_site else {}),
            "PYTHONSAFEPATH": "1",  # not the current folder, whatever it is
            "OMP_NUM_THREADS": str(settings.threads),
        }
        | (LISTEN_HERE if settings.meeting is None else listening_on(settings.meeting.interface))
    )


def listening_on(interface: str) -> dict[str, str]:
    """As `LISTEN_HERE`, for ranks that machines reach over an interface of this one."""
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return LISTEN_HERE | names | {"NCCL_OOB_NET_IFNAME": f"={interface}"}


def _nccl_defaults_of_torch(ours: Mapping[str, str]) -> dict[str, str]:
    """More of them, by the version of torch."""
    import torch  # here, since a help text needs none

    major, minor, *_ = torch.__version__.split(".")
    version = int(major), int(minor)
    found = {HELD_BY_EXCHANGES: "1"} if version < (2, 8) else {}
    if not {RECORDED, RECORDED_SINCE_2_9} & ours.keys():
        found[RECORDED_SINCE_2_9 if version >= (2, 9) else RECORDED] = "0"
    return found


def _allocator_settings(ours: Mapping[str, str]) -> dict[str, str]:
    """Those of the caller without `backend`, which ComfyUI appends to them; none where nothing is left.

    torch leaves out spaces, wherever they are. In a list no part begins with `backend`, so every comma may part.
    """
    found = {}
    for name in ALLOCATOR_SETTINGS:
        parts = "".join(ours.get(name, "").split()).split(",")
        found[name] = ",".join(part for part in parts if part and part.partition(":")[0] != "backend")
    return {name: kept for name, kept in found.items() if kept}


def _own_python_path(ours: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH that this process searches, those of a relative name as it found them when it started.

    Never its current folder, nor that of an empty name, which would be a rank's own current folder.
    """
    if sys.flags.ignore_environment:
        return []
    folders = [folder for folder in ours.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return [os.path.abspath(folder) for folder in folders if os.path.isabs(folder) or _searched(folder)]


def _searched(relative: str) -> bool:
    """Whether this process searches a folder that is not its current one."""
    path = os.path.abspath(relative)
    return path in sys.path and path != os.getcwd()
