"""What CUDA, NCCL, cuDNN and the NVIDIA driver say when they fail, and what it means: a table and a look-up.

Owns: the table. Does not own: which rank is to blame (failures.py). An entry matches by its pattern, in the table's
order; a text that nothing matches stays as it is. What a pattern matches is quoted to the user, so it spans what people
search for. Each entry is tested with recorded texts (tests/pool/recorded_errors.json).
"""

import re
from dataclasses import dataclass

from ..process.signs import OUT_OF_MEMORY

MEMORY_REMEDY = "set weights in SP Config to sharded, or offloaded; use a smaller image, or free that device's memory"
REPORT = "if the same prompt fails again, report it with the whole text"
REBOOT = "restart the machine"
NO_PEERS = "set NCCL_P2P_DISABLE=1 before ComfyUI starts"
NO_CUMEM = "set NCCL_CUMEM_HOST_ENABLE=0 before ComfyUI starts"
OVER_HOST = "copies go through the host's memory in /dev/shm and are slower"
MORE_ROOM = (
    "give it 1 GiB: docker run --shm-size=1g --cap-add SYS_NICE, in Kubernetes a volume in memory at /dev/shm; "
    "where you cannot, name fewer devices, or start ComfyUI with NCCL_SHM_DISABLE=1, which is slower"
)
TRY_COPIES = "run doctor, which tries the copies; where they hang, NCCL_P2P_DISABLE=1 avoids them"
NEW_DRIVER = "install a newer NVIDIA driver, or a torch built for the CUDA version that nvidia-smi shows"


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """One kind of message. `pattern` is searched in the whole text; case counts.

    `cause`: what it means; empty where the message's first line says it well. `consequence`: the rank that says this
    mostly failed because another one did. `vague`: the message does not say why; what the rank printed may.
    `out_of_memory`: the rank found no memory. `copies`: broken copies between GPUs may be behind it.
    """

    name: str
    pattern: str
    remedy: str
    cause: str = ""
    consequence: bool = False
    vague: bool = False
    out_of_memory: bool = False
    copies: bool = False


@dataclass(frozen=True)
class FoundError:
    """An entry, and the words of the message that it was recognised by."""

    known: KnownError
    words: str

    @property
    def cause(self) -> str:
        """What it means with the message's own words; empty where the message says it well."""
        return f'{self.known.cause} ("{self.words}")' if self.known.cause else ""


def find_known(text: str, printed: str = "") -> FoundError | None:
    """The first entry that matches `text`, None when none does. Where `text` is empty or vague, `printed` may say more.

    `printed` is what a rank has printed last: NCCL's warnings, and the exceptions of threads that Python never sees.
    """
    found = _first(text)
    if text and (found is None or not found.known.vague):
        return found
    return _first(printed) or found


def _first(text: str) -> FoundError | None:
    for known in KNOWN:
        if match := re.search(known.pattern, text):
            return FoundError(known, " ".join(match.group().split()))
    return None


