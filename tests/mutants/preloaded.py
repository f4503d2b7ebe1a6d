"""A process that has imported what tests import, and forks for each run of pytest: imports take longer than most tests.

`preloaded.py "MODULES" PADDING`; the padding is room for the command lines of what is forked. Speaks JSON, one value a
line: of `{"folder", "options", "nodes", "log"}` it says the child's process id and, at its end, its exit status. What
forks ranks and ComfyUIs for the tests (host/forked_ranks.py) is forked from here as well.
Imports nothing of the product, or a mistake in it would not be seen.
"""

import importlib
import json
import os
import select
import shutil
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


class InThisOrder:
    """A plugin of pytest: the tests as they were named. The one that runs stands in `noted`."""

    def __init__(self, nodes: list[str], noted: Path) -> None:
        self._place, self._noted = {node: place for place, node in enumerate(nodes)}, noted

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Those of a node that was named without parameters stay together."""
        items.sort(key=lambda item: self._place.get(item.nodeid, self._place.get(item.nodeid.partition("[")[0], 0)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """It may never end after a mistake, as ranks of which one waits for the others, and then says nothing."""
        self._noted.write_text(nodeid, encoding="utf-8")


def serve() -> None:
    """Import, then run whatever is asked, until nobody asks."""
    for name in sys.argv[1].split():
        with suppress(ImportError):  # a test that needs it will say so
            importlib.import_module(name)
    _tell("ready")
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(**order)
        _tell(child)
        _, status = os.waitpid(child, 0)
        _tell(os.waitstatus_to_exitcode(status))


def _run(folder: str, options: list[str], nodes: list[str], log: str) -> None:
    """In the child: pytest in `folder`, all it says in `log`."""
    os.setsid()
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    files = Path(folder) / "tmp"  # of tests: those of one that was killed go before the next run, or with the copy
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(exist_ok=True)
    tempfile.tempdir = None
    os.environ |= {"PYTHONPATH": f"{folder}/tests", "OMP_NUM_THREADS": "1", "TMPDIR": str(files)}
    sys.path[:0] = [f"{folder}/tests", folder]
    forking = _fork_what_forks()
    import pytest

    with suppress(ImportError):
        from host import forked_ranks

        forked_ranks.FORKING._socket, forked_ranks.FORKING._pid = forking, os.getpid()
    status = pytest.main([*options, *nodes], plugins=[InThisOrder(nodes, Path(f"{log}.test"))])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


def _fork_what_forks() -> socket.socket:
    """What host/forked_ranks.py would start, with all that it imports imported here. It begins with the first order."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            ours.close()
            select.select([theirs], [], [])
            from host.forked_ranks import serve

            serve(theirs.detach())
        finally:
            os._exit(0)
    theirs.close()
    return ours


def _tell(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
