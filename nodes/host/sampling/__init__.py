"""One sampling run: its context, ComfyUI's loop with a clock, and the loop inside the workers."""
