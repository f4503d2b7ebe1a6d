"""Parallel Flux Loader: a file and a config to a MODEL that every stock node takes."""

from comfy_api.latest import io

from ..parallel_runtime.checkpoint import COMPUTE_DTYPES
from .config import ParallelChoice
from .host.files import diffusion_model_path, diffusion_models, file_identity
from .host.new_model import remote_patcher
from .host.pools import POOLS
from .host.progress import NodeText
from .sockets import CATEGORY, SpConfigSocket


class ParallelFluxLoader(io.ComfyNode):
    """Reads the file's header; its weights enter the workers when something samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs in the order they are drawn; new ones are only ever appended."""
        return io.Schema(
            node_id="ParallelFluxLoader",
            display_name="Parallel Flux Loader",
            category=CATEGORY,
            description="Loads a Flux.1 model into the workers of SP Config, in place of Load Diffusion Model.",
            inputs=[
                io.Combo.Input("unet_name", options=diffusion_models(), tooltip="A .safetensors file of Flux.1."),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(COMPUTE_DTYPES),
                    default="default",
                    tooltip="What the workers compute in; default is what Load Diffusion Model would choose.",
                ),
                SpConfigSocket.Input("sp_config", tooltip="Of SP Config: devices and plan."),
            ],
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, weight_dtype: str, sp_config: ParallelChoice | None) -> str:
        """Load again when the file changed, or when workers were lost since. Linked inputs are not known here."""
        return f"{file_identity(unet_name)} {POOLS.lost_generations()}"

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str, sp_config: ParallelChoice) -> io.NodeOutput:
        """Raises `ValueError` when the file or the plan cannot be used."""
        model = remote_patcher(
            diffusion_model_path(unet_name),
            weight_dtype,
            devices=sp_config.selection.devices,
            chooser=sp_config,
            side_branch=sp_config.side_branch,
            compiled=sp_config.compiled,
        )
        NodeText().say("\n".join(sp_config.told(model.decision)))
        return io.NodeOutput(model)