KNOWN: tuple[KnownError, ...] = (
    # Memory.
    KnownError(
        name="nccl memory",
        pattern=r"Cuda failure (?:2 )?'out of memory'|Failed to C(?:UDA|uda) (?:calloc|malloc)\w*(?: async)? \d+ bytes",
        cause="NCCL found no memory on the device for its own buffers, some hundred MiB for each group of ranks",
        remedy=f"{MEMORY_REMEDY}; where the devices are empty, {NO_CUMEM}",
        out_of_memory=True,
    ),
    KnownError(
        name="cublas memory",
        pattern=r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)(?: when calling `?\w+\([^)]*\)`?)?",
        cause="cuBLAS could not start on the device, mostly because its memory is full",
        remedy=MEMORY_REMEDY,
        out_of_memory=True,
    ),
    KnownError(
        name="cudnn memory",
        pattern=r"CUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR\w*)",
        cause="cuDNN could not start on the device: its memory is full, or another cuDNN than torch's was loaded",
        remedy=f"{MEMORY_REMEDY}; take other cuDNN libraries out of LD_LIBRARY_PATH",
        out_of_memory=True,
    ),
    KnownError(
        name="memory",
        # The type of an error, where Python prints it: at the beginning of a line. A text may only name one.
        pattern=r"(?m:^)(?:[\w.]+\.)?(?:OutOf|_Array)?MemoryError(?=:|(?m:$))"
        r"|DefaultCPUAllocator: can't allocate memory"
        r"|(?:CUDA|HIP) (?:(?:driver )?error: )?out of memory|Triton Error \[(?:CUDA|HIP)\]: out of memory"
        r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"[^\"]*CUDACachingAllocator|CUFFT_ALLOC_FAILED"
        r"|unable to mmap \d+ bytes from file <[^>]*>: Cannot allocate memory",
        remedy=MEMORY_REMEDY,
        out_of_memory=True,
    ),
    KnownError(
        name="host memory",
        pattern=OUT_OF_MEMORY,
        remedy="close other programs, use a smaller file such as fp8, or add memory or swap; in a container, raise its "
        "limit",
    ),
    # /dev/shm, sockets and files that NCCL uses between ranks of one machine.
    KnownError(
        name="shm permission",
        pattern=r"Call to (?:shm_)?open failed ?: Permission denied",
        cause="NCCL may not write to /dev/shm",
        remedy="let the user of ComfyUI write there (chmod 1777 /dev/shm)",
    ),
    KnownError(
        name="shm space",
        pattern=r"Error while creating shared memory segment \S+ \(size \d+\)(?:, error: [\w ]+)?"
        r"|failed to extend /dev/shm/nccl-\S+ to \d+ bytes|Call to posix_fallocate failed : No space left on device",
        cause="NCCL could not make a segment in /dev/shm, which is mostly full or too small",
        remedy=f"{MORE_ROOM}; doctor lists what is left over there",
    ),
    KnownError(
        name="shm attach",
        pattern=r"Error while attaching to shared memory segment \S+ \(size \d+\)(?:, error: [\w ]+)?",
        cause="a rank could not open the segment that another rank made in /dev/shm",
        remedy="see that nothing empties /dev/shm meanwhile; NCCL_CUMEM_HOST_ENABLE=0 or NCCL_SHM_DISABLE=1 avoids it",
    ),
    KnownError(
        name="too many files",
        pattern=r"Too many open files",
        remedy="raise the limit of open files before ComfyUI starts (ulimit -n 4096)",
    ),
    KnownError(
        name="no thread",
        pattern=r"Resource temporarily unavailable|can't start new thread",
        remedy="raise the limits of memory and of processes (ulimit -v, ulimit -u)",
    ),
    KnownError(
        name="no interface",
        pattern=r"Bootstrap : no socket interface found|no NCCL_SOCKET_IFNAME interface found"
        r"|connecting to address .{0,80}with family \d+ is neither AF_INET\(2\) nor AF_INET6\(10\)",
        cause="NCCL found no network interface; ranks meet on loopback alone",
        remedy="bring up the interface lo (ip link set lo up)",
    ),
    KnownError(
        name="address in use",
        pattern=r"Call to bind failed ?: (?:Address already in use|Cannot assign requested address)",
        cause="NCCL could not open a socket on loopback",
        remedy="see that lo has the address 127.0.0.1 (ip addr show lo) and that ports are left",
    ),
    # Which devices, and how they may be used.
    KnownError(
        name="no peer access",
        pattern=r"(?:failed to open CUDA IPC handle : |Cuda failure |CUDA error: |error )?(?:217 )?"
        r"'?peer access is not supported between these two devices'?",
        cause="these GPUs cannot read each other's memory, and a copy tried to",
        remedy=f"{NO_PEERS}; {OVER_HOST}; if it comes again, {NO_CUMEM}",
        copies=True,
    ),
    KnownError(
        name="duplicate gpu",
        pattern=r"Duplicate GPU detected : rank \d+ and rank \d+ both on CUDA device \w+",
        cause="two ranks got the same GPU; two MIG slices of one GPU count as the same",
        remedy="name different devices in SP Config, and whole GPUs instead of MIG slices",
    ),
    KnownError(
        name="invalid device",
        pattern=r"invalid device ordinal",
        cause="a rank's device does not exist for its process",
        remedy="compare the devices in SP Config with CUDA_VISIBLE_DEVICES and nvidia-smi",
    ),
    KnownError(
        name="other device",  # of worker/start.py, which knows a GPU by its UUID
        pattern=r"cuda:\d+ is (?:no GPU|GPU \S+) in this rank and GPU \S+ in ComfyUI",
        cause="a rank numbers the GPUs otherwise than ComfyUI",
        remedy="restart ComfyUI, and leave CUDA_VISIBLE_DEVICES as it is then; nvidia-smi says whether a GPU is lost",
    ),
    KnownError(
        name="device busy",
        pattern=r"(?:all )?CUDA-capable device(?:s|\(s\)) (?:are|is/are) busy or unavailable",
        cause="the device takes no further process: its compute mode is exclusive, or a dead program still holds it",
        remedy="allow several processes (nvidia-smi -c 0), or name another device; nvidia-smi shows what holds it",
    ),
    KnownError(
        name="mps unreachable",
        pattern=r"MPS client failed to connect to the MPS control daemon or the MPS server"
        r"|MPS server is not ready to accept new MPS client requests"
        r"|the remote procedural call between the MPS server and the MPS client failed",
        cause="CUDA's Multi-Process Service is asked for and does not answer",
        remedy="start it again (nvidia-cuda-mps-control -d) as the user of ComfyUI, or unset CUDA_MPS_PIPE_DIRECTORY",
    ),
    KnownError(
        name="mps full",
        pattern=r"(?:the )?hardware resources required to (?:create|support) (?:an )?(?:MPS client|device connections)"
        r" (?:have|has) been exhausted",
        cause="CUDA's Multi-Process Service has as many clients as it takes",
        remedy="close other programs that use the GPU, or stop the service (echo quit | nvidia-cuda-mps-control)",
    ),
    KnownError(
        name="virtual gpu",
        pattern=r"Cuda failure (?:801 )?'operation not supported'|CUDA error: operation not supported",
        cause="the device refuses what was asked, as virtual GPUs, MIG slices and WSL do",
        remedy="set NCCL_CUMEM_ENABLE=0 and NCCL_P2P_DISABLE=1 before ComfyUI starts, or use whole GPUs",
        copies=True,
    ),
    # Driver, torch and kernels that do not fit each other.
    KnownError(
        name="driver too old",
        pattern=r"NVIDIA driver on your system is too old \(found version \d+\)"
        r"|CUDA driver version is insufficient for CUDA runtime version",
        cause="the NVIDIA driver is older than this torch needs",
        remedy=NEW_DRIVER,
    ),
    KnownError(
        name="driver lacks call",
        pattern=r"API call is not supported in the installed CUDA driver",
        cause="the NVIDIA driver does not know a function that this torch or its NCCL calls",
        remedy=NEW_DRIVER,
    ),
    KnownError(
        name="driver replaced",
        pattern=r"system has unsupported display driver / cuda driver combination|Driver/library version mismatch",
        cause="the driver that runs and its libraries have different versions, as after an update without a restart",
        remedy=f"{REBOOT}; in a container, use libraries of the host's driver",
    ),
    KnownError(
        name="forward compatibility",
        pattern=r"forward compatibility was attempted on non supported HW",
        cause="a newer CUDA than the driver's was put in its place, which works on data-centre GPUs only",
        remedy=f"{NEW_DRIVER}; in a container, remove its cuda-compat package",
    ),
    KnownError(
        name="fabric manager",
        pattern=r"system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY",
        cause="the GPUs' NVSwitch is not ready: the fabric manager does not run, or is not of the driver's version",
        remedy="install the driver's version of nvidia-fabricmanager, then systemctl start nvidia-fabricmanager",
    ),
    KnownError(
        name="no driver",
        pattern=r"Found no NVIDIA driver on your system|no CUDA-capable device is detected|No CUDA GPUs are available",
        cause="no NVIDIA driver or GPU is visible",
        remedy="see that nvidia-smi works for this user; in a container, start it with --gpus all",
    ),
    KnownError(
        name="no amd gpu",
        pattern=r"No HIP GPUs are available",
        cause="torch is built for ROCm, and no AMD GPU can be opened",
        remedy="see that rocm-smi works for this user, who must be in the groups render and video; "
        "in a container, start it with --device=/dev/kfd --device=/dev/dri",
    ),
    KnownError(
        name="torch without cuda",
        pattern=r"Torch not compiled with CUDA enabled",
        cause="this torch is built for the CPU alone",
        remedy="install a CUDA build of torch",
    ),
    KnownError(
        name="no kernel",
        pattern=r"no kernel image is available for execution on the device|HIP error: [iI]nvalid device function",
        cause="torch, or another library, has no kernels for this GPU: it is newer or older than the build",
        remedy="install a torch built for it (RTX 50xx need CUDA 12.8 or newer), or name the other GPUs in devices; "
        "doctor shows the GPU's capability",
    ),
    KnownError(
        name="flash on turing",
        pattern=r"FlashAttention only supports Ampere GPUs or newer",
        cause="this attention kernel needs capability 8.0, and the GPU has less",
        remedy=f"leave out attention packages that force it; {REPORT}",
    ),
    KnownError(
        name="nccl versions",
        pattern=r"Mismatched NCCL version detected : rank \d+ version \d+ rank \d+ version \d+",
        cause="ranks loaded different versions of NCCL",
        remedy="keep one: see LD_LIBRARY_PATH and LD_PRELOAD, and pip list for two nvidia-nccl packages",
    ),
    # Hardware.
    KnownError(
        name="nvlink",
        pattern=r"uncorrectable NVLink error detected(?: during the execution)?"
        r"|Invalid access of peer GPU memory over nvlink",
        cause="a link between the GPUs failed",
        remedy=f"{REBOOT}; look at nvidia-smi nvlink -e, and set NCCL_P2P_DISABLE=1 until it is repaired",
        copies=True,
    ),
    KnownError(
        name="ecc",
        pattern=r"uncorrectable ECC error encountered|CUDA_ERROR_ECC_UNCORRECTABLE",
        cause="the GPU's memory has a defect",
        remedy=f"{REBOOT}; if it comes again, leave this GPU out (nvidia-smi -q -d ECC) and have it exchanged",
    ),
    KnownError(
        name="gpu lost",
        pattern=r"GPU has fallen off the bus|GPU is lost|Xid \(PCI:[0-9a-fA-F:.]+\): \d+",
        cause="the driver lost the GPU or reports that it failed: mostly power, heat, a riser or its slot",
        remedy=f"{REBOOT}; dmesg | grep Xid says more; check power cables and temperature",
    ),
    KnownError(
        name="hardware stack",
        pattern=r"CUDA error: hardware stack error",
        cause="the GPU reports a fault of its own",
        remedy=f"{REBOOT}; {REPORT}",
        copies=True,
    ),
    KnownError(
        name="unknown cuda",
        pattern=r"Cuda failure 999 'unknown error'|CUDA (?:error: )?unknown error",
        cause="the driver is in a state of which it can say nothing, as after a suspend or a crash of another program",
        remedy=f"{REBOOT}; look for Xid in dmesg",
        copies=True,
    ),
    # Kernels.
    KnownError(
        name="device assert",
        pattern=r"device-side assert triggered",
        cause="a kernel found a value that it must not get, mostly an index outside a table",
        remedy=f"try without custom nodes that change the model; {REPORT}",
    ),
    KnownError(
        name="illegal access",
        pattern=r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS",
        cause="a kernel used memory that is not its own: a fault of a kernel, of the driver or of the GPU",
        remedy=f"try without compiled blocks and without other custom nodes; {REPORT}",
        copies=True,
    ),
    KnownError(
        name="misaligned",
        pattern=r"CUDA error: misaligned address|CUDA_ERROR_MISALIGNED_ADDRESS",
        cause="a kernel was given an address that it cannot read from",
        remedy=f"try without compiled blocks and without other custom nodes; {REPORT}",
        copies=True,
    ),
    KnownError(
        name="illegal instruction",
        pattern=r"an illegal instruction was encountered|unspecified launch failure|invalid program counter",
        cause="a kernel crashed on the device",
        remedy=f"try without overclocking and with another driver version; {REPORT}",
        copies=True,
    ),
    KnownError(
        name="launch timeout",
        pattern=r"the launch timed out and was terminated",
        cause="the driver ended a kernel that ran for seconds, as it does on a GPU that a screen is connected to",
        remedy="use a GPU without a screen, or a smaller image",
    ),
    KnownError(
        name="cublas failed",
        pattern=r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|ARCH_MISMATCH|INVALID_VALUE|NOT_SUPPORTED)",
        cause="a matrix product failed inside cuBLAS",
        remedy=f"take other CUDA libraries out of LD_LIBRARY_PATH; {REPORT}",
    ),
    KnownError(
        name="cudnn failed",
        pattern=r"CUDNN_STATUS_(?:EXECUTION_FAILED\w*|MAPPING_ERROR|\w*VERSION_MISMATCH|NOT_SUPPORTED\w*|BAD_PARAM\w*)",
        cause="a kernel failed inside cuDNN, or another cuDNN than torch's was loaded",
        remedy=f"take other cuDNN libraries out of LD_LIBRARY_PATH; {REPORT}",
    ),
    # Waiting for others.
    KnownError(
        name="monitor",
        pattern=r"ProcessGroupNCCL's watchdog got stuck for \d+ seconds|Heartbeat monitor timed out",
        cause="torch ended the rank because a call of CUDA or NCCL did not come back",
        remedy="a frozen machine does this too: TORCH_NCCL_ENABLE_MONITORING=0 lets it wait; else run doctor",
        consequence=True,
    ),
    KnownError(
        name="watchdog timeout",
        pattern=r"Watchdog caught collective operation timeout: WorkNCCL\([^)]*?OpType=\w+",
        cause="an exchange between ranks did not end: a rank hangs, or copies between the GPUs do",
        remedy=TRY_COPIES,
        consequence=True,
    ),
    KnownError(
        name="peer ended",
        pattern=r"remote process exited or there was a network error|Connection closed by (?:remote )?peer"
        r"|Connection reset by peer|failed ?: Broken pipe|Call to connect .{0,80}failed ?: Connection refused"
        r"|gloo/transport|Did the remote server shutdown or crash",
        remedy="another rank ended while this one waited for it; ComfyUI's log may say why",
        consequence=True,
    ),
    # Inputs that do not fit the model.
    KnownError(
        name="widths",
        pattern=r"mat1 and mat2 shapes cannot be multiplied \(\w+ and \w+\)"
        r"|expected input\[[\d, ]+\] to have \d+ channels, but got \d+ channels instead",
        remedy="latent or conditioning may be of another model; use the VAE and text encoders that belong to this one",
    ),
    KnownError(
        name="cuda call",
        pattern=r"Cuda failure \d* ?'[^']+'",
        cause="a call of CUDA by NCCL failed",
        remedy=f"{NO_PEERS}; if that does not help, NCCL_CUMEM_ENABLE=0",
        copies=True,
    ),
    # What says that something failed, and not what.
    KnownError(
        name="nccl says no more",
        pattern=r"unhandled (?:system|cuda) error|NCCL error in: .*internal error|ncclInternalError|ncclSystemError"
        r"|ncclUnhandledCudaError|ncclInvalidUsage",
        cause="NCCL failed and does not say why",
        remedy="set NCCL_DEBUG=WARN before ComfyUI starts and queue it again: the reason is then in the text below",
        vague=True,
        copies=True,
    ),
)
