"""The real engine over gloo. A rank finds this module through `python_path`.

A note says how many ranks each of the `groups` has that the rank is in, and how many `threads` the rank has.
"""

import os

import torch.distributed as dist
from noted import note

from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine


class CountingEngine(Engine):
    """As the real one."""

    def handle(self, message, **told):
        reply = super().handle(message, **told)
        groups = [group.size() for group in dist.distributed_c10d._world.pg_map]
        if message.op is Op.STEP:
            found = {"groups": groups, "threads": len(os.listdir("/proc/self/task"))}
            note(message.body.calls[0], self.rank, found)
        return reply
