"""What step caches keep between the calls of a run, for ComfyUI's question how much memory a run takes.

Does not own what else it takes, which the models say (remote_hosted.py and its like).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from ...parallel_runtime.planner.counted import CountedModel, kept_by_step_cache
from ...parallel_runtime.stock_caches import kept_bytes
from .run_context import RunContext


def kept_by_caches(run: RunContext, shape: Sequence[int]) -> float:
    """Bytes on one rank for a batch group's latents of `shape` (B, C, ..). Of a first-block cache, where the model was
    counted."""
    numbers, model, work = math.prod(shape[1:]), run.decision.model, run.decision.work
    found = float(kept_bytes(shape[0] * numbers)) if run.stock_cache else 0.0
    if run.step_cache and isinstance(model, CountedModel) and work is not None:
        asked = replace(work, image_tokens=model.image_tokens(numbers), step_cache=True)
        found += shape[0] * kept_by_step_cache(model, asked, run.plan)
    return found
