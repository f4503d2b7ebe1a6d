"""The pools of these tests, and a ComfyUI in which a test runs a script."""

from comfy.conftest import in_comfyui
from pool.pools import lone_rank, one_rank, pool, pool_of, two_ranks

__all__ = ["in_comfyui", "lone_rank", "one_rank", "pool", "pool_of", "two_ranks"]
