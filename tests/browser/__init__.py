"""The pack in a real browser, on a real server, in both of ComfyUI's renderers."""
