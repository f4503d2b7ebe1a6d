"""The pack is updated under a running ComfyUI: one error says so, whatever the newer workers would stumble over."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_runtime import VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# As ComfyUI would: the code is in memory, then an update comes, then the workers start. argv: the update as JSON, by
# file of the runtime: what is replaced, and by what.
PARENT = """
import json, sys
from pathlib import Path
import parallel_runtime
from parallel_runtime.devices import parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.pool.pool import Pool

folder = Path(parallel_runtime.__file__).parent
for name, (old, new) in json.loads(sys.argv[1]).items():
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
with Pool(parse_devices("cpu:1").devices, threads_per_rank=1) as pool:
    try:
        pool.start()
    except PoolError as error:
        print(error)
    print(pool.state)
"""
NEW_VERSION = {"__init__.py": [f'VERSION = "{VERSION}"', 'VERSION = "77.7.7"']}
UPDATES = {
    "the version alone": {},
    "another layout of messages": {"wire/protocol.py": ["\nVERSION = 1\n", "\nVERSION = 200\n"]},
    "other words in a message": {
        "worker/entry.py": ["Hello(pid=", "Hello(process="],
        "wire/replies.py": ["    pid: int\n", "    process: int\n"],
    },
}


@pytest.mark.parametrize(
    "update",
    [pytest.param(each, marks=[] if each == "other words in a message" else [pytest.mark.full]) for each in UPDATES],
)
def test_workers_of_another_version_are_refused_in_one_line(tmp_path: Path, update: str) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "parallel_runtime", tmp_path / "parallel_runtime", ignore=ignored)
    command = [sys.executable, "-c", PARENT, json.dumps(NEW_VERSION | UPDATES[update])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    first, *_, state = done.stdout.splitlines()
    assert first.partition(": ")[2] == (
        f"the pack was updated: ComfyUI runs its version {VERSION}, 77.7.7 is installed; restart ComfyUI"
    )
    assert state == "failed"
