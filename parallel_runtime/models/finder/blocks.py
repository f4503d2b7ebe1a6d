"""The lists of blocks that attend, in the order in which they run.

A list is a container whose modules are called one by one and attend inside. Lists in the blocks of another list belong
to that block. Does not own what blocks take (probe.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from .record import ModuleCall

LEAST = 0.5  # of the most queries of any attention call: a list with fewer tokens costs little, every rank computes it
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class NotFoundError(ValueError):
    """No plan can be found; the text says why and names the module."""


@dataclass
class BlockList:
    """One list, and the calls of its blocks in one call of the model."""

    path: str
    calls: list[ModuleCall] = field(default_factory=list)
    large: bool = True  # whether ranks gain from sharing it

    @property
    def queries(self) -> int:
        """The most of an attention call inside."""
        return max(attended.q.shape[2] for call in self.calls for attended in call.attended)

    @property
    def paths(self) -> list[str]:
        """Of the blocks, in the order in which they ran."""
        return list(dict.fromkeys(call.path for call in self.calls))


def find_lists(model: nn.Module, calls: Sequence[ModuleCall]) -> list[BlockList]:
    """All lists whose blocks attend. Raises NotFoundError where most tokens attend in none."""
    kinds = {path: module for path, module in model.named_modules() if isinstance(module, CONTAINERS)}
    attending = [call for call in calls if call.attended]
    if not attending:
        raise NotFoundError(f"{type(model).__name__} calls no attention function of ComfyUI's in this call")
    found: dict[str, BlockList] = {}
    for call in attending:
        parent = call.path.rpartition(".")[0]
        inside = any(outer.rpartition(".")[0] in found for outer in call.within if outer)
        if parent in kinds and not inside and call.path:
            found.setdefault(parent, BlockList(parent)).calls.append(call)
    most = max(attended.q.shape[2] for call in attending for attended in call.attended)
    if not any(each.queries == most for each in found.values()):
        where = next(a.path for call in attending for a in call.attended if a.q.shape[2] == most)
        raise NotFoundError(f"{where} attends to most tokens, and is in no list of blocks")
    for each in found.values():
        each.large = each.queries >= LEAST * most
    return list(found.values())


def each_call_of(blocks: Sequence[BlockList], calls: Sequence[ModuleCall]) -> str:
    """The module that a model calls several times in one call, each time with its blocks; "" for the model itself."""
    main = max(blocks, key=lambda each: each.queries)
    times = max(call.number for call in main.calls) + 1
    if times == 1:
        return ""
    first = main.calls[0]
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.path] = call.number + 1
    outer = [path for path in first.within if path and counts[path] == times]
    return outer[0] if outer else ""
