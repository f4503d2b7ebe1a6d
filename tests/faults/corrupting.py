"""The real engine on devices whose peer copies corrupt: what is exchanged between ranks arrives with one byte changed.

As on boards without sound peer access, it does so unless `NCCL_P2P_DISABLE` is set; `Always` does so even then. A rank
finds this module through `python_path`.
"""

import os
import threading

from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine


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
        return os.environ.get("NCCL_P2P_DISABLE") != "1"

    def handle(self, message, **callbacks):
        reply = super().handle(message, **callbacks)
        if self.corrupts():
            for mesh in self.meshes.values():
                mesh.axes = {name: CorruptingAxis(**vars(axis)) for name, axis in mesh.axes.items()}
        return reply


class Hanging(Engine):
    """Copies between ranks do not end while they use peer access, as on boards whose IOMMU stands between devices."""

    def hangs(self):
        return os.environ.get("NCCL_P2P_DISABLE") != "1"

    def handle(self, message, **callbacks):
        if message.op is Op.CHECK and self.hangs():
            threading.Event().wait()
        return super().handle(message, **callbacks)


class HangingAlways(Hanging):
    """They never end, whatever the environment says."""

    def hangs(self):
        return True


class Always(Corrupting):
    """Corrupts whatever the environment says."""

    def corrupts(self):
        return True
