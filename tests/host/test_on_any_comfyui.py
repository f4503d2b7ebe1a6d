"""What `make test-host` counts as what, and its exit status."""

import os
import subprocess
import sys
from pathlib import Path

from .tally import TESTS

REFUSED = """from host.client import PromptRefusedError
def test_by_ours(): raise PromptRefusedError({"error": {"message": "Node 'SPConfig' not found", "details": ""}})
def test_by_stock(): raise PromptRefusedError({"error": {"message": "Node 'NewerNode' not found", "details": ""}})
"""
FILES = {
    "test_refused": REFUSED,
    "test_equal": "def test_equal():\n    pass\n",
    "test_stock": "from host.outcomes import StockFailsError\ndef test_it():\n    raise StockFailsError('none')\n",
    "test_wrong": "def test_wrong():\n    raise ValueError('1 is not 2')\n",
    "test_fixture": "import pytest\n@pytest.fixture\ndef host():\n    raise OSError\ndef test_it(host):\n    pass\n",
    "test_import": "import nothing_of_that_name\n",
    "test_dies": "import os\ndef test_dies():\n    os._exit(3)\n",  # with its process
}


def test_whatever_goes_wrong_is_counted_and_is_the_exit_status(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "host.tally", "-q", "-rN", "-n", "1"]
    command += ["--continue-on-collection-errors", "--rootdir", str(tmp_path), "-c", os.devnull]
    command += ["-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode, run.stdout + run.stderr
    row, *counts = run.stdout.splitlines()[-1].split()
    assert (row, counts) == ("all", ["1", "5", "0", "2"]), run.stdout
