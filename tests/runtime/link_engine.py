"""An engine that notes the order in which a stage queues its messages and its chunks, for `test_links.py`.

A rank finds this module through `python_path`.
"""

import torch.distributed as dist

from parallel_runtime.rank.engine import Engine
from parallel_runtime.rank.host_copies import HostCopies
from parallel_runtime.rank.stage import Stage


class NotingEngine(Engine):
    """The engine, whose report of a run has `issued`: [what, peer, ranks of its group, its group], in order."""

    def handle(self, message, **told):
        issued, real = [], (dist.isend, dist.irecv, Stage.through, HostCopies.start)

        def noting(what, run):
            def noted(tensor, peer, group):
                members = dist.get_process_group_ranks(group)
                issued.append([what, peer, members, group.group_name])
                return run(tensor, peer, group=group)

            return noted

        def through(stage, *arguments, **options):
            issued.append(["chunk"])
            return real[2](stage, *arguments, **options)

        def start(copies, *arguments):
            issued.append(["preview"])
            return real[3](copies, *arguments)

        dist.isend, dist.irecv = noting("send", dist.isend), noting("receive", dist.irecv)
        Stage.through, HostCopies.start = through, start
        try:
            return super().handle(message, **told) | {"issued": issued}
        finally:
            dist.isend, dist.irecv, Stage.through, HostCopies.start = real
