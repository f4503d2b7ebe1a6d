"""A rank breaks the protocol or leaves: the caller learns at once which rank and why, and no process is left."""

import pytest

from pool.echo_pool import FRESH, failure, failure_in_time, first_line


def test_an_exit_names_the_code_and_shows_what_was_printed_last(lone_rank):
    """More output than a pipe holds neither blocks the rank nor floods the error."""
    error, _ = failure(lone_rank, faults={0: [["say", "lots", 1 << 18], ["say", "the end"], ["leave", 3]]})
    assert first_line(error) == f"rank 0: exited with code 3; {FRESH}"
    assert error.detail.endswith("lots\nthe end")
    assert len(error.detail) < 10_000


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        (["send_garbage", 5], "broke the protocol: 5 bytes, a header alone has 28"),
        (["speak_out_of_turn", -1], "broke the protocol: it answered DONE to request"),
        (["close_channel"], "closed its channel"),
    ],
)
def test_a_rank_that_breaks_the_protocol_is_ended(lone_rank, action, cause):
    error = failure_in_time(lone_rank, faults={0: [action]})
    assert first_line(error).startswith(f"rank 0: {cause}")
