"""The five axes of a plan as process groups. Owns torch's DeviceMesh and hands out each axis by name.

A mesh is a handle inside one set of workers: another plan makes other groups, never other processes. Ranks beyond the
plan's product are in no group and sleep.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..plan import AXES, ParallelPlan
from ..strategies.collectives import Axis, Traffic
from ..strategies.pattern import count_wrong_bytes
from ..strategies.sequence import SequenceAttention


class Mesh:
    """One plan's axes as this rank sees them. Making one is collective: every rank of the world must."""

    def __init__(self, plan: ParallelPlan, *, device: torch.device) -> None:
        self.plan = plan
        self.traffic = Traffic()
        self.member = True
        self.axes = {axis: Axis(axis, traffic=self.traffic) for axis in AXES}
        if dist.is_initialized():
            self._join(device)

    def _join(self, device: torch.device) -> None:
        gloo = dist.get_backend() == "gloo"
        # gloo's groups are the same for any device; naming them "cpu" keeps DeviceMesh from choosing a CUDA device
        kind = "cpu" if gloo else device.type
        # An axis of one needs no group, which would cost each rank three threads (gloo) or a communicator (NCCL).
        sizes = {axis: size for axis, size in zip(AXES, self.plan.degrees, strict=True) if size > 1}
        if not sizes:
            self.member = dist.get_rank() == 0
            return
        ranks = torch.arange(self.plan.ranks).reshape(tuple(sizes.values()))
        mesh = DeviceMesh(kind, ranks, mesh_dim_names=tuple(sizes))
        coordinate = mesh.get_coordinate()
        self.member = coordinate is not None
        if coordinate is None:
            return
        for (axis, size), index in zip(sizes.items(), coordinate, strict=True):
            group = mesh.get_group(axis)
            staged = gloo and device.type != "cpu"
            self.axes[axis] = Axis(axis, size, index, group, self.traffic, staged)

    def __getitem__(self, axis: str) -> Axis:
        return self.axes[axis]

    def sequence(self) -> SequenceAttention:
        """The attention of this plan over a sequence that its ring and ulysses ranks share."""
        return SequenceAttention(ring=self["ring"], ulysses=self["ulysses"])

    def wrong_bytes(self, device: torch.device) -> int:
        """Exchange a known pattern over every axis; how many bytes of what this rank received are not as sent."""
        return sum(count_wrong_bytes(axis, device) for axis in self.axes.values() if axis.size > 1)
