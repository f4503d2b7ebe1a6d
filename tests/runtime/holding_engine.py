"""The engine without Python's garbage collector, which notes how many tensors the rank holds when it answers, and how
many kept keys when it was asked.

What only the collector would free stays: a GPU's memory must not wait for it. A rank finds this module through
`python_path`; `test_given_back.py` says what must be found.
"""

import gc

import torch
from noted import note

from parallel_runtime.parallel.kept_keys import HeldRows
from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine


class HoldingEngine(Engine):
    """As the real one."""

    def __init__(self, **given):
        super().__init__(**given)
        gc.disable()

    def handle(self, request, specs, **told):
        kept = sum(type(each) is HeldRows for each in gc.get_objects()) if request.op is Op.STEP else 0
        reply = super().handle(request, specs, **told)
        if request.op is Op.STEP:
            tensors = sum(type(each) is torch.Tensor for each in gc.get_objects())
            note(request.calls[0], self.rank, (tensors, kept))
        return reply
