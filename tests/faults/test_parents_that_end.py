"""Ranks end with the process that owns them, however it ends, and leave nothing; they do not end with its threads."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pool.echo_pool import is_alive, wait_until

from faults.sockets import LISTENING, sockets_of

HERE = Path(__file__).parent
POOL = HERE.parent / "pool"
ROOT = HERE.parents[1]


class Parent:
    """parent.py with its own temporary folder."""

    def __init__(self, folder, *, when):
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{POOL}", "TMPDIR": str(folder), "HOME": str(folder)}
        command = [sys.executable, str(HERE / "parent.py"), when]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True, cwd=folder)
        self.ranks = [int(word) for word in self.process.stdout.readline().split()]
        assert len(self.ranks) == (3 if when == "stepping" else 1)
        wait_until(lambda: len(self.started()) == (when == "holding"))
        self.processes = self.ranks + self.started()
        assert self.living() == self.processes

    def started(self):
        """What the ranks have started."""
        return [child.pid for rank in self.ranks for child in psutil.Process(rank).children(recursive=True)]

    def tell(self, line):
        """Have it do something; what it answers."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def living(self):
        """Of the ranks and what they have started, those that still run."""
        return [pid for pid in self.processes if is_alive(pid)]

    def wait_until_ranks_are_gone(self):
        """What else would end them, such as an exchange that fails, takes longer."""
        wait_until(lambda: not self.living())


@pytest.fixture
def parent_of(tmp_path):
    made = []

    def make(**settings):
        made.append(Parent(tmp_path, **settings))
        return made[-1]

    yield make
    for parent in made:
        with parent.process:
            parent.process.kill()
        for pid in parent.living():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "when", ["stepping", *(pytest.param(each, marks=pytest.mark.full) for each in ("holding", "leaked"))]
)
def test_ranks_end_with_their_killed_parent_not_with_a_thread_of_it_and_leave_nothing(parent_of, tmp_path, when):
    """In a step and as they start. That they outlive the thread that made them, parent.py sees to."""
    parent = parent_of(when=when)
    owners = {str(pid) for pid in (parent.process.pid, *parent.processes)}
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.wait_until_ranks_are_gone()
    assert list(tmp_path.iterdir()) == []
    # Others come and go there too. What torch and its like put there has the number of its process in its name.
    left = [name for name in os.listdir("/dev/shm") if owners & set(re.findall(r"\d+", name))]  # noqa: S108
    assert left == []


@pytest.mark.full
def test_ranks_end_when_their_parent_replaces_itself(parent_of):
    """As ComfyUI does when its manager restarts it: the same process goes on as another program."""
    parent = parent_of(when="stepping")
    assert parent.tell("exec") == "replaced"
    parent.wait_until_ranks_are_gone()
    assert is_alive(parent.process.pid)


@pytest.mark.full
def test_ranks_end_with_a_parent_that_crashes_with_the_interpreters_lock_held(parent_of, tmp_path):
    """No thread of its can say goodbye. Sockets go with the processes that hold them."""
    parent = parent_of(when="stepping")
    listening = {socket for rank in parent.ranks for socket in sockets_of(rank)}
    assert LISTENING in {state for _, state in listening}
    assert parent.tell("crash") == ""
    assert parent.process.wait(120) == -signal.SIGABRT
    parent.wait_until_ranks_are_gone()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_ranks_end_with_a_killed_parent_that_never_gave_the_interpreters_lock_back(parent_of, tmp_path):
    parent = parent_of(when="idle")
    assert parent.tell("hold") == "holding"
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.wait_until_ranks_are_gone()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_ranks_end_with_a_parent_that_just_returns(parent_of):
    parent = parent_of(when="idle")
    parent.process.stdin.close()
    assert parent.process.wait(120) == 0
    parent.wait_until_ranks_are_gone()
