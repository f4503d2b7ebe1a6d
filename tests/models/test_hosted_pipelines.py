"""PipeFusion of ComfyUI's own classes: exact in warm-up, then what one process with keys of the step before computes.

Owns the bounds, and which classes are refused stages. How a pipeline and its simulation run is pipelines.py's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_runtime.models.specs import SPECS

from .conftest import run_ranks

ERROR = 1e-5  # fp32, relative to the whole output: what another order of additions explains
STALE = 1e-4  # a pipeline that differed less from the module itself would not show that its keys are old

# Streams of one kind and of two, a mask, residuals between blocks, a row a frame, a grid, a refiner before the stages.
CASES = (
    *("PixArt alpha", "SD3.5 medium, ControlNet", "Qwen-Image, text mask", "Wan 5B, a timestep for each frame"),
    *("Z-Image", "Cosmos Predict2, an upright image (Anima)"),
)
UNSTAGED = {  # the class's name -> a word of the reason
    "HunYuanDiT": "long skips",
    "HunYuanDiTPlain": "long skips",
    "VaceWanModel": "take turns",
    "WanModel_S2V": "audio_injector needs all tokens",
    "AnimateWanModel": "face_adapter",
    "WanDancerModel": "music_injector",
    "GeneralDIT": "pos_embedder",
    "HiDreamImageTransformer2DModel": "other text",
    "HiDreamO1Transformer": "attend to themselves alone",
    "NextDiTPixelSpace": "dec_net",
    "WanAnimate2Model": "the pose first",
    "MiniMaxMusic3DiT": "one part of the sound after another",
    "QwenImage21Transformer2DModel": "keys of all tokens",
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [CASES, pytest.param((), id="all", marks=pytest.mark.full)])
def test_a_pipeline_is_exact_in_warm_up_and_as_stale_as_one_process_after_it(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    run_ranks("pipeline_ranks", tmp_path, "2,4", *names)
    for kind in ("2-ulysses", "4-ulysses", "4-ring"):
        rows = json.loads((tmp_path / f"{kind}.json").read_text())
        assert set(rows) == set(names or rows) and len(rows) >= len(CASES)
        wrong = {name: row for name, row in rows.items() if not max(row["warm"], row["simulated"]) <= ERROR}
        assert not wrong, (kind, wrong)
        exact = {name: row["stale"] for name, row in rows.items() if not row["stale"] > STALE}
        assert not exact, (kind, exact)


def test_classes_that_cannot_be_staged_say_why() -> None:
    reasons = {path.rpartition(".")[2]: plan.one_stage for path, plan in SPECS.items() if plan.one_stage}
    assert reasons.keys() == UNSTAGED.keys()
    assert all(word in reasons[name] for name, word in UNSTAGED.items()), reasons
