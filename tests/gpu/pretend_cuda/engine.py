"""The real engine on a pretend device. A rank finds this module through `python_path`.

Every request takes its settings anew, writes down its allocation sites, must leave nothing in flight, and may touch no
device but its own.
"""

import json

import tape
import torch
from pretend_cuda.device import PRETENCE, settings_file

from parallel_runtime.worker.engine import Engine

DEVICES = 8


class PretendEngine(Engine):
    """As the real one, with tapes for graphs."""

    def new_recorder(self):
        if simulation := PRETENCE.simulation:
            tape.Tape.marked, tape.Tape.made = simulation.marking, staticmethod(simulation.keep)
        tape.install()
        return tape.Tape(self.device, refuses=self.settings.get("records_nothing") == self.rank)

    def handle(self, request, specs, **told):
        place, simulation = settings_file(), PRETENCE.simulation
        self.settings = settings = json.loads(place.read_text(encoding="utf-8"))
        operation, _, site = settings.get("refuse", "").partition(" ")
        PRETENCE.refuse = site if operation == request.op.name else ""
        PRETENCE.sites.clear()
        if simulation is not None:
            PRETENCE.cold = simulation.idle if settings.get("launches_wait") else None
            simulation.begin(settings["deadline_s"])
        reply = super().handle(request, specs, **told)
        if simulation is not None:
            simulation.end()
        PRETENCE.collect_freed()
        others = PRETENCE.touched | {each for each in range(DEVICES) if torch.cuda.memory_reserved(each)}
        if others := others - {self.device.index}:
            raise RuntimeError(f"a rank of {self.device} has touched the devices {others}")
        if settings.get("record"):
            with place.with_name("sites.txt").open("a", encoding="utf-8") as notes:
                notes.writelines(f"{request.op.name} {site}\n" for site in PRETENCE.sites)
        return reply
