"""What ComfyUI rounds before its model sees a step is what we send, and what `cast_inputs` gives who has no ComfyUI.

To the last bit, in each dtype. What is run is host/trace_rounding.py's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from host.fetch import comfyui_path
from host.tiny_models import write_flux
from parallel_runtime.models.flux.adapter import timestep_embedding
from parallel_runtime.models.flux.family import FluxModel
from parallel_runtime.models.flux.sample import sample_config

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "trace_rounding.py"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDED = {"img", "txt", "y", "guidance", "mask"}
AS_GIVEN = {"timesteps", "img_ids", "txt_ids", "control_in.0"}


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """By dtype the tensors of the script's step, by name."""
    folder = tmp_path_factory.mktemp("rounding")
    model = write_flux(folder / "flux.safetensors", hidden=256, depth=1, single=1, in_channels=96)
    command = [sys.executable, str(SCRIPT), str(comfyui_path()), str(model), str(folder / "out.safetensors")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, dict[str, torch.Tensor]] = {dtype: {} for dtype in DTYPES}
    for name, tensor in load_file(folder / "out.safetensors").items():
        dtype, _, name = name.partition(".")
        found[dtype][name] = tensor
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_sent_as_comfyui_rounds_it(sent: dict[str, dict[str, torch.Tensor]], dtype: str) -> None:
    ours = {name: tensor for name, tensor in sent[dtype].items() if not name.startswith("embedding.")}
    assert set(ours) == ROUNDED | AS_GIVEN
    given = {name: sent["float32"][name] for name in ours}
    rows = ours["timesteps"].shape[0]
    given |= {name: given[name][:rows] for name in given if name not in ("mask", "img_ids", "txt_ids")}
    for name, expected in FluxModel(sample_config()).cast_inputs(given, DTYPES[dtype]).items():
        assert ours[name].dtype == expected.dtype == (DTYPES[dtype] if name in ROUNDED else torch.float32), name
        assert torch.equal(ours[name], expected), name
        if name in ROUNDED and dtype != "float32":
            assert not torch.equal(ours[name].float(), given[name]), f"{name} holds nothing that {dtype} rounds"


@pytest.mark.parametrize("dtype", DTYPES)
def test_timesteps_and_guidance_become_the_sinusoids_of_comfyui(
    sent: dict[str, dict[str, torch.Tensor]], dtype: str
) -> None:
    for name in ("timesteps", "guidance"):
        expected = sent[dtype][f"embedding.{name}"]
        assert torch.isfinite(expected).all()
        assert torch.equal(timestep_embedding(sent[dtype][name]).to(DTYPES[dtype]), expected), name
        whole = timestep_embedding(sent["float32"][name][: len(expected)]).to(DTYPES[dtype])
        if name == "guidance" and dtype != "float32":
            assert not torch.equal(whole, expected), f"{dtype} rounds none of these"
