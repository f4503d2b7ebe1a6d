"""What the pack chooses by itself, chosen by a test: a plan as for GPUs of known speed, and who computes a Flux.1.

Owns: the constants that are told, so that auto mode can be tested without a GPU. The rules and all that asks for them
are the pack's own.
"""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from typing import Any

from comfy_api.latest import io

Config = io.Custom("SP_CONFIG")
CATEGORY = "tests"
# Ranks so slow that sharing out always pays where nothing is exchanged, and messages that cost as much as half of a
# small image's blocks. Starting an operation costs nothing.
FLOPS, LATENCY_S = 1e10, 0.1


class LikeKnownGpus(io.ComfyNode):
    """An SP Config whose auto mode takes its CPU ranks for GPUs that were calibrated."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs, outputs = [Config.Input("sp_config")], [Config.Output()]
        return io.Schema(node_id="LikeKnownGpus", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, sp_config: Any) -> io.NodeOutput:
        given = {field.name: getattr(sp_config, field.name) for field in fields(sp_config)}
        return io.NodeOutput(_like_known_gpus(type(sp_config))(**given))


def _like_known_gpus(kind: type) -> type:
    """The pack's class of what SP Config hands on, with other devices and constants in the one look at the machine."""
    runtime = kind.__module__.removesuffix(".nodes.choice") + ".parallel_runtime"
    automatic, known = (import_module(f"{runtime}.planner.{name}") for name in ("automatic", "known"))
    device = import_module(f"{runtime}.devices").Device
    table = known.known_calibration("H100")
    constants = replace(
        table,
        source="told by a test",
        rates=replace(table.rates, matmul_flops=FLOPS, attention_flops=FLOPS),
        link=replace(table.link, bandwidth=1e12, latency_s=LATENCY_S),
        software=replace(table.software, operation_s=0.0),
    )

    class Known(kind):
        def _can_weigh(self) -> bool:
            return True

        def _automatic(self, model: Any, work: Any, held: Any = None, *, everything: Any = None) -> Any:
            gpus = [device("cuda", index) for index in range(len(self.selection.devices))]
            free = [80 * 2**30] * len(gpus)
            if held is not None:
                return automatic.plan_of_run(model, work, free, constants, held=held)
            return automatic.automatic_plan(
                model, work, gpus, free, constants, weights=self.weights, everything=everything
            )

    return Known


class HostedModelLoader(io.ComfyNode):
    """The pack's loader for files that ComfyUI's own modules compute in the workers, of Flux.1 too."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("unet_name"), io.String.Input("weight_dtype"), Config.Input("sp_config")]
        outputs = [io.Model.Output()]
        return io.Schema(node_id="HostedModelLoader", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never equal to itself: workers may have been lost since the prompt before."""
        return float("nan")

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str, sp_config: Any) -> io.NodeOutput:
        host = f"{type(sp_config).__module__.removesuffix('.choice')}.host"
        names = ("files", "new_model", "hosted_source")
        files, new_model, hosted_source = (import_module(f"{host}.{name}") for name in names)
        model = new_model.remote_patcher(
            files.diffusion_model_path(unet_name),
            weight_dtype,
            devices=sp_config.selection.devices,
            chooser=sp_config,
            side_branch=False,
            read=hosted_source.read_hosted,
        )
        return io.NodeOutput(model)
