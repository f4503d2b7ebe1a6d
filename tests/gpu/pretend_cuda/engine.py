"""The real engine on a pretend device. A rank finds this module through `python_path`.

Every request takes its settings anew, writes down its allocation sites and its allocator's book, must leave nothing in
flight, and may touch no device but its own.
"""

import json

import tape
import torch
from pretend_cuda.device import PRETENCE, settings_file, take_settings

from parallel_runtime.worker.engine import Engine

DEVICES = 8


class PretendEngine(Engine):
    """As the real one, with tapes for graphs."""

    def new_recorder(self):
        simulation = getattr(PRETENCE, "simulation", None)
        if simulation is not None:
            tape.Tape.marked, tape.Tape.made = simulation.marking, staticmethod(simulation.keep)
        tape.install()
        return tape.Tape(refuses=self.settings.get("records_nothing") == self.rank)

    def handle(self, message, **told):
        self.settings = settings = take_settings(message.op.name)
        simulation = getattr(PRETENCE, "simulation", None)
        if simulation is not None:
            simulation.begin(settings["deadline_s"])
            PRETENCE.cold = simulation.idle if settings.get("launches_wait") else None
        PRETENCE.sites.clear()
        reply = super().handle(message, **told)
        if simulation is not None:
            simulation.end()
        PRETENCE.collect_freed()
        others = PRETENCE.touched | {each for each in range(DEVICES) if torch.cuda.memory_reserved(each)}
        if others := others - {self.device.index}:
            raise RuntimeError(f"a rank of {self.device} has touched the devices {others}")
        if settings.get("record"):
            with settings_file().with_name("sites.txt").open("a", encoding="utf-8") as notes:
                notes.writelines(f"{message.op.name} {site}\n" for site in PRETENCE.sites)
        book = {name: getattr(torch.cuda, f"memory_{name}")(self.device) for name in ("allocated", "reserved")}
        book["groups"] = [] if simulation is None else simulation.groups
        settings_file().with_name(f"book.{self.rank}.json").write_text(json.dumps(book), encoding="utf-8")
        return reply
