"""The pack's list of nodes. Ids are for ever: saved workflows name them."""

from comfy_api.latest import ComfyExtension, io

from ..parallel_runtime.devices import missing_system
from ..parallel_runtime.process.temporary_folders import remove_left
from .benchmark import ParallelBenchmark
from .config import SPConfig
from .host.contract.queued_prompt import watch_prompts
from .host.contract.version import off, tell_at_load
from .host.model.replaced_code import note_imported
from .host.panel.routes import add_routes
from .list_sampler import ParallelFluxListSampler
from .loader import ParallelFluxLoader, ParallelModelLoader
from .parallelize import ParallelizeModel
from .plan_check import check_plan
from .release import ReleaseParallelPool
from .renamed import register_renames
from .sampler import ParallelFluxSampler, ParallelSampler
from .show_report import ShowTimingReport
from .vae import TimedVAEDecode


class ParallelDiTExtension(ComfyExtension):
    """What ComfyUI asks for the nodes."""

    async def on_load(self) -> None:
        """Says what ComfyUI lacks; the panel's routes, since the server's come after all packs; prompts; old names.

        Folders that a killed ComfyUI has left go.
        """
        tell_at_load()
        if missing_system() is None:
            remove_left()
        if not off("panel"):
            add_routes(check_plan)
            watch_prompts(note_imported)
        if not off("panel") and not off("renames"):
            await register_renames()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All node classes, in the order of a graph."""
        return [
            SPConfig,
            ParallelModelLoader,
            ParallelizeModel,
            ParallelSampler,
            ParallelFluxLoader,
            ParallelFluxSampler,
            ParallelFluxListSampler,
            TimedVAEDecode,
            ParallelBenchmark,
            ShowTimingReport,
            ReleaseParallelPool,
        ]
