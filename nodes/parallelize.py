"""Parallelize Model: a MODEL of a stock loader to one that several devices run together."""

import logging

from comfy_api.latest import io

from ..parallel_runtime.devices import KINDS
from .choice import ParallelChoice
from .host.contract.comfyui import comfy
from .host.model.convert_stock_model import parallelized
from .host.model.pooled_model import is_on
from .host.panel.progress import NodeText
from .loader import state_of
from .sockets import CATEGORY, SpConfigSocket

log = logging.getLogger(__name__)


class ParallelizeModel(io.ComfyNode):
    """Turns a loaded model into one that the workers run.

    Stands behind Load Diffusion Model or Load Checkpoint, and behind LoRA loaders and model patches if need be.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs in the order they are drawn; new ones are only ever appended."""
        return io.Schema(
            node_id="ParallelizeModel",
            display_name="Parallelize Model",
            category=CATEGORY,
            description="Runs a loaded model in the workers of SP Config; what was applied to it comes along.",
            inputs=[
                io.Model.Input(
                    "model", tooltip="Connect Load Diffusion Model or Load Checkpoint, with what was applied to it."
                ),
                SpConfigSocket.Input("sp_config", tooltip="Connect SP Config: devices and plan."),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def fingerprint_inputs(cls, model: io.Model.Type | None, sp_config: ParallelChoice | None) -> str:
        """Run again when a file changed, workers were lost or devices measured since. Linked inputs are None."""
        return state_of(None)

    @classmethod
    def execute(cls, model: io.Model.Type, sp_config: ParallelChoice) -> io.NodeOutput:
        """Raises `ValueError` when the model is of no file that the workers can read, or the plan does not fit it."""
        devices = sp_config.selection.devices
        main = comfy.model_management.get_torch_device()
        alone = len(devices) == 1 and (is_on(devices[0], main) or main.type not in KINDS)  # as an XPU, which none names
        if alone and sp_config.weights != "offloaded" and not sp_config.step_cache:
            log.info("Parallelize Model: one device (%s), nothing to share; the model stays as it is", devices[0])
            NodeText().say(f"one device ({devices[0]}), nothing to share: the model stays in ComfyUI")
            return io.NodeOutput(model)
        sp_config.refuse_unasked_cpu(main.type)
        ours = parallelized(model, sp_config)
        told = [*sp_config.told(ours.decision), ours.memory_text, *ours.told_of_proof(), *filter(None, [ours.left_out])]
        NodeText().say("\n".join(told))
        return io.NodeOutput(ours)
