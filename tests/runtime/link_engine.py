"""An engine that notes the order in which a stage queues its messages and its chunks, for `test_links.py`.

A rank finds this module through `python_path`.
"""

import torch.distributed as dist
from noted import note

from parallel_runtime.wire.requests import Sample
from parallel_runtime.worker.engine import Engine
from parallel_runtime.worker.host_copies import HostCopies
from parallel_runtime.worker.in_worker_sampling import Gate
from parallel_runtime.worker.stage import Stage


class Done:
    """A message that has arrived."""

    def wait(self):
        return True


class NotingEngine(Engine):
    """The engine, which notes of a run what it issued: [what, peer, ranks of its group, its group], in order.

    Leave to start a step comes as late as it can: when a rank waits for it. The first send over a link returns when
    the other rank receives it, as NCCL connects the two then (ncclTransportP2pSetup); gloo's own returns at once.
    """

    def __init__(self, **given):
        super().__init__(**given)
        self.connected = set()

    def handle(self, message, **told):
        issued, asked = [], set()
        real = (dist.isend, dist.irecv, Stage.run_blocks, HostCopies.start, Gate.wait, Gate.open)

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

        def run_blocks(stage, *arguments, **options):
            issued.append(["chunk"])
            return real[2](stage, *arguments, **options)

        def start(copies, *arguments):
            issued.append(["preview"])
            return real[3](copies, *arguments)

        def wait(gate, step, **told):
            issued.append(["step"])
            asked.add(step)
            return real[4](gate, step, **told)

        dist.isend, dist.irecv = noting("send", dist.isend), noting("receive", dist.irecv)
        Stage.run_blocks, HostCopies.start, Gate.wait = run_blocks, start, wait
        Gate.open = lambda gate, step: step in asked and real[5](gate, step)
        try:
            return super().handle(message, **told)
        finally:
            if isinstance(message.body, Sample):
                note(message.body.calls[0], self.rank, issued)
            dist.isend, dist.irecv, Stage.run_blocks, HostCopies.start, Gate.wait, Gate.open = real
