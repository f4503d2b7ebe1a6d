"""The engine with the rules of the pipeline's links undone: what the simulated NCCL must find.

A rank finds this module through `python_path`.
"""

import torch.distributed as dist
from nccl_engine import NcclEngine

from parallel_runtime.rank import pipeline
from parallel_runtime.rank.mesh import LINK, Groups
from parallel_runtime.strategies.links import Inbox


class OneGroup(Groups):
    """All stages' messages in one group."""

    def join(self, purpose, runs):
        if purpose != LINK:
            return super().join(purpose, runs)
        group = super().join(purpose, [tuple(range(dist.get_world_size()))])
        return group if dist.get_rank() in runs[0] else None


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
