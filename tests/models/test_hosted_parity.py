"""ComfyUI's own classes shared by 2 and 3 ranks equal the same module in one process.

Owns: the bound and the negative control, for every case of tiny.py. Does not own: which cases there are, how ranks run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from host.outcomes import RefusedError, StockFailsError

from .cases import CASES

ERROR = 1e-5  # fp32, relative to the whole output: what another order of additions explains
CONTROL = 1e-3  # without exchange a case must be this wrong, or it would not notice

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_a_shared_model_equals_the_same_module_in_one_process(results: Path, name: str, ranks: int) -> None:
    left_out = json.loads((results / "left_out.json").read_text())
    if name in left_out["stock fails"]:
        raise StockFailsError(left_out["stock fails"][name])
    if name in left_out["refused"]:
        raise RefusedError(left_out["refused"][name])
    row = json.loads((results / f"{ranks}.json").read_text())[name]
    assert "failed" not in row, row["failed"]
    assert row["error"] <= ERROR
    assert row["whole"] == 0, "with the hooks inactive the model is as it was"
    assert row["attentions"] > 0, "no attention call went through the group"
    assert row["chunks"], "heads in chunks give other bits than all at once"
    assert row["control"] > CONTROL, "without exchange the case must be wrong"


def test_loras_beside_every_layer_of_each_class_equal_merged_ones(results: Path) -> None:
    """A class that reads a layer's weight itself would compute without the LoRA."""
    rows = json.loads((results / "loras.json").read_text())
    assert rows
    for name, row in rows.items():
        assert row["layers"] and row["moved"] > CONTROL, f"{name}: {row}"
        assert row["error"] <= ERROR, f"{name}: {row}"
