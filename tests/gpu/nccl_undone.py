"""The engine with the rules of freeing groups and of first messages undone: what the simulated NCCL must find.

A rank finds this module through `python_path`.
"""

from typing import ClassVar

import torch
import torch.distributed as dist
from nccl_engine import NcclEngine

from parallel_runtime.parallel.links import Outbox, receive
from parallel_runtime.worker import mesh
from parallel_runtime.worker.mesh import Groups


class FreedInOtherOrders(Groups):
    """Every other rank frees groups in the order in which they were made last."""

    def free(self, groups):
        super().free(groups if dist.get_rank() % 2 else groups[::-1])


class FreesInOtherOrders(NcclEngine):
    """Where all ranks free the groups of a plan in the same order."""

    OTHERWISE: ClassVar[dict] = {"deadline_s": 1.5}

    def __init__(self, **given):
        super().__init__(**given)
        self.groups = FreedInOtherOrders()


def all_send_first(previous, following, device):
    """The pattern over the links between stages, by stages that all begin with sending."""
    outbox = Outbox(following, depth=1)
    outbox.send(torch.zeros(8, dtype=torch.uint8))
    receive(previous, (8,), torch.uint8, device=device)
    outbox.drain()
    return 0


class AllSendFirst(NcclEngine):
    """Where one stage of a circle receives before it sends."""

    OTHERWISE: ClassVar[dict] = {"deadline_s": 1.5}

    def __init__(self, **given):
        super().__init__(**given)
        mesh.count_wrong_bytes_of_links = all_send_first
