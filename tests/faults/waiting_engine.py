"""The real engine, whose ranks take their time between blocks: the option `between_blocks` says by rank how."""

import os
import signal
import time

from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine


class Unhurried(Engine):
    """As the real one; [action, seconds, times]: so many blocks take longer, then it goes on, hangs or is stopped."""

    def handle(self, request, specs, *, beat, **callbacks):
        options = request.calls[0] if request.op in (Op.STEP, Op.SAMPLE) else {}
        action, seconds, times = options.get("between_blocks", {}).get(str(self.rank), ["sleep", 0.0, 0])
        blocks = 0

        def slowly():
            nonlocal blocks
            beat()
            blocks += 1
            if blocks <= times:
                time.sleep(seconds)
            elif action == "hang":
                time.sleep(600)
            elif action == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)

        return super().handle(request, specs, beat=slowly, **callbacks)
