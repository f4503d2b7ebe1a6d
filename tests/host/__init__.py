"""A real ComfyUI for tests and the demo: where it comes from, tiny models, a server, a client.

Does not own anything the pack itself uses. Imported as `host` (pytest and the Makefile put `tests` on the path).
"""
