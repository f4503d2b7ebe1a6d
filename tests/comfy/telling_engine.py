"""The real engine; after each load a rank writes beside the model's file what is found in its process."""

import json
from pathlib import Path

from told_states import states, values

from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine


class Telling(Engine):
    """Writes FILE.json: the values of options, and the states."""

    def handle(self, request, specs, **listeners):
        reply = super().handle(request, specs, **listeners)
        if request.op is Op.LOAD:
            Path(f"{request.spec.path}.json").write_text(json.dumps([values(), states()]), encoding="utf-8")
        return reply
