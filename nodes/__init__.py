"""The nodes: widgets to a plan, a MODEL whose forward runs elsewhere, and reports. ComfyUI's internals are in host/."""
