"""What `make test-host` counts as what, its exit status, and which packages it asks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.layered import name_of, required, unconstrained

from .client import PromptRefusedError
from .outcomes import RefusedError, StockFailsError
from .tally import EQUAL, REFUSED, STOCK_FAILS, TESTS, WRONG, outcome

OF_STOCK = {"error": {"message": "Node 'NewerNode' not found", "details": ""}}
OF_OURS = {"error": {"message": "Node 'SPConfig' not found", "details": ""}}


def with_errors(*kinds: str) -> dict:
    """The body of a refused prompt, in which a value of these nodes is wrong."""
    wrong = [{"message": "Value not in list", "details": "codec: 'av1' not in ['h264']"}]
    return {"node_errors": {str(n): {"class_type": kind, "errors": wrong} for n, kind in enumerate(kinds)}}


def with_link(node_id: str) -> dict:
    """The same, where another node hands on another type."""
    body = with_errors("KSampler")
    body["node_errors"]["0"]["errors"][0]["extra_info"] = {"linked_node": [node_id, 0]}
    return body


@pytest.mark.parametrize(
    ("error", "part", "found"),
    [
        (None, "families", EQUAL),
        (None, "refusals", REFUSED),
        (AssertionError("differs"), "families", WRONG),
        (ValueError("no plan"), "nodes", WRONG),
        (StockFailsError("no such sampler"), "flux", STOCK_FAILS),
        (RefusedError("no plan"), "modules", REFUSED),
        (PromptRefusedError(OF_STOCK), "workflows", STOCK_FAILS),
        (PromptRefusedError(OF_OURS), "workflows", WRONG),
        (PromptRefusedError(with_errors("SaveVideo")), "workflows", STOCK_FAILS),
        (PromptRefusedError(with_errors("SaveVideo", "SPConfig")), "workflows", WRONG),
        (PromptRefusedError(with_link("7"), {"7": {"class_type": "CLIPTextEncode"}}), "workflows", STOCK_FAILS),
        (PromptRefusedError(with_link("7"), {"7": {"class_type": "SPConfig"}}), "workflows", WRONG),
        (PromptRefusedError({"error": {"message": "prompt has no outputs", "details": ""}}), "workflows", WRONG),
    ],
)
def test_each_end_of_a_test_is_counted_as_what_it_is(error: Exception | None, part: str, found: str) -> None:
    assert outcome(error, part) == found


FILES = {
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
    assert (row, counts) == ("all", ["1", "4", "0", "1"]), run.stdout


def test_a_package_that_is_asked_for_replaces_what_the_tree_and_the_constraints_say() -> None:
    lines = ["torch", "comfy-kitchen==0.2.31", "numpy>=1.25.0", "comfy_aimdo==0.4.13"]
    assert required(lines, ["comfy-kitchen==0.2.40", "comfy-aimdo"]) == ["torch", "numpy>=1.25.0"]
    constraints = "# of tests\ntorch==2.13.0\ntorchvision==0.28.0\ndiffusers==0.42.*; python_version >= '3.11'\n"
    assert unconstrained(constraints, ["torch"]) == "# of tests\ndiffusers==0.42.*; python_version >= '3.11'\n"
    assert unconstrained(constraints, ["comfy-kitchen"]) == constraints
    assert name_of("Comfy_Kitchen>=0.2") == name_of("comfy-kitchen") == "comfy-kitchen"
