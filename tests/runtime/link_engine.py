"""An engine that notes the messages that a stage queues, for `test_links.py`.

A rank finds this module through `python_path`.
"""

import torch.distributed as dist
from noted import note

from parallel_runtime.wire.requests import Sample
from parallel_runtime.worker.engine import Engine


class Done:
    """A message that has arrived."""

    def wait(self):
        return True


class NotingEngine(Engine):
    """The engine, which notes of a run what it issued: [what, peer, ranks of its group, its group], in order.

    The first send over a link returns when the other rank receives it, as NCCL connects the two then
    (ncclTransportP2pSetup); gloo's own returns at once.
    """

    def __init__(self, **given):
        super().__init__(**given)
        self.connected = set()

    def handle(self, message, **told):
        issued, real = [], (dist.isend, dist.irecv)

        def noting(what, run):
            def noted(tensor, peer, group):
                members = dist.get_process_group_ranks(group)
                issued.append([what, peer, members, group.group_name])
                work = run(tensor, peer, group=group)
                if what == "receive" or group.group_name in self.connected:
                    return work
                self.connected.add(group.group_name)
                work.wait()  # gloo is done with a message when it was asked for
                return Done()

            return noted

        dist.isend, dist.irecv = noting("send", dist.isend), noting("receive", dist.irecv)
        try:
            return super().handle(message, **told)
        finally:
            if isinstance(message.body, Sample):
                note(message.body.calls[0], self.rank, issued)
            dist.isend, dist.irecv = real
