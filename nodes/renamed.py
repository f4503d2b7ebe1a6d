"""Nodes that have another name now, for ComfyUI's node replacement: it offers the new node where an old one stands.

The old ids stay, since saved workflows name them. Owns the table.
"""

from comfy_api.latest import io

from .host.contract.comfyui import comfy_api
from .loader import ParallelFluxLoader, ParallelModelLoader
from .sampler import ParallelFluxSampler, ParallelSampler

RENAMED: tuple[tuple[type[io.ComfyNode], type[io.ComfyNode]], ...] = (
    (ParallelFluxLoader, ParallelModelLoader),
    (ParallelFluxSampler, ParallelSampler),
)
AFTER_SEED = "control_after_generate"  # the widget that ComfyUI's interface adds behind a seed, and saves


async def register_renames() -> None:
    """Tell ComfyUI which node each earlier name stands for."""
    for old, new in RENAMED:
        before, after = old.define_schema(), new.define_schema()
        await comfy_api.latest.ComfyAPI().node_replacement.register(
            io.NodeReplace(
                new_node_id=after.node_id,
                old_node_id=before.node_id,
                old_widget_ids=_saved_widgets(before.inputs),
                input_mapping=[{"new_id": each.id, "old_id": each.id} for each in after.inputs],
                output_mapping=[{"new_idx": index, "old_idx": index} for index in range(len(after.outputs))],
            )
        )


def _saved_widgets(inputs: list[io.Input]) -> list[str]:
    """The inputs that are widgets, in the order in which a workflow saves their values."""
    found = []
    for each in inputs:
        if isinstance(each, io.WidgetInput):
            found.append(each.id)
            if isinstance(each, io.Int.Input) and each.control_after_generate:
                found.append(AFTER_SEED)
    return found
