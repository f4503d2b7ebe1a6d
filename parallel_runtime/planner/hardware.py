"""What a device, a link and a way of running kernels can do: the constants of the cost model.

Owns the table of known devices and links. Spec-sheet figures are the vendors' (dense, no sparsity); the fractions of
them that are reached come from the rows named in benchmarks/planner.md, or from a calibration on the machine itself.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Rates:
    """One device. `asynchronous` devices run kernels while the host prepares the next ones.

    Rates are in operations and bytes a second; `memory_bytes` is what a rank may use, `host_bandwidth` its way to host
    memory.
    """

    name: str
    matmul_flops: float
    attention_flops: float
    memory_bandwidth: float
    memory_bytes: int
    host_bandwidth: float = 20e9
    asynchronous: bool = True


@dataclass(frozen=True, kw_only=True)
class Link:
    """How ranks reach each other. `bandwidth` is of one rank, one way; `latency_s` of one collective call.

    An all-to-all of n ranks reaches bandwidth * (2 / n) ** contention: 0 where a switch serves all pairs at once
    (NVLink), above where they share a host bridge.
    """

    name: str
    bandwidth: float
    latency_s: float
    contention: float = 0.0

    def all_to_all_bandwidth(self, ranks: int) -> float:
        """Bytes a second that one rank sends in an all-to-all of `ranks`."""
        return self.bandwidth * min(1.0, (2 / max(ranks, 1)) ** self.contention)


@dataclass(frozen=True, kw_only=True)
class Software:
    """How a block runs. Host seconds: `block_s` to start one block, `exchange_s` more where its sequence is shared out,
    `hop_s` more for each hop of the ring.

    `passes` is how often one activation (tokens x width) crosses memory in a block besides the matrices and the
    attention, `merge_passes` the same of one fp32 output at each hop. `swap_calls` is how many all-to-alls a block of
    ulysses takes, `ring_overlap` the share of the attention behind which a hop hides.
    """

    name: str
    passes: float
    merge_passes: float
    block_s: float
    exchange_s: float
    hop_s: float
    swap_calls: int = 2
    ring_overlap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All constants of one set of devices. `source` says where they come from."""

    rates: Rates
    link: Link
    software: Software
    source: str
    node_ranks: int = 8
    network: Link | None = None

    def link_over(self, ranks: int) -> Link:
        """The slowest link of a group that spans `ranks` neighbouring ranks."""
        return self.network if self.network is not None and ranks > self.node_ranks else self.link


# name: dense bf16 TFLOP/s, memory GB/s, memory GiB (spec sheets); fractions reached by matrices and by attention.
# Fractions of devices without rows in benchmarks/planner.md are those of the nearest relative that has some.
_DEVICES = {
    "H200": (989.0, 4800.0, 141, 0.59, 0.31),
    "H100": (989.0, 3350.0, 80, 0.59, 0.31),
    "H20": (148.0, 4000.0, 96, 0.90, 0.60),
    "A100": (312.0, 2039.0, 80, 0.60, 0.70),
    "L40S": (362.0, 864.0, 48, 0.60, 0.55),
    "L40": (181.0, 864.0, 48, 1.00, 0.74),
    "L20": (119.5, 864.0, 48, 1.00, 0.89),
    "RTX 4090": (165.0, 1008.0, 24, 0.85, 0.85),
    "RTX 3090": (71.0, 936.0, 24, 0.85, 0.85),
    "RTX 2000 Ada": (48.0, 224.0, 16, 0.99, 0.80),
}
# NVLink: 60 % of the bandwidth one way. PCIe 4.0 machines differ widely (benchmarks/planner.md): this is their middle.
_LINKS = {
    "nvlink4": Link(name="nvlink4", bandwidth=270e9, latency_s=25e-6),
    "nvlink3": Link(name="nvlink3", bandwidth=180e9, latency_s=25e-6),
    "pcie4": Link(name="pcie4", bandwidth=23e9, latency_s=40e-6, contention=0.8),
    "pcie3": Link(name="pcie3", bandwidth=11e9, latency_s=40e-6, contention=0.8),
    "infiniband": Link(name="infiniband", bandwidth=40e9, latency_s=50e-6),
    "ethernet": Link(name="ethernet", bandwidth=10e9, latency_s=100e-6),
    "memory": Link(name="memory", bandwidth=2e9, latency_s=0.21e-3),
}
_USUAL_LINKS = {"H200": "nvlink4", "H100": "nvlink4", "H20": "nvlink4", "A100": "nvlink3", "RTX 3090": "pcie3"}
EAGER = Software(name="eager", passes=94.0, merge_passes=12.0, block_s=1.01e-03, exchange_s=1.55e-03, hop_s=1.94e-04)
COMPILED = Software(name="compiled", passes=22.0, merge_passes=8.0, block_s=0.5e-3, exchange_s=0.2e-3, hop_s=0.1e-3)
ON_CPU = Software(name="cpu", passes=30.0, merge_passes=4.0, block_s=2.30e-04, exchange_s=1.06e-03, hop_s=0.1e-3)
CPU_THREAD = Rates(
    name="cpu",
    matmul_flops=90e9,
    attention_flops=80e9,
    memory_bandwidth=10e9,
    memory_bytes=8 * GIB,
    asynchronous=False,
)


def known_rates(name: str, *, reached: bool = True) -> Rates:
    """A device by its name; the longest known name inside `name` is meant. Raises `ValueError` when none is.

    `reached`: the rates that are reached, otherwise those of the spec sheet.
    """
    matching = [known for known in _DEVICES if known.lower() in name.lower()]
    if not matching:
        raise ValueError(f"device {name!r} is unknown; use one of {', '.join(_DEVICES)}, or calibrate with doctor")
    found = max(matching, key=len)
    tflops, bandwidth, memory, matmul, attention = _DEVICES[found]
    matmul, attention = (matmul, attention) if reached else (1.0, 1.0)
    return Rates(
        name=found,
        matmul_flops=tflops * 1e12 * matmul,
        attention_flops=tflops * 1e12 * attention,
        memory_bandwidth=bandwidth * 1e9,
        memory_bytes=memory * GIB,
    )


def known_link(name: str) -> Link:
    """A link by its name. Raises `ValueError` with the names there are."""
    if name not in _LINKS:
        raise ValueError(f"link {name!r} is unknown; use one of {', '.join(_LINKS)}")
    return _LINKS[name]


def known_calibration(device: str, link: str | None = None, *, compiled: bool = False) -> Calibration:
    """Constants from the table, with the link such devices usually have. `cpu` is one thread of a CPU a rank."""
    if device == "cpu":
        return Calibration(
            rates=CPU_THREAD,
            link=known_link(link or "memory"),
            software=ON_CPU,
            source="a table (one CPU thread a rank)",
        )
    rates = known_rates(device)
    link = link or _USUAL_LINKS.get(rates.name, "pcie4")
    software = COMPILED if compiled else EAGER
    source = f"a table of known devices ({rates.name}, {link}, {software.name}), not measured here"
    return Calibration(rates=rates, link=known_link(link), software=software, source=source)
