"""One request at a time: the next waits for its turn, may give up, and gets it after an error too."""

import threading

import pytest

from parallel_runtime.pool.turns import Turns


def test_a_thread_that_asks_inside_its_own_turn_is_told_so() -> None:
    turns = Turns()

    def stop() -> None:
        raise AssertionError("it waits for itself")

    with turns.admitted(None), pytest.raises(RuntimeError, match="called from a callback of its own request"):
        with turns.admitted(stop):
            pass
    assert not turns.taken


def test_a_turn_is_given_back_after_an_error() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.admitted(None):
        assert turns.taken
        raise KeyError("inside")
    assert not turns.taken
    with turns.admitted(None):
        pass


def test_who_waits_may_give_up_and_the_turn_goes_on() -> None:
    turns, asked = Turns(), []

    def give_up() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise TimeoutError("enough")

    def wait() -> None:
        with pytest.raises(TimeoutError), turns.admitted(give_up):
            raise AssertionError("two had a turn at once")

    with turns.admitted(None):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(timeout=60)
    assert (len(asked), turns.taken) == (2, False)
