"""A video of 12,000 tokens: no rank holds a table of tokens squared, and ranks share what grows with the tokens.

`make long-video` measures 100,000 tokens. Owns: the bound, and that the measure sees a table.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.long_video import Measured, held, measured, peak, video_call, without_exchange, write_wan
from host.fetch import comfyui_path
from host.pack_workflows import TOLERANCE, relative_error
from parallel_runtime.plan import ParallelPlan

CALL, WARM = video_call(12_000), video_call(1000)
TOKENS = CALL.tensors["t0"][0, 0].numel() // 4
TABLE = TOKENS**2  # 142 MB, of one byte a pair
ONE, ULYSSES, RING = ParallelPlan(), ParallelPlan(ulysses=2), ParallelPlan(ring=2)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan file of one block."""
    return write_wan(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def one(wan: Path) -> Measured:
    """The bare module in one process."""
    return run(wan, ONE)


def run(wan: Path, plan: ParallelPlan) -> Measured:
    """The call in ranks of their own."""
    return measured(wan, str(comfyui_path()), plan, CALL, WARM)


@pytest.mark.parametrize("plan", [ULYSSES, RING], ids=lambda plan: plan.name)
def test_no_rank_holds_a_table_of_tokens_squared(plan: ParallelPlan, wan: Path, one: Measured) -> None:
    found = run(wan, plan)
    assert relative_error(found.out, one.out) <= TOLERANCE
    assert max(found.grown) < TABLE / 2, found.grown
    assert max(one.grown) < TABLE / 2, one.grown


def test_four_ranks_hold_less_of_a_long_video_than_one_process(wan: Path, one: Measured) -> None:
    """What is cut is a quarter; the latent, the tokens as they are embedded and their rotary table are whole."""
    assert max(run(wan, ParallelPlan(ulysses=4)).grown) < 0.8 * max(one.grown)


def test_without_exchange_the_result_is_another(wan: Path, one: Measured) -> None:
    wrong = measured(wan, str(comfyui_path()), ULYSSES, without_exchange(CALL), WARM)
    assert relative_error(wrong.out, one.out) > 100 * TOLERANCE


def test_the_measure_sees_a_table_that_is_gone_again() -> None:
    before = held(os.getpid())
    Path("/proc/self/clear_refs").write_text("5")
    del (table := [torch.ones(TOKENS, TOKENS, dtype=torch.bool)])[:]
    assert table == []
    assert peak(os.getpid()) - before > 0.9 * TABLE  # the system counts pages roughly
    assert held(os.getpid()) - before < TABLE / 2
