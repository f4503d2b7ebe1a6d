"""Where ComfyUI enters the pack: hands over the extension, holds no logic.

Nothing is imported until ComfyUI calls the entrypoint, so collecting tests from the repository root executes nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension


async def comfy_entrypoint() -> "ComfyExtension":
    """Called once by ComfyUI when it loads the pack."""
    from .nodes.extension import ParallelDiTExtension

    return ParallelDiTExtension()
