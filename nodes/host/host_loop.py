"""The error by which a run stays in ComfyUI's loop."""


class HostLoopError(ValueError):
    """The run must stay in ComfyUI's loop; the message says why."""
