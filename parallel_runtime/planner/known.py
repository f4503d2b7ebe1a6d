"""The table of known devices and links: the constants of a machine that is not calibrated.

Owns the figures, which device a name means, and which link a machine of such devices usually has. Spec-sheet figures
are the vendors' (dense, no sparsity). What is reached of them and PCIe links were fitted to published runs of other
engines (benchmarks/planner.md); `doctor --calibrate` measures ours. Of a device that this
project has measured, measured.json has what stands in their place.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .hardware import GIB, Calibration, Interconnect, Rates, Software


@dataclass(frozen=True)
class KnownDevice:
    """Dense bf16 TFLOP/s, memory in GB/s and GiB by the spec sheet; the fractions that matrices and attention reach."""

    tflops: float
    bandwidth_gbs: float
    memory_gib: int
    matmul: float
    attention: float
    link: str = "pcie4"


# A name is a set of words. B200, H200, H100, H20 and A100 without more are boards on NVLink: drivers report a B200, an
# H200 and an H20 so, and name the form of the others ("H100 80GB HBM3", "A100-SXM4-80GB"). The cards of the same names
# are on PCIe, NVL too: a bridge between two is a part of its own, which the name does not tell. PCIe 5.0 counts as
# 4.0, for there are no rows of it. Fractions of devices without rows in benchmarks/planner.md are those of the nearest
# relative.
DEVICES = {
    "B200": KnownDevice(2250.0, 8000.0, 180, 0.59, 0.31, "nvlink5"),
    "H200": KnownDevice(989.0, 4800.0, 141, 0.59, 0.31, "nvlink4"),
    "H200 NVL": KnownDevice(835.0, 4800.0, 141, 0.59, 0.31),
    "H100": KnownDevice(989.0, 3350.0, 80, 0.59, 0.31, "nvlink4"),
    "H100 NVL": KnownDevice(835.0, 3900.0, 94, 0.59, 0.31),
    "H100 PCIe": KnownDevice(756.0, 2000.0, 80, 0.59, 0.31),
    "H20": KnownDevice(148.0, 4000.0, 96, 0.90, 0.60, "nvlink4"),
    "A100": KnownDevice(312.0, 2039.0, 80, 0.61, 0.70, "nvlink3"),
    "A100 40GB": KnownDevice(312.0, 1555.0, 40, 0.61, 0.70, "nvlink3"),
    "A100 PCIe": KnownDevice(312.0, 1935.0, 80, 0.61, 0.70),
    "A100 PCIe 40GB": KnownDevice(312.0, 1555.0, 40, 0.61, 0.70),
    "L40S": KnownDevice(362.0, 864.0, 48, 0.60, 0.55),
    "L40": KnownDevice(181.0, 864.0, 48, 1.00, 0.74),
    "L20": KnownDevice(119.5, 864.0, 48, 1.00, 0.89),
    "L4": KnownDevice(121.0, 300.0, 24, 0.60, 0.55),
    "A40": KnownDevice(149.7, 696.0, 48, 0.61, 0.70),
    "A10G": KnownDevice(70.0, 600.0, 24, 0.85, 0.85),
    "RTX 4090": KnownDevice(165.0, 1008.0, 24, 0.85, 0.85),
    # These have no peer access, or eight lanes: copies cross host memory, for which half of PCIe 4.0 is a guess. The
    # 4090 has what its published rows were fitted to.
    "RTX 3090": KnownDevice(71.0, 936.0, 24, 0.85, 0.85, "pcie3"),
    "RTX 5090": KnownDevice(209.5, 1792.0, 32, 0.85, 0.85, "pcie3"),
    "RTX 5080": KnownDevice(112.6, 960.0, 16, 0.85, 0.85, "pcie3"),
    "RTX 5070 Ti": KnownDevice(87.9, 896.0, 16, 0.85, 0.85, "pcie3"),
    "RTX 4080": KnownDevice(97.5, 717.0, 16, 0.85, 0.85, "pcie3"),
    "RTX 4080 SUPER": KnownDevice(104.4, 736.0, 16, 0.85, 0.85, "pcie3"),
    "RTX 4070 Ti SUPER": KnownDevice(88.2, 672.0, 16, 0.85, 0.85, "pcie3"),
    "RTX 4060 Ti": KnownDevice(44.1, 288.0, 16, 0.85, 0.85, "pcie3"),
    "RTX 3080": KnownDevice(59.5, 760.0, 10, 0.85, 0.85, "pcie3"),
    "RTX 3060": KnownDevice(25.5, 360.0, 12, 0.85, 0.85, "pcie3"),
    "RTX A6000": KnownDevice(154.8, 768.0, 48, 0.61, 0.70),
    "RTX 6000 Ada": KnownDevice(364.2, 960.0, 48, 0.60, 0.55),
    "RTX PRO 6000 Blackwell Workstation Edition": KnownDevice(503.8, 1792.0, 96, 0.60, 0.55),
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": KnownDevice(438.9, 1792.0, 96, 0.60, 0.55),
    # Four times the 120 TFLOP/s that its data sheet has for fp32, as the two others have it.
    "RTX PRO 6000 Blackwell Server Edition": KnownDevice(480.0, 1597.0, 96, 0.60, 0.55),
    "RTX 2000 Ada": KnownDevice(48.0, 224.0, 16, 1.00, 0.80, "pcie3"),  # eight lanes of PCIe 4.0
}
# Words of a driver's names that change nothing. Any other makes it another device: Laptop, MIG, D, Ti, SUPER, a
# vGPU's 40C, and a size of memory that is not the table's.
_PLAIN_WORDS = re.compile(r"nvidia|geforce|generation|gpu|sxm\d?|hbm\d?e?")

# NVLink: 60 % of the bandwidth one way; a bridge between two cards of GA102 has 56.25 GB/s (NVIDIA's data sheets of the
# RTX A6000 and the A40: 112.5 GB/s both ways). PCIe 4.0 was fitted to the fitted rows of all its machines at once:
# those of up to four devices, and those of more, where pairs seem to share the way between host bridges. PCIe 3.0 is
# half of it.
SHARED_ABOVE = 4
_LINKS = {
    "nvlink5": Interconnect(name="nvlink5", bandwidth=540e9, latency_s=25e-6),
    "nvlink4": Interconnect(name="nvlink4", bandwidth=270e9, latency_s=25e-6),
    "nvlink3": Interconnect(name="nvlink3", bandwidth=180e9, latency_s=25e-6),
    "nvlink-bridge": Interconnect(name="nvlink-bridge", bandwidth=34e9, latency_s=25e-6),
    "pcie4": Interconnect(name="pcie4", bandwidth=31.5e9, latency_s=40e-6, contention=0.323),
    "pcie4-shared": Interconnect(name="pcie4-shared", bandwidth=23.3e9, latency_s=40e-6, contention=2.42),
    "pcie3": Interconnect(name="pcie3", bandwidth=15.75e9, latency_s=40e-6, contention=0.323),
    "pcie3-shared": Interconnect(name="pcie3-shared", bandwidth=11.65e9, latency_s=40e-6, contention=2.42),
    "memory": Interconnect(name="memory", bandwidth=2e9, latency_s=0.21e-3),
    # between machines: what TCP leaves of the line, and what a message of a library takes on it
    "ethernet1": Interconnect(name="ethernet1", bandwidth=0.115e9, latency_s=0.2e-3),
    "ethernet10": Interconnect(name="ethernet10", bandwidth=1.1e9, latency_s=0.1e-3),
}
BRIDGES = dict.fromkeys(("RTX 3090", "RTX A6000", "A40"), "nvlink-bridge")  # which a card may have, to one other
# What merges parts was fitted to other engines' rows, which tell nothing of ranks on a CPU.
EAGER = Software(name="eager", merge_passes=17.5)
ON_CPU = Software(name="cpu", merge_passes=4.0)
MEASURED = Path(__file__).with_name("measured.json")
# What a measured device may have there: of its rates, which `make gpu` writes, and of the host that starts its
# operations one by one, which a person writes: it differs between machines with the same device.
OF_RATES = ("matmul_flops", "attention_flops", "memory_bandwidth")
OF_SOFTWARE = ("operation_s",)
CPU_THREAD = Rates(
    name="cpu",
    matmul_flops=159e9,
    attention_flops=159e9,
    memory_bandwidth=10e9,
    memory_bytes=8 * GIB,
    asynchronous=False,
)


def known_rates(name: str) -> Rates:
    """A device by its name, a driver's or the table's own. Raises `ValueError` when it means no device of the table."""
    found = _device_named(name)
    device = DEVICES[found]
    return Rates(
        name=found,
        matmul_flops=device.tflops * 1e12 * device.matmul,
        attention_flops=device.tflops * 1e12 * device.attention,
        memory_bandwidth=device.bandwidth_gbs * 1e9,
        memory_bytes=device.memory_gib * GIB,
    )


def known_link(name: str) -> Interconnect:
    """A link by its name. Raises `ValueError` with the names there are."""
    if name not in _LINKS:
        raise ValueError(f"link {name!r} is unknown; use one of {', '.join(_LINKS)}")
    return _LINKS[name]


def usual_link(name: str, devices: int) -> Interconnect:
    """The link that a machine with so many of these devices usually has. Raises `ValueError` for an unknown device."""
    link = DEVICES[_device_named(name)].link
    shared = link.startswith("pcie") and devices > SHARED_ABOVE
    return known_link(f"{link}-shared" if shared else link)


def known_calibration(device: str, link: str | None = None, *, devices: int = 2, measured: bool = True) -> Calibration:
    """Constants from the table, with the link that a machine with so many such devices usually has.

    `cpu` is one thread of a CPU a rank. `measured`: of a device that this project has measured, its own constants in
    the place of those that were fitted to other engines. Raises `ValueError` for a device or a link that is not in the
    table.
    """
    if device.lower() == "cpu":
        return Calibration(
            rates=CPU_THREAD,
            link=known_link(link or "memory"),
            software=ON_CPU,
            source="a table (one CPU thread a rank)",
        )
    rates = known_rates(device)
    reaching = known_link(link) if link else usual_link(device, devices)
    source = f"a table of known devices ({rates.name}, {reaching.name}, {EAGER.name}), not measured here"
    own = _measured().get(rates.name, {}) if measured else {}
    rates = replace(rates, **{name: own[name] for name in OF_RATES if name in own})
    software = replace(EAGER, **{name: own[name] for name in OF_SOFTWARE if name in own})
    return Calibration(rates=rates, link=reaching, software=software, source=source)


@lru_cache(maxsize=1)
def _measured() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def table_name(name: str) -> str:
    """The table's name of a device that a driver names; the driver's own where the table has none."""
    try:
        return _device_named(name)
    except ValueError:
        return name


def _device_named(name: str) -> str:
    """The table's name of a device: all words of that are in `name`, the most of them, and the rest are plain words."""
    words = _words(name)
    matching = [known for known in DEVICES if _words(known) <= words]
    found = max(matching, key=lambda known: len(_words(known)), default=None)
    if found is not None:
        size = f"{DEVICES[found].memory_gib}gb"
        if all(word == size or _PLAIN_WORDS.fullmatch(word) for word in words - _words(found)):
            return found
    raise ValueError(f"device {name!r} is unknown; use one of {', '.join(DEVICES)}, or calibrate with doctor")


def _words(name: str) -> set[str]:
    return set(re.findall(r"rtx(?=\d)|[a-z0-9]+", name.lower()))
