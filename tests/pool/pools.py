"""Fixtures of pools of real ranks: those that a module shares, and a test's own. conftest.py of a folder takes them."""

import pytest

from pool.echo_pool import make_pool


@pytest.fixture(scope="module")
def two_ranks():
    """The two ranks that `pool` hands out."""
    with make_pool() as shared:
        yield shared


@pytest.fixture(scope="module")
def one_rank():
    """The rank that `lone_rank` hands out."""
    with make_pool(1) as shared:
        yield shared


@pytest.fixture
def pool(two_ranks):
    """Two ranks that a whole module shares. A test that ends them leaves the next test a fresh start."""
    yield from running(two_ranks)


@pytest.fixture
def lone_rank(one_rank):
    """As `pool`, with one rank, for what needs no second one: it starts in half the time."""
    yield from running(one_rank)


@pytest.fixture
def pool_of():
    """Makes pools of a test's own, closed when it ends."""
    made = []

    def make(*arguments, **settings):
        made.append(make_pool(*arguments, **settings))
        return made[-1]

    yield make
    for own in made:
        own.close()


def running(shared):
    """Ranks that wait for a request, whatever the test before did to them."""
    shared.start()
    yield shared
    shared._failures._times.clear()  # three in a minute are too many for a pool, not for its tests
