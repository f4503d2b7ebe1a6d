"""Run one diffusion transformer over several devices, without importing ComfyUI.

The folders, from the caller down: `pool` (the parent's side), `wire` (what passes between the sides), `rank` (one
worker), `strategies` (who holds which tokens and how they attend), `adapters` (one model each). Nothing is imported
here, so that a worker can answer before it imports torch.
"""
