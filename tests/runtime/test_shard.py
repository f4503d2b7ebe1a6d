"""Sharding: every token once, no padding, lengths within one of each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.parallel.shard import SequenceShard, split_lengths


@given(st.integers(0, 5000), st.integers(1, 8))
def test_lengths_add_up_and_differ_by_at_most_one(total: int, parts: int) -> None:
    lengths = split_lengths(total, parts)
    assert len(lengths) == parts
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True), "the longer runs come first"


@given(st.integers(0, 600), st.integers(0, 5000), st.integers(1, 8))
def test_the_parts_cover_every_token_once_and_are_level(num_text: int, num_image: int, parts: int) -> None:
    shards = [SequenceShard(num_text, num_image, parts, index) for index in range(parts)]
    text = torch.cat([shard.take(torch.arange(num_text), stream="text", dim=0) for shard in shards])
    image = torch.cat([shard.take(torch.arange(num_image), stream="image", dim=0) for shard in shards])
    assert torch.equal(text, torch.arange(num_text))
    assert torch.equal(image, torch.arange(num_image))
    lengths = shards[0].lengths
    assert max(lengths) - min(lengths) <= 1
    for shard, length in zip(shards, lengths, strict=True):
        assert shard.text.stop - shard.text.start + shard.image.stop - shard.image.start == length


def test_a_residual_shorter_than_the_image_is_cut_where_it_ends() -> None:
    residual = torch.arange(10)
    pieces = [SequenceShard(3, 24, 4, index).take(residual, stream="image", dim=0) for index in range(4)]
    assert [len(piece) for piece in pieces] == [6, 4, 0, 0]
    assert torch.equal(torch.cat(pieces), residual)


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 parts"):
        split_lengths(3, 0)
