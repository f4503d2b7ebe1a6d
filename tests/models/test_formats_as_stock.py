"""Ranks use the kernels that ComfyUI's own loader would have them use, and move the bytes of weights that it moves.

Owns the expectations by card and format. Does not own how both are counted (formats_as_stock.py), nor that ranks that
share a call agree (test_quantised.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from .formats_as_stock import CARDS, FAST, rows_of
from .ranks import Ranks

# Kernels that multiply in the file's own format, by their names, and the cards that have them. Others widen first.
FP8, INT8, STAND_IN = "aten._scaled_mm", "comfy_kitchen.int8_linear", "stand_in."
PRODUCTS = {
    ("fp8 e4m3", ""): (FP8, ("9.0", "12.0")),
    ("fp8 e4m3", "fp8_matrix_mult"): (FP8, ("9.0", "12.0")),
    ("fp8 plain", "fp8_matrix_mult"): (FP8, ("9.0", "12.0")),
    ("int8, rotated", ""): (INT8, tuple(CARDS)),
    ("nvfp4", ""): (STAND_IN, ("12.0",)),
    ("mxfp8", ""): (STAND_IN, ("12.0",)),
}
MORE_THAN_THE_FILE = 1.2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(comfyui_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What formats_as_stock.py counted, by file, card and --fast."""
    (found,) = comfyui_ranks.run(rows_of, tmp_path_factory.mktemp("stock"), ranks=1)
    return found


def alike(row: dict[str, Any]) -> bool:
    """Whether a rank does what stock does, to the last bit."""
    pairs = [row[name] for name in ("kernels", "moved", "held", "layers", "dtypes")]
    return row["equal"] and all(stock == rank for stock, rank in pairs)


@pytest.mark.parametrize("card", CARDS)
def test_a_rank_uses_the_kernels_of_stock_and_moves_its_bytes(rows: dict[str, Any], card: str) -> None:
    for fast, kinds in FAST.items():
        for kind in set(kinds) - rows["absent"].keys():
            row = rows[f"{kind} | {card} | {fast}"]
            assert alike(row), (kind, fast, row)
            kernel, cards = PRODUCTS.get((kind, fast), ("", ()))
            multiplied = any(name.startswith(kernel) for name in row["kernels"][1]) if kernel else False
            assert multiplied == (card in cards), (kind, fast, row["kernels"])
            if (kind, fast) in PRODUCTS and "plain" not in kind:
                assert bool(row["widened"]) != multiplied, "what the report says of the card is wrong"
            if multiplied:
                assert row["moved"][1] <= MORE_THAN_THE_FILE * row["file"], (kind, fast, row)


def test_a_rank_that_chose_as_for_another_card_would_be_seen(rows: dict[str, Any]) -> None:
    """The control: a rank on a card without products beside stock on one that has them."""
    for kind, fast in PRODUCTS:
        if kind in rows["absent"]:  # from this ComfyUI
            continue
        old, new = (rows[f"{kind} | {card} | {fast}"] for card in ("8.6", "12.0"))
        swapped = new | {name: [new[name][0], old[name][1]] for name in ("kernels", "moved", "held", "layers")}
        assert alike(swapped) == (kind == "int8, rotated"), kind
