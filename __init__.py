"""Where ComfyUI enters the pack: hands over the extension, holds no logic.

Nothing is imported until ComfyUI asks, so collecting tests from the repository root executes nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./web"


def __getattr__(name: str) -> dict[str, type] | dict[str, str]:
    """`NODE_CLASS_MAPPINGS`, the first thing any ComfyUI asks a pack for, an age before it knew entrypoints.

    Where ComfyUI is too old, or lacks what every node needs, they are nodes that say so, after a line in its log.
    Otherwise there is none, and the entrypoint is called.
    """
    if name in ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"):
        from .nodes.host.contract.stand_ins import stand_ins
        from .nodes.host.contract.version import why_no_nodes

        if reason := why_no_nodes():
            classes = stand_ins(reason)
            return classes if name == "NODE_CLASS_MAPPINGS" else {each: classes[each].TITLE for each in classes}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


async def comfy_entrypoint() -> "ComfyExtension":
    """Called once by ComfyUI when it loads the pack and found no `NODE_CLASS_MAPPINGS`."""
    from .nodes.extension import ParallelDiTExtension

    return ParallelDiTExtension()
