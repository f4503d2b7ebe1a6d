"""A video of 12,000 tokens: no rank holds a table of tokens squared (`make long-video` measures 100,000)."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks.long_video import held, measured, peak, video_call, write_wan
from host.fetch import comfyui_path
from parallel_runtime.plan import ParallelPlan

CALL, WARM = video_call(12_000), video_call(1000)
TOKENS = CALL.tensors["t0"][0, 0].numel() // 4
TABLE = TOKENS**2  # 142 MB, of one byte a pair


@pytest.mark.full
def test_no_rank_holds_a_table_of_tokens_squared_and_four_hold_less_than_one(tmp_path: Path) -> None:
    """What is cut is a quarter; the latent, the tokens as they are embedded and their rotary table are whole."""
    wan, comfyui = write_wan(tmp_path), str(comfyui_path())
    plans = (ParallelPlan(), ParallelPlan(ring=2), ParallelPlan(ulysses=4))
    one, ring, ulysses = (max(measured(wan, comfyui, plan, CALL, WARM).grown) for plan in plans)
    assert max(one, ring, ulysses) < TABLE / 2, (one, ring, ulysses)
    assert ulysses < 0.8 * one


def test_the_measure_sees_a_table_that_is_gone_again() -> None:
    before = held(os.getpid())
    Path("/proc/self/clear_refs").write_text("5")
    del (table := [torch.ones(TOKENS, TOKENS, dtype=torch.bool)])[:]
    assert table == []
    assert peak(os.getpid()) - before > 0.9 * TABLE  # the system counts pages roughly
    assert held(os.getpid()) - before < TABLE / 2
