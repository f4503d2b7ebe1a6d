"""Hooks on ComfyUI's classes: what is refused, what is left behind, when ranks speak, and attention's every argument.

Owns: that no check of checks.py finds anything on any rank. Does not own: parity of models (test_hosted_parity.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from . import (  # noqa: F401  which add to them
    checks_build,
    checks_keeper,
    checks_kept,
    checks_layouts,
    checks_patches,
    checks_unets,
    checks_whole,
    checks_words,
)
from .checks import CHECKS
from .shared_inputs import watched

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", CHECKS)
def test_every_rank_finds_that(results: Path, check: str, ranks: int) -> None:
    for rank in range(ranks):
        found = json.loads((results / f"checks-{ranks}-{rank}.json").read_text())[check]
        assert not found, f"rank {rank}: {found}"


def test_no_class_writes_to_a_tensor_between_two_layers_that_it_gives_it_to(results: Path) -> None:
    """What ranks exchange once for both, a scale of it, would be another for the second."""
    given = json.loads((results / "given.json").read_text())
    assert not {name: each["changed"] for name, each in given.items() if each["changed"]}
    assert sum(bool(each["shared"]) for each in given.values()) > len(given) // 2, "layers of q, k and v are not seen"


class Writes(torch.nn.Module):
    """Gives two layers the same tensor, and writes to it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, 4), which it changes."""
        out = self.first(x) + self.second(x)
        return out + self.third(x.add_(1))


def test_a_write_between_two_layers_would_be_seen() -> None:
    with torch.inference_mode(), watched(model := Writes()) as found:
        model(torch.ones(2, 4))
    assert (found.shared, found.changed) == (["second", "third"], ["third"])
