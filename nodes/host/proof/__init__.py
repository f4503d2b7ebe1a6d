"""A plan proven with this ComfyUI before it is used, and cases that a benchmark compares."""
