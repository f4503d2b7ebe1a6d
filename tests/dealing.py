"""In what order tests run, and in which of the processes that pytest-xdist starts.

A server, eight ranks or a browser are started once in each process that needs them. A process is given files that need
what it has; then files of what no process has; then others; and at last it helps another process, for which it starts a
server of its own. So the processes end at about the same time, and nobody has to know how long a test takes.
"""

import random
from collections import Counter
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TESTS = Path(__file__).resolve().parent
# What a folder or a file needs that takes long to start.
NEEDS = {
    "hosted server": ("families", "saved_workflows", "test_parallel_sampler.py", "test_hosted_bad_input.py")
    + ("test_parallel_decode.py",),
    "server": ("comfy", "demo_model", "test_smoke_graph.py", "test_nothing_private.py"),
    "browser": ("browser", "parity", "refusals"),
    "hosted modules": ("models",),
    "ranks": ("runtime",),
}
SHARED = {place: needed for needed, places in NEEDS.items() for place in places}
# What takes longest is dealt out first, and what is quick last.
FIRST = tuple(NEEDS)
LAST = ("planner", "pool")
SEED = "random_order_seed"


def shared_by(path: str) -> str:
    """What a test file needs, as in SHARED; "" where that is nothing."""
    return next((SHARED[part] for part in reversed(path.split("/")) if part in SHARED), "")


def turn(item: pytest.Item) -> int:
    """When a test is dealt out: by its place in FIRST, then what is in neither, then LAST."""
    path = item.path.relative_to(TESTS).as_posix()
    if (shared := shared_by(path)) in FIRST:
        return FIRST.index(shared)
    return len(FIRST) + (path.partition("/")[0] in LAST)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put the files into a random order, and the tests of each."""
    numbers = random.Random(seed)  # noqa: S311  an order of tests
    place = {path: numbers.random() for path in dict.fromkeys(item.path for item in items)}
    own = {item: numbers.random() for item in items}
    items.sort(key=lambda item: (place[item.path], own[item]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--random-order`, of which each process of pytest-xdist is told the seed."""
    parser.addoption("--random-order", action="store_true", help="shuffle the files, and the tests of each")
    parser.addoption("--random-order-seed", type=int, metavar="N", help="the order that an earlier run had")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed; a process of pytest-xdist's is told it."""
    if config.option.random_order and config.option.random_order_seed is None:
        told = getattr(config, "workerinput", {})
        config.option.random_order_seed = told.get(SEED, random.SystemRandom().randrange(10**6))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which may be switched off
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput[SEED] = node.config.option.random_order_seed


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say how to have the same order again."""
    seed = config.option.random_order_seed
    return [] if seed is None else [f"random order: --random-order-seed={seed}"]


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what takes longest first, or all at random."""
    if config.option.random_order_seed is not None:
        shuffle(items, config.option.random_order_seed)
    else:
        items.sort(key=turn)


class ByWhatIsShared(LoadScopeScheduling):
    """pytest-xdist's own way of dealing files out, each to a process that has what it needs."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        self.workqueue.move_to_end(self._next(node), last=False)
        super()._assign_work_unit(node)

    def _next(self, node: WorkerController) -> str:
        """The file that this process is given."""
        mine, others = set(map(shared_by, self.assigned_work[node])), set()
        for other in self.nodes:
            others |= set(map(shared_by, self.assigned_work[other])) if other is not node else set()
        left = Counter()
        for path, tests in self.workqueue.items():
            left[shared_by(path)] += len(tests)
        for wanted in (mine - {""}, left.keys() - others - {""}, {""}, {left.most_common(1)[0][0]}):
            for path in self.workqueue:
                if shared_by(path) in wanted:
                    return path
        raise AssertionError("no file is left")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which may be switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByWhatIsShared:
    config.option.loadscopereorder = False  # by numbers of tests, which say little of their time
    return ByWhatIsShared(config, log)
