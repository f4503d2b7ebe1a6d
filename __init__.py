"""Where ComfyUI enters the pack: hands over the extension, holds no logic.

Nothing is imported until ComfyUI calls the entrypoint, so collecting tests from the repository root executes nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./web"


def __getattr__(name: str) -> dict[str, type]:
    """`NODE_CLASS_MAPPINGS`, the first thing any ComfyUI asks a pack for, an age before it knew entrypoints.

    Empty in a ComfyUI that is too old, after a line in its log. Otherwise there is none, and the entrypoint is called.
    """
    if name == "NODE_CLASS_MAPPINGS":
        from .nodes.host.version import warn_if_too_old

        if warn_if_too_old():
            return {}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


async def comfy_entrypoint() -> "ComfyExtension":
    """Called once by ComfyUI when it loads the pack, which logs the one line of an ImportError and goes on without."""
    from .nodes.host.version import what_is_missing

    try:
        from .nodes.extension import ParallelDiTExtension
    except (ImportError, AttributeError) as error:
        raise ImportError(what_is_missing(error)) from error
    return ParallelDiTExtension()
