"""The real engine on a process group with NCCL's rules. A rank finds this module through `python_path`.

A note says how many ranks each of the `groups` has that the rank is in.

A call's option `nccl` says how its request is run: the fields of `Settings`, and `launches_wait`.
"""

from contextlib import nullcontext
from typing import ClassVar

import torch
from nccl_rules import Settings, Simulation, join_world
from noted import note
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine


class LaunchesWait(TorchDispatchMode):
    """Every kernel's launch waits until all that is in flight has moved.

    With lazy module loading, the default since CUDA 12.2, the first launch of a kernel may do so (CUDA C++ Programming
    Guide, "Lazy Loading: Potential Hazards"). Kernels differ by shape and dtype, so any launch may be a first one.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or torch imports its compiler, 2 s a rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if launches(func):
            self._simulation.idle()
        return func(*args, **(kwargs or {}))


def launches(func: torch._ops.OpOverload) -> bool:
    """Whether an operator runs a kernel: it is no view and does more than to allocate."""
    is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
    return not is_view and "empty" not in func._schema.name


class NcclEngine(Engine):
    """As the real one. `OTHERWISE`: how requests without calls are run."""

    OTHERWISE: ClassVar[dict] = {}

    def __init__(self, **given) -> None:
        self.simulation = join_world()
        super().__init__(**given)

    def handle(self, message, **told):
        calls = message.body.calls if message.op in (Op.STEP, Op.SAMPLE) else [{"nccl": self.OTHERWISE}]
        options = dict(calls[0].get("nccl", {}))
        waiting = LaunchesWait(self.simulation) if options.pop("launches_wait", False) else nullcontext()
        self.simulation.begin(Settings(**options))
        with waiting:
            reply = super().handle(message, **told)
        self.simulation.end()
        note(calls[0], self.rank, {"groups": list(self.simulation.groups)})
        return reply
