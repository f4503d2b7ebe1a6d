"""What was chosen for GPUs of a compute capability: choices.json, a table that figures write and code reads.

Owns reading and writing the table. Each choice is made by an experiment of `make gpu` (docs/gpu.md), or by figures of
others where `source` says so. Code that acts on a choice asks what torch has, and goes without where it lacks.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("choices.json")
USUAL = "usual"
KERNELS = ("cudnn", "flash", "efficient")


@dataclass(frozen=True, kw_only=True)
class CardChoice:
    """What was chosen for GPUs of one compute capability.

    `sdpa_first`: the kernel that torch's attention is to try first, "" for ComfyUI's own order. `ring_kernel`: what
    attends at each hop of a ring. `most_chunks`: into how many runs of heads an exchange is cut at most, 0 where no
    figure limits it. `head_start_cycles`: for so many clock cycles a device waits before the attention that is to hide
    an exchange, so that the exchange has its places first. `timed_every`: with timers on, one step in so many has
    events.
    """

    sdpa_first: str
    ring_kernel: str
    most_chunks: int
    head_start_cycles: int
    timed_every: int
    source: str

    def __post_init__(self) -> None:
        """Raises `ValueError` for what no code could act on."""
        if self.sdpa_first not in ("", *KERNELS) or self.ring_kernel not in KERNELS:
            raise ValueError(
                f"choices.json: sdpa_first={self.sdpa_first!r}, ring_kernel={self.ring_kernel!r}; "
                f"use one of {', '.join(KERNELS)}"
            )
        if self.most_chunks < 0 or self.head_start_cycles < 0 or self.timed_every < 1:
            raise ValueError(
                f"choices.json: most_chunks={self.most_chunks}, head_start_cycles={self.head_start_cycles}, "
                f"timed_every={self.timed_every}; use at least 0, 0 and 1"
            )


def card_choice(device: torch.device) -> CardChoice:
    """What was chosen for a device."""
    return choice_for(capability_of(device))


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA device. None for a CPU, and for AMD's, whose numbers name other cards."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else None


@lru_cache(maxsize=64)
def choice_for(capability: tuple[int, int] | None) -> CardChoice:
    """That of a device's compute capability; the usual one for a CPU (None) and for what is not measured."""
    return read(json.loads(TABLE.read_text(encoding="utf-8")), capability)


def read(table: Mapping[str, Mapping[str, Any]], capability: tuple[int, int] | None) -> CardChoice:
    """A row of a table as choices.json has it. Raises `ValueError` for a name that `CardChoice` has not."""
    own = {} if capability is None else table.get(_name(capability), {})
    unknown = sorted({*own, *table[USUAL]} - {field.name for field in fields(CardChoice)})
    if unknown:
        raise ValueError(f"choices.json names {unknown[0]!r}, which is no choice; use the fields of CardChoice")
    return CardChoice(**{**table[USUAL], **own})


def with_choice(
    table: Mapping[str, Mapping[str, Any]],
    capability: tuple[int, int],
    **chosen: Any,  # noqa: ANN401
) -> Mapping[str, Mapping[str, Any]]:
    """The table with these choices for a capability; what it has of the usual row stays out of its own."""
    own = {**table.get(_name(capability), {}), **chosen}
    changed = {**table, _name(capability): own}
    usual, now = table[USUAL], asdict(read(changed, capability))
    return {**changed, _name(capability): {name: now[name] for name in own if now[name] != usual[name]}}


def _name(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
