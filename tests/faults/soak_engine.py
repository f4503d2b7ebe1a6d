"""The real engine, which fails on demand: the option `fault` names a rank and what it does in the middle of it."""

import time
from typing import ClassVar

import torch

from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine

KINDS = {"raise": RuntimeError, "memory": torch.OutOfMemoryError}


class Failing(Engine):
    """As the real one, but for the fault; "slow" makes every rank take 0.1 s longer, "leak" keep 1 MiB."""

    leaked: ClassVar[list[torch.Tensor]] = []

    def handle(self, request, specs, **callbacks):
        fault = request.calls[0].get("fault") if request.op in (Op.STEP, Op.SAMPLE) else None
        if fault == "slow":
            time.sleep(0.1)
        elif fault == "leak":
            self.leaked.append(torch.ones(1 << 18))
        elif fault is not None and fault["rank"] == self.rank:
            raise KINDS[fault["kind"]](f"asked to {fault['kind']}")
        return super().handle(request, specs, **callbacks)
