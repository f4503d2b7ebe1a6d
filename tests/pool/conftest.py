"""The pools of these tests."""

from pool.pools import lone_rank, one_rank, pool, pool_of, two_ranks

__all__ = ["lone_rank", "one_rank", "pool", "pool_of", "two_ranks"]
