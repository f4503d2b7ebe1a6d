"""What the pack chooses by itself, chosen by a test: a plan as for GPUs of known speed."""

from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from comfy_api.latest import io

from .node import node

Config = io.Custom("SP_CONFIG")
# Ranks so slow that sharing out always pays where nothing is exchanged, and messages that cost as much as half of a
# small image's blocks. Starting an operation costs nothing.
FLOPS, LATENCY_S = 2.5e9, 0.1


@node("LikeKnownGpus", gives=[Config])
def like_known_gpus(sp_config: Config, latency_s: float = LATENCY_S) -> io.NodeOutput:
    """An SP Config whose auto mode takes its CPU ranks for GPUs that were calibrated."""
    given = {field.name: getattr(sp_config, field.name) for field in fields(sp_config)}
    return io.NodeOutput(_like_known_gpus(type(sp_config), latency_s)(**given))


def _like_known_gpus(kind: type, latency_s: float) -> type:
    """The pack's class of what SP Config hands on, with other devices and constants in the one look at the machine."""
    runtime = kind.__module__.removesuffix(".nodes.choice") + ".parallel_runtime"
    automatic, known = (import_module(f"{runtime}.planner.{name}") for name in ("automatic", "known"))
    device = import_module(f"{runtime}.devices").Device
    table = known.known_calibration("H100")
    constants = replace(
        table,
        source="told by a test",
        rates=replace(table.rates, matmul_flops=FLOPS, attention_flops=FLOPS),
        link=replace(table.link, bandwidth=1e12, latency_s=latency_s),
        software=replace(table.software, operation_s=0.0),
    )

    class Known(kind):
        def _can_weigh(self) -> bool:
            return True

        def _automatic(self, model: Any, work: Any, held: Any = None, **given: Any) -> Any:
            gpus = [device("cuda", index) for index in range(len(self.selection.devices))]
            free = [80 * 2**30] * len(gpus)
            if held is not None:
                return automatic.plan_of_run(model, work, free, constants, held=held, **given)
            return automatic.automatic_plan(model, work, gpus, free, constants, weights=self.weights, **given)

    return Known
