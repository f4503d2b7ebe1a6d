"""The engine with the rules of the pipeline's links and of freeing undone: what the simulated NCCL must find.

A rank finds this module through `python_path`.
"""

from typing import ClassVar

import torch
import torch.distributed as dist
from nccl_engine import NcclEngine

from parallel_runtime.exchange_groups import LINK
from parallel_runtime.parallel.links import Expected, Inbox, Outbox
from parallel_runtime.worker import mesh, pipeline
from parallel_runtime.worker.mesh import Groups


class OneGroup(Groups):
    """All stages' messages in one group."""

    def join(self, purpose, runs):
        if purpose != LINK:
            return super().join(purpose, runs)
        group = super().join(purpose, [tuple(range(dist.get_world_size()))])
        return group if dist.get_rank() in runs[0] else None


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
    message = Expected(0, (8,), torch.uint8, after=0)
    Inbox(previous, expected=iter([message]), may_post=lambda _: True, device=device).take()
    outbox.drain()
    return 0


class AllSendFirst(NcclEngine):
    """Where one stage of a circle receives before it sends."""

    OTHERWISE: ClassVar[dict] = {"deadline_s": 1.5}

    def __init__(self, **given):
        super().__init__(**given)
        mesh.count_wrong_bytes_of_links = all_send_first


class Ahead(Inbox):
    """Receives one message ahead of the work that it depends on."""

    def take(self):
        came = super().take()
        if not self._posted and self._next is not None and self._may_post(self._next.call):
            self._post()
        return came


class ReceivedAhead(NcclEngine):
    """Where a receive is posted when what its message depends on is queued."""

    def __init__(self, **given):
        super().__init__(**given)
        pipeline.Inbox = Ahead


class OneGroupReceivedAhead(ReceivedAhead):
    """The same, where all stages share a communicator and each direction between two stages has one of its own."""

    def __init__(self, **given):
        super().__init__(**given)
        self.groups = OneGroup()
