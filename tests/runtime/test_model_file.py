"""What a file of weights says of them, read from a file of one weight."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.weights.mapped_file import MappedFile
from parallel_runtime.weights.model_file import ModelFile

SCALE = 0.3  # in bf16 0.30078125


@pytest.mark.parametrize(("device", "scale"), [("cpu", 0.30078125), ("cuda:0", SCALE)])
def test_the_device_that_computes_says_how_a_scale_is_rounded(tmp_path: Path, device: str, scale: float) -> None:
    """Offloaded shards lie on the host, and are scaled there once their block has a LoRA, for a GPU as well."""
    path = str(tmp_path / "one.safetensors")
    save_file({"w": torch.ones(1, 1).to(torch.float8_e4m3fn), "s": torch.tensor(SCALE)}, path)
    file = ModelFile(
        header := read_header(path),
        file=MappedFile(ModelSpec.of(path)),
        names={"w": "w"},
        scales={"w": "s"},
        prefixes=(),
        dtype=torch.bfloat16,
        device=torch.device(device),
    )
    assert header.tensors["w"].dtype == torch.float8_e4m3fn
    on_host = torch.full((1,), 3.0, dtype=torch.bfloat16)  # 3 * 0.3 and 3 * 0.30078125 are two numbers in bf16
    assert file.scaled("w", on_host).item() == torch.tensor(3.0 * scale).bfloat16().item()
