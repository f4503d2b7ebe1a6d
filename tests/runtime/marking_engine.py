"""An engine whose timer notes what it is asked, so that a test can see where each rank looks at the clock.

Owns what runs in the ranks; `test_timing.py` says what must be found. A rank finds this module through `python_path`.
"""

from noted import note

from parallel_runtime.timing import RegionTimer
from parallel_runtime.worker.engine import Engine


class NotingTimer(RegionTimer):
    """Measures as ever; `notes` has each region that was entered, each mark and each lap, in order."""

    def __init__(self, device, *, on):
        super().__init__(device, on=on)
        self.notes = []

    def region(self, name):
        self.notes.append(name)
        return super().region(name)

    def mark(self):
        self.notes.append("mark")
        super().mark()

    def lap(self):
        self.notes.append("lap")
        super().lap()

    def moments(self):
        self.notes.append("read")
        return super().moments()


class MarkingEngine(Engine):
    """The engine, which notes what its timer noted."""

    def new_timer(self, *, on, **_):
        self.noting = NotingTimer(self.device, on=on)
        return self.noting

    def handle(self, request, specs, **told):
        self.noting = None
        reply = super().handle(request, specs, **told)
        if self.noting is not None:
            note(request.calls[0], self.rank, self.noting.notes)
        return reply
