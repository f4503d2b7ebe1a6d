"""Which rank decodes which tile, and how a VAE's weights are put into messages."""

from __future__ import annotations

import torch

from parallel_runtime.pool.held_vae import MAX_NAMES, Tile, _batches, assign_tiles


def tiles(*sizes: int) -> list[Tile]:
    """Tiles of so many latent pixels."""
    return [Tile(latent=torch.empty(1, 1, 1, size), shape=(1,), dtype=torch.float32) for size in sizes]


def test_every_tile_is_decoded_once_and_the_largest_are_shared_first() -> None:
    shares = assign_tiles(tiles(8, 1, 1, 1, 5), num_ranks=2)
    assert shares == ((0,), (1, 2, 3, 4))
    for num_ranks in (1, 2, 3, 8):
        shares = assign_tiles(tiles(4, 4, 4, 2, 2, 1), num_ranks=num_ranks)
        assert sorted(number for share in shares for number in share) == list(range(6))
        sums = [sum((4, 4, 4, 2, 2, 1)[number] for number in share) for share in shares]
        assert max(sums) - min(sums) <= 4


def test_a_rank_may_have_no_tile() -> None:
    assert assign_tiles(tiles(3), num_ranks=3) == ((0,), (), ())


def test_weights_go_in_order_in_messages_of_a_limited_size() -> None:
    large, small = torch.empty(40 << 20, dtype=torch.uint8), torch.empty(1)
    names = [list(batch) for batch in _batches({"a": large, "b": large, "c": small})]
    assert names == [["a"], ["b", "c"]]
    many = [list(batch) for batch in _batches({f"w{number}": small for number in range(MAX_NAMES + 1)})]
    assert [len(batch) for batch in many] == [MAX_NAMES, 1]
