"""Parallel Model Loader: a file and a config to a MODEL that every stock node takes. And the name it had before."""

from comfy_api.latest import io

from ..parallel_runtime.checkpoint import COMPUTE_DTYPES, FP8
from ..parallel_runtime.planner.machine import calibration_identity
from .choice import ParallelChoice
from .host.contract.comfyui import comfy
from .host.model.files import diffusion_model_path, diffusion_models, file_identity
from .host.model.found_plans import LOOKING
from .host.model.new_model import remote_patcher
from .host.model.pools import POOLS
from .host.panel.progress import NodeText
from .sockets import CATEGORY, SpConfigSocket


class ParallelModelLoader(io.ComfyNode):
    """Reads the file's header; its weights enter the workers when something samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs in the order they are drawn; new ones are only ever appended."""
        return io.Schema(
            node_id="ParallelModelLoader",
            display_name="Parallel Model Loader",
            category=CATEGORY,
            description="Loads a model into the workers of SP Config, in place of Load Diffusion Model.",
            inputs=loader_inputs(),
            outputs=[io.Model.Output(display_name="model")],
        )

    @classmethod
    def fingerprint_inputs(
        cls, unet_name: str | None, weight_dtype: str | None, sp_config: ParallelChoice | None
    ) -> str:
        """Load again when the file changed, workers were lost or devices measured since. Linked inputs are None."""
        return state_of(unet_name)

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str, sp_config: ParallelChoice) -> io.NodeOutput:
        """Raises `ValueError` when the file or the plan cannot be used."""
        return load(unet_name, weight_dtype, sp_config)


class ParallelFluxLoader(io.ComfyNode):
    """Parallel Model Loader by the name it had in versions up to 0.2, so that saved workflows open."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """As the new one's; only the id and the name are the old ones."""
        return io.Schema(
            node_id="ParallelFluxLoader",
            display_name="Parallel Flux Loader",
            category=CATEGORY,
            description="The earlier name of Parallel Model Loader, which it loads the same files as.",
            inputs=loader_inputs(),
            outputs=[io.Model.Output(display_name="model")],
            is_deprecated=True,
        )

    @classmethod
    def fingerprint_inputs(
        cls, unet_name: str | None, weight_dtype: str | None, sp_config: ParallelChoice | None
    ) -> str:
        return state_of(unet_name)

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str, sp_config: ParallelChoice) -> io.NodeOutput:
        return load(unet_name, weight_dtype, sp_config)


def loader_inputs() -> list[io.Input]:
    """Names of Load Diffusion Model where it has them, so that values stay when nodes are swapped."""
    return [
        io.Combo.Input(
            "unet_name",
            options=diffusion_models(),
            tooltip="A .safetensors file of models/diffusion_models, of any model that ComfyUI knows.",
        ),
        io.Combo.Input(
            "weight_dtype",
            options=[*COMPUTE_DTYPES, *FP8],
            default="default",
            tooltip="What the workers compute in; default is what Load Diffusion Model would choose. "
            "The fp8 ones are its own: weights take a byte each, and are cast where they are used.",
        ),
        SpConfigSocket.Input("sp_config", tooltip="Connect SP Config: devices and plan."),
    ]


def state_of(unet_name: str | None) -> str:
    """What a loaded MODEL depends on besides its inputs: the file as it lies there, the workers, the calibrations.

    Which file another node names is not known: then any that was loaded and was written to since counts.
    """
    identity = POOLS.file_changes() if unet_name is None else file_identity(unet_name)
    return f"{identity} {POOLS.lost_generations()} {calibration_identity()} {LOOKING.news()}"


def load(unet_name: str, weight_dtype: str, sp_config: ParallelChoice) -> io.NodeOutput:
    """The MODEL of a file. Raises `ValueError` when the file or the plan cannot be used."""
    sp_config.refuse_unasked_cpu(comfy.model_management.get_torch_device().type)
    model = remote_patcher(diffusion_model_path(unet_name), weight_dtype, sp_config)
    NodeText().say("\n".join([*sp_config.told(model.decision), model.memory_text, *model.told_of_proof()]))
    return io.NodeOutput(model)
