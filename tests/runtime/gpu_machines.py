"""What torch and NVML answer on nineteen machines with GPUs, and what the doctor is to say there.

The answers are written after the libraries' documentation and users' public logs, not by us on such machines.
"""

from typing import Any

Answers = dict[str, Any]
CONTEXT = 400 << 20  # bytes that a process takes of an NVIDIA device
CHIPSET_NOT_SUPPORTED, GPU_NOT_SUPPORTED, NOT_SUPPORTED = 1, 2, 5  # of NVML's peer states; 0 is ok
BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable"
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
COUNTING = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? "
)
CUDA_12_4 = {
    **{"torch": "2.6.0+cu124", "cuda": "12.4", "nccl": [2, 21, 5], "driver": ("550.144.03", 12040)},
    "kernels": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
}
CUDA_12_8 = {
    **{"torch": "2.8.0+cu128", "cuda": "12.8", "nccl": [2, 27, 3], "driver": ("570.148.08", 12080)},
    "kernels": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
}
ROCM_6_2 = {
    **{"torch": "2.5.1+rocm6.2", "hip": "6.2.41133-dd7f95766", "nccl": [2, 20, 5]},
    "kernels": ["gfx900", "gfx906", "gfx908", "gfx90a", "gfx1030", "gfx1100", "gfx942"],
}
ROCM_6_3 = {
    **{"torch": "2.7.1+rocm6.3", "hip": "6.3.42131-fa1d09cbd", "nccl": [2, 21, 5]},
    "kernels": ["gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030"]
    + ["gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"],
}


def card(name: str, capability: tuple[int, int], total_bytes: int, **different: Any) -> Answers:
    """One device; `different` has what is not as usual."""
    major, minor = capability
    usual = {"free": total_bytes - CONTEXT, "error": "", "compute_mode": 0, "mig": None, "slice": False}
    return {"name": name, "major": major, "minor": minor, "total_memory": total_bytes, **usual, **different}


def rtx_4090(**different: Any) -> Answers:
    return card("NVIDIA GeForce RTX 4090", (8, 9), 25386352640, **different)


def machine(
    *devices: Answers,
    software: Answers = CUDA_12_4,
    init_error: str = "",
    peers: bool = True,
    read: int = 0,
    nvlink: int = NOT_SUPPORTED,
    mps: bool = False,
    **nvml: Any,
) -> Answers:
    """A machine with these devices; `read` and `nvlink` are NVML's peer states, `nvml` what else it says otherwise."""
    answers = {"cuda": None, "hip": None, **software, "init_error": init_error, "peers": peers, "mps": mps}
    if answers["hip"]:
        says: Answers = {"error": "NVML Shared Library Not Found"}
    else:
        driver, speaks = answers.pop("driver")
        says = {"error": "", "driver": driver, "cuda_driver": speaks, "count": len(devices)}
    return {**answers, "devices": devices, "nvml": {**says, "p2p_read": read, "p2p_nvlink": nvlink, **nvml}}


