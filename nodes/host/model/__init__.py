"""The MODEL: ComfyUI's class without weights, its file, its patcher, and the pool that has its weights."""
