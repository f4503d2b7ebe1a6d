"""What a plan sends, against numbers worked out by hand."""

from parallel_runtime.parallel.shard import NEVER, gathers
from parallel_runtime.parallel.traffic import AttentionShape, predict, predict_stage

# Two blocks, 4 heads of 8, two bytes, one image: a token's keys are 64 bytes.
SHAPE = AttentionShape(blocks=2, heads=4, head_dim=8, element_bytes=2, batch=1)


def test_keys_and_values_together_decide_whether_they_are_gathered() -> None:
    assert gathers(100, row_bytes=64, limit=12_800)
    assert not gathers(100, row_bytes=64, limit=12_799)
    assert gathers(8192, row_bytes=64)
    assert not gathers(8193, row_bytes=64)


def test_gathered_keys_go_to_everybody_in_one_message() -> None:
    assert predict(SHAPE, lengths=(3, 2), ring=2, ulysses=1) == [(2, 2 * 2 * 3 * 64), (2, 2 * 2 * 2 * 64)]


def test_ulysses_sends_three_tensors_there_and_one_back() -> None:
    there, back = 3 * 5 * 32, 3 * 32  # half the heads of five tokens; of the other rank's three tokens
    assert predict(SHAPE, lengths=(5, 3), ring=1, ulysses=2, limit=NEVER)[0] == (4, 2 * (there + back))


def test_a_ring_sends_what_it_holds_at_each_hop() -> None:
    first, second = 2 * 4 * 64, 2 * 1 * 64  # its own four tokens, then those of the rank before it
    assert predict(SHAPE, lengths=(4, 2, 1), ring=3, ulysses=1, limit=NEVER)[0] == (4, 2 * (first + second))


def test_a_stage_sends_each_chunk_on_and_nothing_that_is_empty() -> None:
    assert predict_stage(SHAPE, [(3,), (0,), (2,)], part=0, ring=1, ulysses=1) == (2, 5 * 64)