RTX_3090 = card("NVIDIA GeForce RTX 3090", (8, 6), 25294995456)
RTX_5090 = card("NVIDIA GeForce RTX 5090", (12, 0), 33668988928)
H100 = card("NVIDIA H100 80GB HBM3", (9, 0), 85028765696, mig=[0, 0])
T4 = card("Tesla T4", (7, 5), 15655829504)
SLICE = card("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 42297786368, slice=True)
MI210 = card("AMD Instinct MI210", (9, 0), 68702699520, arch="gfx90a:sramecc+:xnack-")
RX_6600 = card("AMD Radeon RX 6600", (10, 3), 8573157376, arch="gfx1032")
RX_7900 = card("Radeon RX 7900 XTX", (11, 0), 25753026560, arch="gfx1100")
RX_7700 = card("Radeon RX 7700 XT", (11, 0), 12868124672, arch="gfx1101")
APART: Answers = {"peers": False, "read": CHIPSET_NOT_SUPPORTED}
EXCLUSIVE = rtx_4090(compute_mode=3)
OVER_NVLINK = {"peer access": ("every device reaches every other, over NVLink",)}

# By name: the machine; the checks without which nothing runs, that fail; and what is said of checks by name.
MACHINES: dict[str, tuple[Answers, set[str], dict[str, tuple[str, ...]]]] = {
    "2x RTX 4090 without peer access": (
        machine(rtx_4090(), rtx_4090(), **APART),
        set(),
        {
            "peer access": ("none between 0-1 (the chipset does not support it)", "host's memory"),
            "capability": ("cuda:1 NVIDIA GeForce RTX 4090 8.9",),
            "nccl": ("NCCL 2.21.5",),
        },
    ),
    "2x RTX 3090 with an NVLink bridge": (machine(RTX_3090, RTX_3090, nvlink=0), set(), OVER_NVLINK),
    "8x H100 with NVSwitch": (machine(*[H100] * 8, software=CUDA_12_8, nvlink=0), set(), OVER_NVLINK),
    "1x T4": (machine(T4), set(), {"capability": ("cuda:0 Tesla T4 7.5", "no bfloat16 in hardware")}),
    "a MIG slice of an A100": (machine(SLICE), set(), {"mig": ("cuda:0 is a slice of a GPU (MIG)", "one rank works")}),
    "2x RTX 4090 in exclusive process mode": (
        machine(EXCLUSIVE, EXCLUSIVE, **APART),
        {"compute mode"},
        {"compute mode": ("nvidia-smi -c 0",)},
    ),
    "2x RTX 4090 in exclusive process mode under MPS": (
        machine(EXCLUSIVE, EXCLUSIVE, **APART, mps=True),
        set(),
        {"mps": ("may end the others",)},
    ),
    "1x RTX 4090, prohibited": (
        machine(rtx_4090(compute_mode=2, error=BUSY)),
        {"compute mode", "devices answer"},
        {"devices answer": ("busy or unavailable",)},
    ),
    "2x RTX 3090 with a driver of CUDA 11.4": (
        machine(RTX_3090, RTX_3090, init_error=TOO_OLD, driver="470.256.02", cuda_driver=11040),
        {"cuda"},
        {"cuda": ("older than this torch needs", "the driver sees 2")},
    ),
    "1x RTX 3090 with a driver of CUDA 12.2": (
        machine(RTX_3090, driver="535.183.01", cuda_driver=12020),
        set(),
        {"driver": ("driver 535.183.01 speaks CUDA 12.2, torch is built for 12.4",)},
    ),
    "1x T4 with torch for CUDA 13": (
        machine(T4, software=CUDA_12_4 | {"cuda": "13.0"}),
        {"driver"},
        {"driver": ("580.65.06 or newer",)},
    ),
    "1x RTX 5090 with torch for CUDA 12.4": (
        machine(RTX_5090, driver="570.124.04", cuda_driver=12080),
        {"kernels"},
        {"kernels": ("torch has none for cuda:0 (12.0)",)},
    ),
    "8x H100 without the fabric manager": (
        machine(software=CUDA_12_8, init_error=f"{COUNTING}Error 802: system not yet initialized", count=8),
        {"cuda"},
        {"cuda": ("nvidia-fabricmanager",)},
    ),
    "a driver updated without a restart": (
        machine(
            init_error=f"{COUNTING}Error 803: system has unsupported display driver / cuda driver combination",
            error="Driver/library version mismatch",
        ),
        {"cuda"},
        {"cuda": ("restart the machine",)},
    ),
    "RTX 4090 and T4": (
        machine(rtx_4090(), T4, peers=False, read=GPU_NOT_SUPPORTED),
        set(),
        {"capability": ("the slowest sets the pace",)},
    ),
    "4x MI210 with ROCm 6.2": (
        machine(*[MI210] * 4, software=ROCM_6_2),
        set(),
        {
            "cuda": ("torch 2.5.1+rocm6.2 sees 4 device(s)",),
            "nccl": ("RCCL 2.20.5",),
            "rocm": ("torch is built for ROCm (HIP 6.2.41133-dd7f95766)", "nobody has run this pack on AMD GPUs yet"),
            "capability": ("cuda:3 AMD Instinct MI210 gfx90a",),
            "peer access": ("every device reaches every other",),
        },
    ),
    "1x RX 6600 with torch for ROCm 6.3": (
        machine(RX_6600, software=ROCM_6_3),
        {"kernels"},
        {"kernels": ("torch has none for cuda:0 (gfx1032); it has gfx900 ", "HSA_OVERRIDE_GFX_VERSION=10.3.0")},
    ),
    "an AMD GPU that the user may not open": (
        machine(software=ROCM_6_3, init_error="No HIP GPUs are available"),
        {"cuda"},
        {"cuda": ("groups render and video",)},
    ),
    "RX 7900 XTX and RX 7700 XT without peer access": (
        machine(RX_7900, RX_7700, software=ROCM_6_3, **APART),
        set(),
        {"capability": ("the slowest sets the pace",), "peer access": ("none between 0-1", "host's memory")},
    ),
}
