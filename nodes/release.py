"""Release Parallel Pool: ends the workers and frees all their memory, wherever in a graph it stands."""

import time

from comfy_api.latest import io

from .host.model.pools import POOLS
from .sockets import CATEGORY


class ReleaseParallelPool(io.ComfyNode):
    """Ends all workers and passes its input on. The next node that needs workers gets fresh ones."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """An output node, so that it runs at the end of a graph too."""
        return io.Schema(
            node_id="ReleaseParallelPool",
            display_name="Release Parallel Pool",
            category=CATEGORY,
            description="Ends all workers of this ComfyUI and frees their memory, after what is connected has run.",
            inputs=[
                io.AnyType.Input(
                    "anything", optional=True, tooltip="Runs after this is there, and passes it on; may stay empty."
                )
            ],
            outputs=[io.AnyType.Output(display_name="anything")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, anything: object = None) -> str:
        """Run again whenever there is something to release, else let the cache answer."""
        return f"alive at {time.monotonic_ns()}" if POOLS.has_something_to_release() else "nothing to release"

    @classmethod
    def execute(cls, anything: object = None) -> io.NodeOutput:
        """Ends every pool; one that has failed too often may start again."""
        POOLS.close_all()
        POOLS.forget_left()
        return io.NodeOutput(anything)
