"""Tiny models of the families that ComfyUI runs, and stock graphs for each variant: what hosted models must equal."""
