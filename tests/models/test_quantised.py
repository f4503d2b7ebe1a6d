"""Files in ComfyUI's quantised formats, shared by ranks, equal the same module in one process; bad ones are refused.

Owns: the bounds and the controls for every kind of file, replicated and sharded, with a LoRA and when it is taken back.
Does not own: which kinds there are (host/quantised.py), how ranks run, stock ComfyUI beside them (families/).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from host.formats import allowed_by
from host.outcomes import StockFailsError

from .conftest import run_ranks
from .quantised_ranks import CASES, LAYOUTS, ON_A_GPU, SOME

ERROR = 1e-5
# Layers of these round what they are given, to 255 values or to 15. A last digit, which another order of additions
# moves, sends a number to the other side of a step. By how much that moves the output differs by processor, so the
# bound is what one process moves by here with other exact kernels and numbers of threads; at least one such step.
ROUNDED = 1e-2
ROUND_INPUTS = ("int8", "w4a4", "mixed")
CONTROL = 0.1  # without exchange each case must be this wrong
OWN_SCALES = 3e-2  # and this, where each rank takes a scale from its own tokens
NO_LAYERS = 18_000  # bytes in fp32 of Wan's modulations, which nothing casts where it is used
# Layers of two blocks: q, k, v and the output twice, and two of the MLP; q, k and v of the image's tokens have one
# exchange together, and k and v of the text's. Where each channel is smoothed before, each layer rounds its own.
LAYERS, TOGETHER = 2 * 10, 2 * 7
FROM_ALL_TOKENS = [f"{kind}{ON_A_GPU}" for kind in ("nvfp4", "nvfp4, smoothed")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that quantised_ranks.py wrote, of 2 ranks and some cases."""
    return run_ranks("quantised_ranks", tmp_path_factory.mktemp("quantised"), "2", "some")


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 2 and of 3 ranks, and all cases."""
    return run_ranks("quantised_ranks", tmp_path_factory.mktemp("quantised"), "2,3", "all", timeout_s=900)


def judge(folder: Path, ranks: int, case: str, layout: str) -> None:
    left_out = json.loads((folder / "left_out.json").read_text())
    if case in left_out:
        raise StockFailsError(left_out[case])
    row = json.loads((folder / f"{ranks}.json").read_text())[f"{case} | {layout}"]
    moved = json.loads((folder / "moved.json").read_text())[case]
    rounds = case.startswith(ROUND_INPUTS) or case.endswith(ON_A_GPU)
    bound = allowed_by(moved, least=ROUNDED) if rounds else ERROR
    assert bound < CONTROL, "one process moves so far that a wrong plan would pass"
    assert max(row["plain"], row["LoRA"], row["beside"], row.get("cfg", 0.0)) <= bound, row
    lora = json.loads((folder / "rounded.json").read_text())[case]
    assert rounds or lora["beside"] <= ERROR, "a LoRA beside a weight rounds it"
    assert not row["taken back"], "a LoRA was not taken back to the last bit"
    assert row["bytes elsewhere"] <= NO_LAYERS, "weights are held beside the file's pages"
    assert row["LoRA changes"] > CONTROL and row["control"] > CONTROL, row
    asks = LAYERS if case in FROM_ALL_TOKENS else 0
    together = TOGETHER if case == FROM_ALL_TOKENS[0] else asks
    assert (row["exchanged"], row["exchanged, unwatched"]) == (together, asks), row
    for name in row.keys() & {"own scales", "cfg, own scales"}:
        assert (row[name] > OWN_SCALES) == (case in FROM_ALL_TOKENS), row


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SOME)
def test_a_shared_file_equals_the_same_module_in_one_process(results: Path, case: str, layout: str) -> None:
    judge(results, 2, case, layout)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_file_of_each_kind_equals_the_same_module_in_one_process(
    all_results: Path, case: str, layout: str, ranks: int
) -> None:
    judge(all_results, ranks, case, layout)


def test_every_rank_finds_nothing_wrong_with_scales_and_refusals(results: Path) -> None:
    for rank in range(2):
        found = json.loads((results / f"checks-2-{rank}.json").read_text())
        wrong = {name: text for name, text in found.items() if text}
        if wrong and all(StockFailsError.__name__ in text for text in wrong.values()):
            raise StockFailsError(", ".join(wrong))  # of a format that this ComfyUI does not have
        assert found and not wrong, f"rank {rank}: {wrong}"
