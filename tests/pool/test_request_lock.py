"""One request at a time: the next waits for the lock, may give up, and gets it after an error too."""

import threading

import pytest

from parallel_runtime.pool.pool import RequestLock


def test_a_thread_that_asks_inside_its_own_request_is_told_so() -> None:
    lock = RequestLock()

    def stop() -> None:
        raise AssertionError("it waits for itself")

    with lock.acquire(None), pytest.raises(RuntimeError, match="called from a callback of its own request"):
        with lock.acquire(stop):
            pass
    assert not lock.taken


def test_the_lock_is_released_after_an_error() -> None:
    lock = RequestLock()
    with pytest.raises(KeyError), lock.acquire(None):
        assert lock.taken
        raise KeyError("inside")
    assert not lock.taken
    with lock.acquire(None):
        pass


def test_who_waits_may_give_up_and_the_lock_goes_on() -> None:
    lock, asked = RequestLock(), []

    def give_up() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise TimeoutError("enough")

    def wait() -> None:
        with pytest.raises(TimeoutError), lock.acquire(give_up):
            raise AssertionError("two had the lock at once")

    with lock.acquire(None):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(timeout=60)
    assert (len(asked), lock.taken) == (2, False)
