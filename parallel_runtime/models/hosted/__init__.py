"""ComfyUI's own modules inside a rank. The only folder of the runtime that imports comfy, and only inside functions."""
