"""Pools of real ranks: those that a module shares, and a test's own."""

import pytest

from pool.echo_pool import make_pool


@pytest.fixture(scope="module")
def pool():
    """Two ranks that a whole module shares. A test that ends them leaves the next test a fresh start."""
    with make_pool() as shared:
        shared.start()
        yield shared


@pytest.fixture(scope="module")
def lone_rank():
    """As `pool`, with one rank, for what needs no second one: it starts in half the time."""
    with make_pool(1) as shared:
        yield shared


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
