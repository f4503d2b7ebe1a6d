"""The real engine on devices whose peer copies are broken: what is exchanged between ranks arrives with one byte
changed, or never, or CUDA fails at it.

As on boards without sound peer access, that is so unless `NCCL_P2P_DISABLE` is set; where a name says `Always`, even
then. A rank finds this module through `python_path`.
"""

import os
import signal
import threading

import torch

from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine

# As users said who have GPUs whose driver tells of peer access that they do not have.
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


def uses_peers():
    return os.environ.get("NCCL_P2P_DISABLE") != "1"


class CorruptingAxis(Axis):
    """Changes one byte of what rank 1 receives."""

    def all_to_all(self, send, *, send_lengths, receive_lengths):
        received = super().all_to_all(send, send_lengths=send_lengths, receive_lengths=receive_lengths)
        if self.index == 1:
            received.view(-1)[0] ^= 1
        return received


class Corrupting(Engine):
    """Corrupts while ranks use peer access."""

    def corrupts(self):
        return uses_peers()

    def handle(self, request, specs, **callbacks):
        reply = super().handle(request, specs, **callbacks)
        if self.corrupts():
            for mesh in self.meshes.values():
                mesh.axes = {name: CorruptingAxis(**vars(axis)) for name, axis in mesh.axes.items()}
        return reply


class Hanging(Engine):
    """Copies between ranks do not end while they use peer access, as on boards whose IOMMU stands between devices."""

    def hangs(self):
        return uses_peers()

    def handle(self, request, specs, **callbacks):
        if request.op is Op.CHECK and self.hangs():
            threading.Event().wait()
        return super().handle(request, specs, **callbacks)


class HangingAlways(Hanging):
    """They never end, whatever the environment says."""

    def hangs(self):
        return True


class HangingLaterAlways(Engine):
    """What goes round the ring does not end, after an exchange that does."""

    def handle(self, request, specs, **callbacks):
        if request.op is Op.CHECK:
            Axis.start_shift = lambda *_: threading.Event().wait()
        return super().handle(request, specs, **callbacks)


class Raising(Engine):
    """CUDA fails at copies between ranks."""

    def fails(self):
        return uses_peers()

    def handle(self, request, specs, **callbacks):
        if request.op is Op.CHECK and self.fails():
            raise RuntimeError(ILLEGAL)
        return super().handle(request, specs, **callbacks)


class RaisingAlways(Raising):
    """It does, whatever the environment says."""

    def fails(self):
        return True


class RaisingAtStart(Engine):
    """As an NCCL that connects all ranks when their first group is made."""

    def __init__(self, **given):
        if uses_peers():
            raise RuntimeError(ILLEGAL)
        super().__init__(**given)


class RaisingAtStartAlways(Engine):
    """It does, whatever the environment says."""

    def __init__(self, **_):
        raise RuntimeError(ILLEGAL)


class Full(Engine):
    """There is no memory for the copies."""

    def handle(self, request, specs, **callbacks):
        if request.op is Op.CHECK:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return super().handle(request, specs, **callbacks)


class Killed(Engine):
    """Somebody kills a rank meanwhile."""

    def handle(self, request, specs, **callbacks):
        if request.op is Op.CHECK and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().handle(request, specs, **callbacks)


class Always(Corrupting):
    """Corrupts whatever the environment says."""

    def corrupts(self):
        return True
