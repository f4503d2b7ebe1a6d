"""A step cache of ComfyUI's that does not fit its run is refused. What one skips is families/test_step_caches.py's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from host.hosted_runs import euler, make_run
from parallel_runtime.stock_caches import StockCache

STEPS = 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"looked_at": None}, "belong together"),
        ({"looked_at": torch.ones(1, 72, 3, dtype=torch.bool)}, "give bool of shape"),
        ({"cache": StockCache(easy=False, threshold=0.1, calls="m")}, "a step cache for 1 calls, the run makes 10"),
    ],
)
def test_caches_that_do_not_fit_the_run_are_refused(change: dict, words: str) -> None:
    run = make_run(texts=(7, 7), recurrence=euler(STEPS))
    cache = StockCache(easy=False, threshold=0.5, calls="nnmmmmmmm-")
    run = replace(run, cfg=1.5, cache=cache, looked_at=torch.ones(1, *run.shape[1:], dtype=torch.bool))
    with pytest.raises(ValueError, match=words):
        replace(run, **change)
    with pytest.raises(ValueError, match="calls 'x' of a step cache"):
        StockCache(easy=False, threshold=0.1, calls="x")
