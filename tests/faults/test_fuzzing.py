"""Whatever bytes come, parsers refuse them in their own words, soon. `make fuzz` tries a million of each, also with -O.

Hypothesis tries the wire as well: tests/pool/test_protocol.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.fuzz.fuzzer import Target, fuzz
from faults.fuzz.marking import Edges, marked_module
from faults.fuzz.targets import control, header, records, wire

ROOT = Path(__file__).resolve().parents[2]
INPUTS = 10_000


TARGETS = {"wire": wire, "records": records, "control": control, "header": header}


@pytest.mark.parametrize("name", TARGETS)
def test_what_reads_bytes_survives_what_reaches_new_code(name, tmp_path):
    target = header(tmp_path) if name == "header" else TARGETS[name]()
    found = fuzz(target, inputs=INPUTS, seed=1)
    assert found.broken == []
    assert found.accepted > 0
    assert found.corpus > len(target.seeds), "nothing new was reached: the fuzzer is blind"


@pytest.mark.full
def test_all_survive_without_assertions_too():
    """Nothing that a message can carry may rest on an `assert`."""
    command = [sys.executable, "-O", "-m", "faults.fuzz", "--inputs", str(INPUTS), "--seed", "2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python -O" in done.stdout
    assert done.stdout.count(f"{INPUTS} inputs") == 4


@pytest.mark.full
def test_the_fuzzer_finds_what_hides_behind_three_steps(tmp_path, monkeypatch):
    """The negative control: by chance alone, three bytes in a row are one in 17 million."""
    (tmp_path / "hiding.py").write_text(
        "def parse(data):\n"
        "    if data[:1] == b'P':\n"
        "        if data[1:2] == b'D':\n"
        "            if data[2:3] == b'i':\n"
        "                raise KeyError('hidden')\n"
        "    return False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    edges = Edges()
    parse = marked_module("hiding", edges).parse
    found = fuzz(Target("hiding", edges, parse, [b"..."]), inputs=1_000_000, seed=3, max_broken=1)
    assert [what for _, what in found.broken] == ["KeyError: 'hidden'"]
    assert fuzz(Target("blind", Edges(), parse, [b"..."]), inputs=100_000, seed=3).broken == []
