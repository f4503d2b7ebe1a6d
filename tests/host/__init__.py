"""A real ComfyUI for tests and the demo: where it comes from, tiny models, a server, a client. Imported as `host`."""
