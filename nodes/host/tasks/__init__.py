"""ComfyUI's own code run as tasks that take turns, so that calls travel together."""
