"""The only place that touches ComfyUI's internals (`comfy.*`, its server, its folders)."""
