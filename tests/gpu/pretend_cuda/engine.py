"""The real engine on a pretend device. A rank finds this module through `python_path`.

Every request takes its settings anew, writes down its allocation sites and its allocator's book, and must leave nothing
in flight.
"""

import json

import torch
from nccl_rules import Settings
from pretend_cuda.device import PRETENCE, settings_file, take_settings

from parallel_runtime.wire.protocol import Op
from parallel_runtime.worker.engine import Engine


class PretendEngine(Engine):
    """As the real one."""

    def handle(self, message, **told):
        settings = take_settings(message.op.name)
        simulation = getattr(PRETENCE, "simulation", None)
        if simulation is not None:
            simulation.begin(Settings(**settings.get("nccl", {})))
            PRETENCE.cold = simulation.idle if settings.get("launches_wait") else None
        PRETENCE.sites.clear()
        reply = super().handle(message, **told)
        if simulation is not None:
            simulation.end()
        PRETENCE.collect_freed()
        held = torch.cuda.memory_allocated(self.device)
        if settings.get("record"):
            note_sites(message.op)
        book = {"allocated": held, "reserved": torch.cuda.memory_reserved(self.device)}
        settings_file().with_name(f"book.{self.rank}.json").write_text(json.dumps(book), encoding="utf-8")
        return reply


def note_sites(op: Op) -> None:
    """Write down where this request allocated, beside the settings."""
    lines = "".join(f"{op.name} {site}\n" for site in PRETENCE.sites)
    with settings_file().with_name("sites.txt").open("a", encoding="utf-8") as notes:
        notes.write(lines)
