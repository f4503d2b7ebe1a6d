"""A process that has imported what tests import, and forks for each run of pytest: imports take longer than most tests.

Speaks JSON, one value a line: of `{"folder", "arguments", "log"}` it says the child's process id and, at its end, its
exit status. Owns the fork. Imports nothing of the product, or a mistake in it would not be seen.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress

LARGE = (
    "torch",
    "torch.distributed",
    "safetensors.torch",
    "yunchang",
    "diffusers.models.transformers.transformer_flux",
)
SMALL = ("numpy", "PIL.Image", "hypothesis", "pytest", "pytest_timeout", "psutil", "playwright.sync_api", "aiohttp")


def serve() -> None:
    """Import, then run whatever is asked, until nobody asks."""
    for name in (*LARGE, *SMALL):
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


def _run(folder: str, arguments: list[str], log: str) -> None:
    """In the child: pytest in `folder`, all it says in `log`."""
    os.setsid()
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["PYTHONPATH"] = f"{folder}/tests"
    sys.path[:0] = [f"{folder}/tests", folder]
    import pytest

    status = pytest.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


def _tell(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
